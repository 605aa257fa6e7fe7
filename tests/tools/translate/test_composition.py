# SPDX-License-Identifier: Apache-2.0
"""A file is composed as its own launcher does it; what cannot be composed is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.tools.translate.composition import composed

FILES = {
    "run/main.yaml": "defaults:\n  - ../shared/games@_here_\n  - model: small\n  - _self_\n"
    "turns: 4\nsteps: 1\ngames:\n  chess: ${all.chess}\n",
    "run/model/small.yaml": "width: 8\n",
    "run/model/large.yaml": "# @package _global_\nmodel:\n  width: 64\n",
    "shared/games.yaml": "turns: 9\nall:\n  chess:\n    turns: ${turns}\n",
}


@pytest.fixture
def main(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "run" / "main.yaml"


def written(folder: Path, text: str) -> Path:
    file = folder / "a.yaml"
    file.write_text(text)
    return file


def test_parents_groups_and_interpolations_are_composed(main: Path) -> None:
    document, variables, problems = composed(main)
    assert document == {
        "turns": 4,
        "all": {"chess": {"turns": 4}},
        "model": {"width": 8},
        "steps": 1,
        "games": {"chess": {"turns": 4}},
    }
    assert variables == {"turns", "all.chess"} and problems == ()


def test_overrides_choose_groups_set_add_and_delete(main: Path) -> None:
    found = composed(
        main, ["model=large", "turns=5", "+extra.deep=[1,2]", "new.key=a", "~steps", "~gone.key"]
    )
    assert found.document["model"] == {"width": 64}
    assert found.document["games"] == {"chess": {"turns": 5}}
    assert found.document["extra"] == {"deep": [1, 2]} and found.document["new"] == {"key": "a"}
    assert "steps" not in found.document
    assert [problem.split(":")[0] for problem in found.problems] == ["~gone.key"]


def test_a_group_of_a_parent_that_is_not_there_is_added(main: Path) -> None:
    (main.parent / "engine").mkdir()
    (main.parent / "engine" / "large.yaml").write_text("# @package _global_\nengine: large\n")
    assert composed(main, ["engine=large"]).document["engine"] == "large"


def test_overrides_need_no_file() -> None:
    found = composed(None, ["a.b=1", "+c=x", "rllm/backend=verl"])
    assert found.document == {"a": {"b": 1}, "c": "x"}
    assert found.problems[0].startswith("rllm/backend=verl: no folder")


def test_a_parent_that_is_not_there_is_named_and_the_rest_is_composed(tmp_path: Path) -> None:
    file = written(
        tmp_path, "defaults:\n  - base/lost@_here_\n  - db: gone\n  - _self_\na: 1\nb: ${lost.key}\n"
    )
    found = composed(file)
    assert found.document == {"db": {}, "a": 1, "b": "${lost.key}"}
    parents = sorted(problem.split(":")[0] for problem in found.problems[:2])
    assert parents == ["base/lost", "db/gone"]
    assert found.problems[2].startswith("b=${lost.key}: Interpolation key 'lost.key' not found")


def test_verls_own_configuration_is_no_parent_to_translate(tmp_path: Path) -> None:
    text = (
        "hydra:\n  searchpath:\n    - pkg://verl.trainer.config\ndefaults:\n  - ppo_megatron_trainer\n"
        "  - _self_\ntrainer:\n  name: ${data.path}\n"
    )
    found = composed(written(tmp_path, text))
    assert found.document["model_engine"] == "megatron"
    assert found.document["trainer"] == {"name": "${data.path}"}
    assert len(found.problems) == 1 and "verl's own" in found.problems[0]
    assert found.document["hydra"] == {"searchpath": ["pkg://verl.trainer.config"]}


def test_the_time_and_the_environment_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOUR", "green")
    monkeypatch.delenv("SHADE", raising=False)
    file = written(tmp_path, "a: run-${now:%Y}\nb: ${oc.env:COLOUR}\nc: ${oc.env:SHADE}\nd: [1, 2]\n")
    found = composed(file)
    assert found.document["a"].startswith("run-2") and found.document["b"] == "green"
    assert found.document["c"] == "${oc.env:SHADE}" and found.document["d"] == [1, 2]
    assert len(found.problems) == 1 and "c=${oc.env:SHADE}" in found.problems[0]


def test_a_file_of_a_group_has_its_keys_in_a_section(tmp_path: Path) -> None:
    folder = tmp_path / "rllm"
    folder.mkdir()
    file = written(folder, "agent:\n  steps: 2\nname: ${rllm.agent.steps}\n")
    assert composed(file, group="rllm").document == {"rllm": {"agent": {"steps": 2}, "name": 2}}
    assert list(composed(file).document) == ["agent", "name"]
    whole = written(folder, "rllm:\n  agent: {steps: 2}\ndata: {seed: 1}\n")
    assert [*composed(whole, group="rllm").document] == ["rllm", "data"], (
        "a clone's folder has that name, too"
    )


def test_hydras_own_state_stays_as_it_was(tmp_path: Path) -> None:
    composed(written(tmp_path, "defaults:\n  - lost\n"))
    assert "lost.yaml" not in ConfigStore.instance().repo


@pytest.mark.parametrize(
    ("text", "overrides", "match"),
    [
        ("- 1\n", [], "must be a mapping of keys"),
        ("a: [1\n", [], "cannot be read"),
        ("a: ${b\n", [], "a.yaml"),
        ("a: 1\n", ["b=[1"], "cannot be parsed"),
        ("a: 1\n", ["a=1,2"], "a.yaml"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(
    text: str, overrides: list[str], match: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=match) as error:
        composed(written(tmp_path, text), overrides)
    assert "\n" not in str(error.value)


def test_only_files_that_hydra_reads_are_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"end in \.yaml"):
        composed(tmp_path / "a.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        composed(tmp_path / "none.yaml")
