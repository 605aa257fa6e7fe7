# SPDX-License-Identifier: Apache-2.0
"""Names of verl's keys that resemble a misspelled one, without an import of verl."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from recipe.async_pipeline.config.keys.overrides import explain_complaint
from recipe.async_pipeline.errors import PatchError
from recipe.async_pipeline.verl_bridge.rules import verl_keys
from recipe.async_pipeline.verl_bridge.rules.verl_keys import is_read, is_read_in, near_key


@pytest.fixture(autouse=True)
def unread() -> Iterator[None]:
    """Read verl's files again, before and after each test."""
    verl_keys.verl_trees.cache_clear()
    yield
    verl_keys.verl_trees.cache_clear()


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "verl" / "trainer" / "config"
    folder.mkdir(parents=True)
    text = "trainer: {total_training_steps: null}\nactor_rollout_ref: {rollout: {name: vllm}}\n"
    (folder / "_generated_ppo_trainer.yaml").write_text(text)
    monkeypatch.setattr(verl_keys, "find_verl_root", lambda: tmp_path)
    return tmp_path


@pytest.mark.usefixtures("tree")
@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("trainer.total_training_stesp", "total_training_steps"),
        ("actor_rollout_ref.rollout.nmea", "name"),
        ("trianer", None),
        ("trianer.total_training_steps", "trainer.total_training_steps"),
        ("actor_rollout_ref.rollot.nmea", "actor_rollout_ref.rollout.name"),
        ("trainer.nope", None),
        ("trianer.nope", "trainer"),
        ("nowhere.name", None),
        ("trainer.v1.async_pipeline.name", None),
    ],
)
def test_a_misspelled_key_has_a_near_one(path: str, near: str | None) -> None:
    assert near_key(path) == near


@pytest.mark.usefixtures("tree")
def test_a_misspelled_key_is_not_advised_with_a_plus() -> None:
    complaint = "Could not override 'actor_rollout_ref.rollout.nmea'."
    assert explain_complaint(complaint, near_key) == (
        "actor_rollout_ref.rollout.nmea is not a key of this config; did you mean 'name'?"
    )
    assert "write +trainer.nope=... to add it" in str(
        explain_complaint("Could not override 'trainer.nope'.", near_key)
    )


def test_a_key_is_read_if_its_names_are_words_of_the_source(tree: Path) -> None:
    (tree / "verl" / "module.py").write_text("config.trainer.total_epochs")
    assert is_read("trainer.total_epochs")
    assert is_read("ray_kwargs.ray_init._temp_dir"), "Ray reads it"
    assert not is_read("trainer.epochs") and not is_read("retriever.total_epochs")


@pytest.mark.parametrize(
    ("section", "names"),
    [
        ("trainer", "total_epochs test_freq nnodes"),
        ("data", "gen_batch_size prompt_key"),
        ("reward", "num_workers"),
        ("", "trainer"),
        ("actor_rollout_ref.actor", "lr"),
    ],
)
def test_a_key_of_a_section_is_read_where_that_is_named(tree: Path, section: str, names: str) -> None:
    (tree / "verl" / "utils" / "dataset").mkdir(parents=True)
    (tree / "verl" / "utils" / "dataset" / "rows.py").write_text('self.config.get("prompt_key")')
    (tree / "verl" / "module.py").write_text(
        'config.trainer.total_epochs, config.trainer.get("test_freq"), config.trainer["nnodes"], optim.lr\n'
        'config.data.gen_batch_size, data.batch_size, OmegaConf.select(config, "reward.num_workers")'
    )
    assert [name for name in names.split() if not is_read_in(section, name)] == []
    assert not is_read_in(section, "batch_size") or section.startswith("actor")
    assert not is_read_in(section, "nothing")


def test_without_verl_nothing_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise PatchError("verl is not importable here")

    monkeypatch.setattr(verl_keys, "find_verl_root", missing)
    assert near_key("trainer.total_training_stesp") is None and is_read("trainer.nope")
