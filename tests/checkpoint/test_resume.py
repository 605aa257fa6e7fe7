# SPDX-License-Identifier: Apache-2.0
"""The checkpoint to resume from is chosen, and errors are reported, before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from recipe.async_pipeline.checkpoint.resume import (
    Origin,
    check_keys,
    check_ledger,
    identity_of,
    model_of,
    origin_of,
)
from recipe.async_pipeline.checkpoint.store import begin, publish
from recipe.async_pipeline.config.knobs.schema import AsyncPipelineConfig
from recipe.async_pipeline.config.paths import OWN
from recipe.async_pipeline.config.placement import placement_of
from recipe.async_pipeline.errors import CheckpointError, ConfigError
from tests.refusals import Refused, cases_of


def config(root: Path, **trainer: Any) -> dict[str, Any]:
    return {
        "data": {"train_batch_size": 16},
        "actor_rollout_ref": {
            "model": {"path": "some/model"},
            "actor": {"strategy": "fsdp2"},
            "rollout": {"n": 8, "nnodes": 1, "n_gpus_per_node": 1, "tensor_model_parallel_size": 1},
        },
        "trainer": {
            "project_name": "p",
            "resume_mode": "auto",
            "save_freq": -1,
            "resume_from_path": None,
            "default_local_dir": str(root),
            "nnodes": 1,
            "n_gpus_per_node": 1,
            **trainer,
        },
    }


ALIKE = {"max_lag": "staleness.max_lag"}


def origin(raw: dict[str, Any], lines: list[str] | None = None, **knobs: Any) -> Origin:
    own = AsyncPipelineConfig.of({ALIKE.get(name, name): value for name, value in knobs.items()})
    placement = placement_of(raw, own.pools, ["logp"], "pools")
    run_dir = Path(raw["trainer"]["default_local_dir"]) / "run"
    return origin_of(raw, own, placement, "0.9.1", run_dir, (lines if lines is not None else []).append)


def saved(root: Path, step: int, **knobs: Any) -> Path:
    made = origin(config(root, resume_mode="disable"), **knobs)
    part = begin(root, step)
    (part / "x").write_text("x")
    return publish(
        part, step=step, run=made.run, identity=made.identity, saved_unix=1.0, epoch=made.epoch, record=1
    )


def test_a_new_run_gets_a_name_and_a_resumed_one_keeps_it(tmp_path: Path) -> None:
    first = origin(config(tmp_path))
    assert first.found is None
    assert first.run != origin(config(tmp_path)).run
    folder = saved(tmp_path, 4)
    again = origin(config(tmp_path))
    assert again.found is not None and again.found.folder == folder
    assert again.run == again.found.manifest.run


def test_resume_mode_disable_starts_fresh(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    assert origin(config(tmp_path, resume_mode="disable")).found is None


def test_resume_path_uses_that_checkpoint_or_fails(tmp_path: Path) -> None:
    older, newer = saved(tmp_path, 4), saved(tmp_path, 8)
    requested = config(tmp_path / "elsewhere", resume_mode="resume_path", resume_from_path=str(older))
    found = origin(requested).found
    assert found is not None and found.folder == older
    (older / "x").write_text("y")
    assert origin(requested).found is not None, "its contents are checked by the processes that load it"
    whole: dict[str, Any] = {"faults.verify_checkpoint_at_start": True}
    with pytest.raises(
        CheckpointError,
        match="trainer.resume_from_path is refused: .*global_step_4 is damaged: the contents of x",
    ):
        origin(requested, **whole)
    (older / "x").write_text("xx")
    with pytest.raises(CheckpointError, match="is refused: .*global_step_4 is damaged: x has 2 bytes"):
        origin(requested)
    assert newer.exists(), "it is not used instead"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"strategy": "fully_async"}, f"{OWN}.strategy was n_step_ahead there and is fully_async here"),
        ({"max_lag": 5}, f"{OWN}.staleness.max_lag was 3 there and is 5 here; set it back, or start a new"),
        ({"staleness.straggler": "mask"}, f"{OWN}.staleness.straggler was wait there and is mask here"),
        ({"weight_sync.every": 2}, f"{OWN}.weight_sync.every was 1 there and is 2 here"),
        (
            {"reward.while_generating": False},
            f"{OWN}.reward.while_generating was True there and is False here",
        ),
    ],
)
def test_a_changed_setting_is_named(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    saved(tmp_path, 4, strategy="n_step_ahead", max_lag=3)
    lines: list[str] = []
    with pytest.raises(ConfigError, match="found no usable checkpoint"):
        origin(config(tmp_path), lines, **{"strategy": "n_step_ahead", "max_lag": 3, **change})
    assert reason in lines[0]


def test_a_knob_that_may_change_is_no_reason(tmp_path: Path) -> None:
    folder = saved(tmp_path, 4)
    changed: dict[str, Any] = {
        "faults.bad_data.empty_answer": "fail",
        "weight_sync.timeout_s": 5.0,
        "reward.failure": "drop",
    }
    found = origin(config(tmp_path), **changed).found
    assert found is not None and found.folder == folder


def test_what_was_added_to_the_model_is_named(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    raw, lines = config(tmp_path), list[str]()
    raw["actor_rollout_ref"].setdefault("model", {})["lora_rank"] = 8
    with pytest.raises(ConfigError, match="found no usable checkpoint"):
        origin(raw, lines)
    assert "actor_rollout_ref.model.lora_rank was (not set) there and is 8 here" in lines[0]


def test_a_teacher_cannot_be_added_to_groups_that_are_finished(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    raw, lines = config(tmp_path), list[str]()
    raw["distillation"] = {"enabled": True, "distillation_loss": {"loss_mode": "k3", "topk": 32}}
    with pytest.raises(ConfigError, match="found no usable checkpoint"):
        origin(raw, lines)
    assert "distillation.distillation_loss.loss_mode was (not set) there and is k3 here" in lines[0]


@pytest.mark.parametrize(("key", "value"), [("dataloader_num_workers", 4), ("shuffle", False)])
def test_a_dataloader_of_another_kind_is_named(tmp_path: Path, key: str, value: Any) -> None:
    """Its state would be refused by an assertion of torchdata, or would be of another order."""
    raw = config(tmp_path)
    raw["data"] |= {"dataloader_num_workers": 0, "shuffle": True}
    made = origin(raw)
    part = begin(tmp_path, 4)
    (part / "x").write_text("x")
    publish(part, step=4, run=made.run, identity=made.identity, saved_unix=4.0, epoch=made.epoch, record=1)
    raw["data"][key] = value
    lines: list[str] = []
    with pytest.raises(ConfigError, match="found no usable checkpoint"):
        origin(raw, lines)
    assert f"data.{key} was " in lines[0]


def test_a_run_with_a_ledger_resumes_from_its_own_checkpoints_only(tmp_path: Path) -> None:
    """Another run with the same identity has saved into the same folder."""
    own, other = saved(tmp_path, 5), saved(tmp_path, 15)
    run = origin(config(tmp_path, resume_mode="resume_path", resume_from_path=str(own))).run
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ledger.jsonl").write_text(f'{{"n": 1, "kind": "opened", "run": "{run}"}}\n')
    lines: list[str] = []
    found = origin(config(tmp_path), lines)
    assert found.found is not None and (found.found.folder, found.run) == (own, run)
    assert "global_step_15 belongs to run " in lines[0] and lines[0].endswith(
        f"; the ledger in the run directory belongs to run {run}"
    )
    requested = origin(config(tmp_path, resume_mode="resume_path", resume_from_path=str(other)))
    assert requested.found is not None and requested.found.folder == other, "it was requested by path"


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    part = begin(tmp_path, 9)
    origin(config(tmp_path))
    assert part.exists(), "a run that saves nothing may look at the folder of one that does"
    origin(config(tmp_path, save_freq=1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (
            {"resume_mode": "maybe"},
            "trainer.resume_mode must be one of auto, disable, resume_path, got 'maybe'",
        ),
        (
            {"resume_mode": "resume_path"},
            "trainer.resume_from_path must be a folder global_step_N .* got None",
        ),
    ],
)
def test_contradicting_keys_are_refused(tmp_path: Path, keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_keys(config(tmp_path, **keys))


def tensors(folder: Path, shape: tuple[int, ...]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"weight": np.zeros(shape, np.float32)}, folder / "model.safetensors")
    return str(folder)


def test_a_model_is_identified_by_shapes_and_not_by_path(tmp_path: Path) -> None:
    one, same, other = (
        tensors(tmp_path / name, shape) for name, shape in (("a", (2, 3)), ("b", (2, 3)), ("c", (3, 2)))
    )
    assert model_of(one) == model_of(same) != model_of(other)


def test_a_remote_model_is_identified_by_name(tmp_path: Path) -> None:
    assert model_of("org/name") == "org/name"
    raw = config(tmp_path)
    placement = placement_of(raw, None, ["logp"], "pools")
    assert (
        identity_of(raw, AsyncPipelineConfig(), placement, "0.9.1")["actor_rollout_ref.model.path"]
        == "some/model"
    )
    path = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"
    assert path not in identity_of(raw, AsyncPipelineConfig(), placement, "0.9.1")
    raw["actor_rollout_ref"]["actor"] = {"strategy": "megatron", "megatron": {path.rpartition(".")[2]: 2}}
    assert identity_of(raw, AsyncPipelineConfig(), placement, "0.9.1")[path] == "2", "its files are cut by it"


@cases_of("resume")
def test_illegal_values_of_resume_and_save_keys_are_refused(tmp_path: Path, case: Refused) -> None:
    case.replay(lambda trainer: check_keys(config(tmp_path, **trainer)))


def test_all_wrong_keys_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_keys(config(tmp_path, resume_mode="resume_path", save_freq=None, max_actor_ckpt_to_keep=0))
    named = [problem.partition(" ")[0] for problem in caught.value.problems]
    assert named == ["trainer.resume_from_path", "trainer.max_actor_ckpt_to_keep", "trainer.save_freq"]


@pytest.mark.parametrize("good", [-1, 0, 1, 20])
def test_how_often_checkpoints_may_be_saved(tmp_path: Path, good: int) -> None:
    check_keys(config(tmp_path, save_freq=good, max_actor_ckpt_to_keep=1))


def test_an_unwritable_checkpoint_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    below = config(tmp_path / "file" / "below", save_freq=2)
    with pytest.raises(
        ConfigError,
        match=r"trainer\.default_local_dir must be a writable folder .*file is not; set another",
    ):
        check_keys(below)
    below["trainer"]["save_freq"] = -1
    check_keys(below)
    check_keys(config(tmp_path / "not" / "there", save_freq=2))
    assert not (tmp_path / "not").exists()


def test_an_unsearchable_parent_folder_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, **_: Any) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refused)
    check_keys(config(tmp_path / "not" / "there", save_freq=2))


@pytest.mark.parametrize("model", ["actor", "critic"])
def test_contents_that_prevent_an_exact_resume_are_refused(tmp_path: Path, model: str) -> None:
    def with_contents(**contents: Any) -> dict[str, Any]:
        raw = config(tmp_path, save_freq=2)
        where = raw["actor_rollout_ref"]["actor"] if model == "actor" else raw.setdefault("critic", {})
        where["checkpoint"] = contents
        return raw

    check_keys(
        with_contents(
            save_contents=["model", "optimizer", "extra", "hf_model"],
            load_contents=["model", "optimizer", "extra"],
        )
    )
    for name in ("save_contents", "load_contents"):
        with pytest.raises(
            ConfigError,
            match=rf"checkpoint\.{name} must include model, optimizer, extra .*got \['model'\]; leave it out",
        ):
            check_keys(with_contents(**{name: ["model"]}))
    with pytest.raises(ConfigError, match="async_save must be False"):
        check_keys(with_contents(async_save=True))
    without = with_contents(save_contents=["model"])
    without["trainer"]["save_freq"] = -1
    check_keys(without)


def test_a_ledger_that_ends_before_its_checkpoint_is_refused(tmp_path: Path) -> None:
    made = origin(config(tmp_path, resume_mode="disable"))
    part = begin(tmp_path, 4)
    (part / "pipeline.json").write_text(json.dumps({"flow": {"ledger": {"number": 7}}}))
    publish(part, step=4, run=made.run, identity=made.identity, saved_unix=4.0, epoch=made.epoch, record=1)
    found = origin(config(tmp_path)).found
    assert found is not None
    check_ledger(tmp_path, found)
    ledger = tmp_path / "ledger.jsonl"

    def write(last: int, run: str) -> None:
        ledger.write_text(
            "".join(json.dumps({"n": n, "kind": "opened", "run": run}) + "\n" for n in range(1, last + 1))
        )

    write(7, made.run)
    check_ledger(tmp_path, found)
    write(5, "another")
    check_ledger(tmp_path, found)
    write(5, made.run)
    with pytest.raises(
        CheckpointError,
        match="ledger.jsonl ends at record 5, but global_step_4 was made after record 7: .* or move it away",
    ):
        check_ledger(tmp_path, found)
