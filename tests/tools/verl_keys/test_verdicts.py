# SPDX-License-Identifier: Apache-2.0
"""Every key of the pinned verl has a verdict, and the shipped table is current."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from recipe.async_pipeline.config.keys.older_verl import MOVED
from recipe.async_pipeline.config.keys.without_effect import WITHOUT_EFFECT, is_below
from recipe.async_pipeline.errors import PatchError
from recipe.async_pipeline.installed.verl import patches_dir
from recipe.async_pipeline.tools.patches import verl_source
from recipe.async_pipeline.tools.verl_keys.reads import KeyRead, Unit
from recipe.async_pipeline.tools.verl_keys.verdicts import DECIDED, FILE, VerlKeys, as_text, of_tree, verdicts

from .conftest import MakeSources

TREE: Mapping[str, Any] = {
    "trainer": {
        "nnodes": 1,
        "use_v1": True,
        "balance_batch": True,
        "folder": "${trainer.named}",
        "named": "a",
    },
    "actor": {"_target_": "verl.a.PartConfig", "long_name": 1, "n": 1},
    "rollout": {"n": 1},
}


@pytest.mark.slow
def test_the_shipped_table_is_current() -> None:
    folder = patches_dir()
    try:
        root = verl_source.default_verl_root(folder)
        verl_source.check_version(root, verl_source.read_pin(folder))
    except PatchError as error:
        pytest.skip(f"reads the pinned verl: {error}")
    now = as_text(of_tree(root, folder))
    assert (folder / FILE).read_text(encoding="utf-8") == now, "run `bash run_scripts/fix.sh`"


def shipped() -> dict[str, str]:
    lines = (patches_dir() / FILE).read_text(encoding="utf-8").splitlines()
    return dict(line.split("\t") for line in lines)


def test_every_key_has_a_verdict() -> None:
    without = [path for path, verdict in shipped().items() if verdict.endswith(": None")]
    assert without == [], "add a reason to config/keys/without_effect.py, or a verdict to DECIDED"


def test_every_row_by_hand_is_needed() -> None:
    found = shipped()
    lost = [path for path, verdict in found.items() if verdict.startswith("without effect")]
    rows = [name for name in WITHOUT_EFFECT if name not in MOVED]
    assert [name for name in rows if not any(is_below(path, name) for path in lost)] == []
    assert [name for name in DECIDED if not any(is_below(path, name) for path in found)] == []


def unit(*reads: KeyRead) -> Unit:
    return Unit(module="verl.b", owner="", name="f", words=frozenset(), reads=frozenset(reads))


@pytest.mark.parametrize(
    ("path", "read", "is_read"),
    [
        ("actor.n", KeyRead(("?", "actor", "n")), True),
        ("actor.n", KeyRead(("actor_config", "n")), True),
        ("actor.n", KeyRead(("@PartConfig", "n")), True),
        ("rollout.n", KeyRead(("@PartConfig", "n")), False),
        ("rollout.n", KeyRead(("?", "actor", "n")), False),
        ("rollout.n", KeyRead(("?", "n")), False),
        ("actor.long_name", KeyRead(("?", "long_name")), True),
        ("actor.long_name", KeyRead(("?", "rollout", "long_name")), False),
        ("actor.n", KeyRead(("?", "actor"), True), True),
        ("rollout.n", KeyRead(("?", "actor"), True), False),
    ],
)
def test_a_chain_belongs_to_a_key(sources_of: MakeSources, path: str, read: KeyRead, is_read: bool) -> None:
    sources = sources_of({"verl/a.py": "class PartConfig: ...\n"})
    assert VerlKeys([TREE], sources).is_read(path, read) == is_read


def test_verdicts(sources_of: MakeSources) -> None:
    reads = unit(KeyRead(("?", "trainer", "nnodes")), KeyRead(("?", "trainer", "folder")))
    found = verdicts(VerlKeys([TREE], sources_of({})), [reads], [unit(KeyRead(("?", "rollout", "n")))])
    assert found["trainer.nnodes"] == "read by verl: verl/b.py:f"
    assert found["trainer.named"] == "read by verl: verl/b.py:f through trainer.folder"
    assert found["rollout.n"] == "read by us: verl/b.py:f"
    assert found["trainer.use_v1"] == "refused: must be True"
    assert found["trainer.balance_batch"].startswith("without effect: verl's V1 trainer balances")
    assert found["actor.n"] == "without effect: None"
