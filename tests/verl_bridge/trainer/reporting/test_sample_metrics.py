# SPDX-License-Identifier: Apache-2.0
"""Every finished response is counted again when its prompt has a fate, or when it is discarded."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from datetime import date
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from recipe.async_pipeline.core.groups.fates import FATES, Fate, FateRegister
from recipe.async_pipeline.core.groups.items import Group, StepBatch, Trajectory, plain
from recipe.async_pipeline.observe.observers import Observers
from recipe.async_pipeline.observe.samples.selection_bias import SelectionMeter
from tests.conftest import Load

pytestmark = pytest.mark.real_engine

COUNTED_AS = {"trained": "trained", "filtered": "filtered", "expired": "dropped", "failed": "dropped"}


@pytest.fixture
def meters(module: Any, counted: Counter[str]) -> Any:
    return meters_of(module)


def meters_of(
    module: Any, *, log_probs: bool = False, precision: tuple[str | None, str | None] = (None, None)
) -> Any:
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {
                "actor": {
                    **{"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None},
                    "fsdp_config": {"mixed_precision": {"param_dtype": precision[1]}},
                },
                "rollout": {"n": 2, "calculate_log_probs": log_probs, "dtype": precision[0]},
            }
        }
    )
    return module.SampleMeters(config, 1)


def responses(uid: str, tokens: int = 8) -> tuple[Trajectory, ...]:
    return tuple(
        Trajectory(key=f"{uid}_{i}", first_version=0, last_version=0, num_tokens=tokens) for i in range(2)
    )


@pytest.fixture
def counted(module: Any, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Samples that the meters count, by fate."""
    found: Counter[str] = Counter()

    class CountingMeter(SelectionMeter):
        def record(self, fate: Any, **sample: Any) -> None:
            found[fate] += 1
            super().record(fate, **sample)

    monkeypatch.setattr(module.selection_bias, "SelectionMeter", CountingMeter)
    return found


def register(meters: Any, uid: str) -> FateRegister:
    fates = FateRegister()
    fates.subscribe(meters.settled)
    fates.draw(uid)
    meters.finished(uid, responses(uid))
    return fates


@pytest.mark.parametrize("fate", FATES)
def test_responses_count_once_with_their_fate(meters: Any, counted: Counter[str], fate: Fate) -> None:
    fates = register(meters, "a")
    if fate == "trained":
        fates.train(1, [Group(uid="a", step=1, trajectories=responses("a", tokens=16))])
    else:
        fates.settle("a", fate)
    meters.discarded("a")
    assert counted == {"finished": 2, COUNTED_AS[fate]: 2}
    if fate == "trained":
        found, _ = meters.selection()
        assert (found["bias/tokens/finished_mean"], found["bias/tokens/trained_mean"]) == (8, 16), (
            "trained responses may differ: rewards may be added after they finish"
        )


def test_discarded_responses_are_dropped_before_the_prompt_has_a_fate(
    meters: Any, counted: Counter[str]
) -> None:
    fates = register(meters, "a")
    meters.discarded("a")
    assert counted == {"finished": 2, "dropped": 2}
    meters.finished("a", responses("a"))
    fates.settle("a", "filtered")
    assert counted == {"finished": 4, "dropped": 2, "filtered": 2}


def test_cancelled_responses_are_dropped(meters: Any, counted: Counter[str]) -> None:
    meters.cancelled(3.0)
    assert counted == {"dropped": 2}


class Store:
    """Columns of eight trajectories of 3 tokens; counts what is fetched together."""

    def __init__(self) -> None:
        self.fetched: list[list[str]] = []

    def get(self, *, keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, Any]:
        self.fetched.append(keys)
        columns = {
            "loss_mask": torch.ones(3, dtype=torch.int64),
            "rollout_log_probs": torch.tensor([-1.0, -2.0, -3.0]),
            "old_log_probs": torch.tensor([-1.1, -2.0, -2.9]),
        }
        rows = {name: [columns[name]] * len(keys) for name in select_fields}
        return {name: torch.nested.as_nested_tensor(some, layout=torch.jagged) for name, some in rows.items()}


@pytest.mark.parametrize("together", [1, 6, 7, 1000])
def test_a_batch_is_fetched_in_parts(module: Any, monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    store = Store()
    monkeypatch.setattr(module.tq, "kv_batch_get", store.get)
    monkeypatch.setattr(module, "FETCHED_TOKENS", together)
    group = Group(
        uid="a",
        step=3,
        trajectories=tuple(
            Trajectory(key=f"a_{i}", first_version=1, last_version=1, num_tokens=3, spans=plain(((1, 0),)))
            for i in range(8)
        ),
    )
    padded = SimpleNamespace(keys=[*(one.key for one in group.trajectories), "padding"], partition_id="train")
    batch = StepBatch(step=3, groups=(group,), payload=padded)
    found, _ = meters_of(module, log_probs=True).distances(batch)

    assert [key for part in store.fetched for key in part] == [one.key for one in group.trajectories]
    assert max(map(len, store.fetched)) == min(8, -(-together // 3))
    assert found["lag/token_share/1"] == 1
    assert found["off_policy/ratio_max/all"] == pytest.approx(math.exp(0.1), rel=1e-6)
    assert found["off_policy/trajectory_ess/all"] == pytest.approx(1)


@pytest.mark.parametrize("together", [1, 1000])
def test_tokens_that_are_too_old_are_left_out(
    module: Any, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    """The bound is 1, so of step 4 only tokens of the versions 2 and 3 are trained."""
    monkeypatch.setattr(module.tq, "kv_batch_get", Store().get)
    monkeypatch.setattr(module, "FETCHED_TOKENS", together)
    spans = (((1, 0), (2, 2)), ((0, 0), (1, 1)), ((3, 0),))
    trajectories = tuple(
        Trajectory(
            key=f"a_{i}",
            first_version=one[0][0],
            last_version=one[-1][0],
            num_tokens=3,
            spans=plain(one),
            masked_before=0 if one[0][0] > 1 else 2,
        )
        for i, one in enumerate(spans)
    )
    payload = SimpleNamespace(keys=[one.key for one in trajectories], partition_id="train")
    batch = StepBatch(step=4, groups=(Group(uid="a", step=4, trajectories=trajectories),), payload=payload)
    found, _ = meters_of(module, log_probs=True).distances(batch)
    assert found["lag/token_share/1"] == 0.25, "one token of version 2, three of version 3"
    assert found["lag/trajectory_share/1"] == 0.5, "nothing of the second one is trained"
    assert found["lag/max"] == 1


def test_drift_is_reported_when_it_begins(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.tq, "kv_batch_get", Store().get)
    meters = meters_of(module, log_probs=True, precision=("float32", "fp32"))
    trajectory = Trajectory(key="a_0", first_version=2, last_version=2, num_tokens=3, spans=plain(((2, 0),)))
    payload = SimpleNamespace(keys=["a_0"], partition_id="train")

    def measured(step: int, constrained: int = 0) -> tuple[dict[str, float], str | None]:
        counts = {"constrained": constrained}
        group = Group(uid="a", step=step, trajectories=(trajectory,), counts=counts)
        found: tuple[dict[str, float], str | None] = meters.distances(
            StepBatch(step=step, groups=(group,), payload=payload)
        )
        return found

    first, warning = measured(3)
    assert first["drift/turn_1"] == pytest.approx(0.1, rel=1e-5)
    assert warning is not None and "in turn 1" in warning and "2 of 3 tokens" in warning
    assert measured(3)[1] is None, "it is reported once"
    later, none = measured(4)  # the trainer is newer than the tokens
    assert "drift/max" not in later and none is None
    again = measured(3)[1]
    assert again is not None and "chat template" in again
    measured(4)
    of_forms = measured(3, constrained=2)[1]
    assert of_forms is not None and "a form of the answer" in of_forms and "chat template" not in of_forms


def test_episodes_that_were_not_needed_are_redundant(meters: Any, counted: Counter[str], module: Any) -> None:
    meters.redundant([module.Redundant(9, 4, 2.0), module.Redundant(None, 2, 2.0)])
    assert counted == {"redundant": 2}
    assert meters.selection()[0]["bias/tokens/redundant_mean"] == 9


@pytest.mark.parametrize(("trainer", "warns"), [("fp32", True), ("bf16", False)])
def test_the_bound_follows_from_the_precision(
    module: Any, monkeypatch: pytest.MonkeyPatch, trainer: str, warns: bool
) -> None:
    """The log-probs differ by 0.1."""
    monkeypatch.setattr(module.tq, "kv_batch_get", Store().get)
    meters = meters_of(module, log_probs=True, precision=("float32", trainer))
    trajectory = Trajectory(key="a_0", first_version=2, last_version=2, num_tokens=3, spans=plain(((2, 0),)))
    payload = SimpleNamespace(keys=["a_0"], partition_id="train")
    group = Group(uid="a", step=3, trajectories=(trajectory,))
    _, warning = meters.distances(StepBatch(step=3, groups=(group,), payload=payload))
    assert (warning is not None) == warns


@pytest.mark.parametrize(
    ("name", "bypass", "mini"), [("vllm", True, 4), ("diffusers", False, 4), ("diffusers", True, 2)]
)
def test_rounding_is_looked_for_only_where_every_ratio_should_be_1(
    module: Any, monkeypatch: pytest.MonkeyPatch, name: str, bypass: bool, mini: int
) -> None:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "PrecisionCheck", lambda *settings: made.append(settings))
    images_of(module, name, bypass, mini)
    assert made == []
    images_of(module, "diffusers", True, 4)
    assert made == [("bfloat16", "None", 1e-3)]


def images_of(module: Any, name: str, bypass: bool, mini: int) -> Any:
    config = OmegaConf.create(
        {
            "algorithm": {"rollout_correction": {"bypass_mode": bypass}},
            "data": {"train_batch_size": 4},
            "actor_rollout_ref": {
                "actor": {
                    **{"clip_ratio": 0.2, "clip_ratio_low": 1e-3, "clip_ratio_high": 2e-3},
                    **{"ppo_mini_batch_size": mini, "fsdp_config": {"mixed_precision": None}},
                },
                "rollout": {"n": 2, "name": name, "calculate_log_probs": True, "dtype": "bfloat16"},
            },
        }
    )
    return module.SampleMeters(config, 1)


COLUMNS: dict[str, list[Any]] = {
    "reward": [0.5, 1.0],
    "acc": [True, np.bool_(False)],
    "decimal": [Decimal("0.5"), Fraction(1, 2)],
    "array": [np.array(1), np.float16(2)],
    "missing": [None, 3],
    "pred": ["46", "47"],
    "nested": [{"a": 1}, {"a": 2}],
    "ragged": [[1, 2], [3]],
    "mixed": [1.0, "high"],
    "late text": [None, date(2026, 1, 2)],
    "sets": [{1}, {2}],
    "complex": [1j, np.complex64(1)],
    "large": [10**400, 1],
}


def test_verl_makes_metrics_of_numbers_of_any_kind_and_of_nothing_else(
    module: ModuleType, load: Load
) -> None:
    metrics = load("verl.trainer.ppo.metric_utils").process_validation_metrics
    found = metrics(["s", "s"], ["u", "u"], module.numbers_or_text(COLUMNS))["s"]
    assert found.keys() == {"reward", "acc", "decimal", "array", "missing"}
    assert [found[name]["mean@2"] for name in ("acc", "decimal", "array")] == [0.5, 0.5, 1.5]
    assert found["missing"] == {"mean@1": 3.0}


def test_every_value_fits_into_a_line_of_a_file(module: ModuleType) -> None:
    for name, values in COLUMNS.items():
        assert len(json.loads(json.dumps(module.for_json(values)))) == 2, name
    assert module.for_json([np.array([1, 2]), {"a": 1}, {1}, {(1, 2): 3}]) == [
        [1, 2],
        {"a": 1},
        "{1}",
        "{(1, 2): 3}",
    ]


def test_a_file_of_generations_takes_any_value_and_ends_no_run(
    module: ModuleType, load: Load, tmp_path: Path
) -> None:
    verl = load("verl.trainer.ppo.v1.trainer_base").PPOTrainer
    said: list[str] = []
    folder = tmp_path / "generations"
    verls, started_unix = vars(verl)["_write_generations"].__func__, time.time()
    write = module.file_writer(Observers(said.append), verls, str(folder), started_unix)
    folder.mkdir()
    (folder / "3.jsonl").write_text("of an earlier run\n")
    os.utime(folder / "3.jsonl", (0, started_unix - 1))
    for _ in range(2):
        write(["a", "b"], ["c", "d"], [{1}, Decimal(1)], [0.5, 1.0], COLUMNS, 3)
    assert [path.name for path in sorted(folder.iterdir())] == ["3.1.jsonl", "3.jsonl"]
    rows = [json.loads(line) for line in (folder / "3.jsonl").read_text().splitlines()]
    assert [row["gts"] for row in rows] == ["{1}", "1"]
    assert rows[0].keys() >= COLUMNS.keys() and rows[1]["array"] == 2.0
    assert said == []

    (folder / "4.jsonl").mkdir()
    write(["a"], ["c"], [None], [0.5], {}, 4)
    assert said[0].startswith(f"the files in {folder} failed: IsADirectoryError: ")
