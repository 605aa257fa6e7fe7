# SPDX-License-Identifier: Apache-2.0
"""Each strategy equals a simpler one, rung by rung, down to verl's own sync trainer.

Answers are seeded, so two runs agree only if every weight that wrote them agreed.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from recipe.async_pipeline.lab.gpu_kit.ladder import COMPARED, LOOP
from tests.e2e.job import FEW, LOOK, ROOT, WORDS, check_clean_end, check_events, run_job, smoke_command
from tests.e2e.weights import WITHOUT_GRADIENT, assert_same_weights, saved_weights

pytestmark = pytest.mark.e2e

STEPS = 3
FOLDER, LOSS = "ASYNC_PIPELINE_LOG_PROBS", "probed"
"""As in `probed_loss`, which imports verl."""
TOLERANCE = 1e-5
TWO_ENGINES = 1e-4
MEGATRON = "training_engine=megatron"
NORMALIZED = "+actor_rollout_ref.rollout.engine_kwargs.vllm.mm_device_do_normalize=False"
"""With verl alone, vLLM would scale pixels by numbers that it drew at random."""


class Outcome(NamedTuple):
    """What a run of `STEPS` steps did."""

    answers: list[Counter[tuple[str, str]]]
    """Prompts with their answers, for each step."""
    metrics: list[dict[str, float]]
    log_probs: list[list[Rows]]
    """For each step, of each answer the old log-probs and the current ones, token by token; in any order."""
    weights: dict[str, torch.Tensor]
    lags: list[float | None]
    """Mean lag of each step, where the run says."""


Rows = tuple[list[float], list[float]]
Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def run(tied_task: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a strategy; each only once."""
    return _runs(tied_task, tmp_path_factory)


@pytest.fixture(scope="module")
def run_seeing(look_task: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a strategy with a vision-language model; each only once."""
    return _runs(look_task, tmp_path_factory)


@pytest.fixture(scope="module")
def run_pretrained(words_task: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a strategy with a pretrained model; each only once."""
    return _runs(words_task, tmp_path_factory)


def _runs(task: Path, folders: pytest.TempPathFactory) -> Run:
    done: dict[tuple[str, ...], Outcome] = {}

    def train(strategy: str, *overrides: str) -> Outcome:
        key = (strategy, *overrides)
        if key not in done:
            done[key] = _train(strategy, overrides, task, folders.mktemp("ladder"))
        return done[key]

    return train


def _train(strategy: str, overrides: tuple[str, ...], task: Path, folder: Path) -> Outcome:
    agents = folder / "agents.json"
    agents.write_text(json.dumps([{"name": "seeded", "_target_": LOOP}]))
    stock = strategy == "verl"
    common = [
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_freq={STEPS}",
        f"trainer.rollout_data_dir={folder / 'dump'}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=seeded",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={agents}",
        "actor_rollout_ref.model.external_lib=tests.e2e.probed_loss",
        f"actor_rollout_ref.actor.policy_loss.loss_mode={LOSS}",
        # Twice the reference value, so that an error of the weights soon shows in the answers.
        "actor_rollout_ref.actor.optim.lr=6.0e-4",
    ]
    own = (
        [
            "actor_rollout_ref.rollout.nnodes=0",
            "trainer.experiment_name=stock",
            # verl's colocated loader cannot repair the repack of vLLM's CPU layers; async_pipeline's does.
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls="
            "recipe.async_pipeline.verl_bridge.rollout.vllm.worker.PipelineWorkerExtension",
        ]
        if stock
        else [f"async_strategy='{strategy}'", f"trainer.v1.async_pipeline.run_dir={folder / 'run'}"]
    )
    probes = folder / "log_probs"
    probes.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(probes))
        job = run_job(smoke_command(*common, *own, *overrides, pipeline=not stock), folder / "run", task)
    assert job.status == 0, job.output[-3000:]
    if not stock and ":" not in strategy:
        size = {"groups": FEW, "responses": FEW} if {*WORDS} <= {*overrides} else {}
        summary = check_clean_end(job, strategy, summary_lag(overrides, strategy), STEPS, **size)
        check_events(job, *(["teacher"] if "distillation.enabled=true" in overrides else []))
        assert summary["rollout_corr_kl_max"] <= 0.005
        last = job.metrics()[-1]["data"]
        assert last["async_pipeline/lag/token_share/0"] == 1
        assert last["async_pipeline/lag/trajectories_without_spans"] == 0
        assert last["async_pipeline/off_policy/ess/all"] > 0.999
        assert abs(last["async_pipeline/bias/reward/trained_vs_finished_sd"]) < 1e-9
    rows = (folder / "run" / "metrics.jsonl") if not stock else next(folder.rglob("stock.jsonl"))
    trained = [
        row for row in map(json.loads, rows.read_text().splitlines()) if "actor/pg_loss" in row["data"]
    ]
    return Outcome(
        answers=[_answers(folder / "dump" / f"{step}.jsonl") for step in range(1, STEPS + 1)],
        metrics=[_metrics(row) for row in trained],
        log_probs=_log_probs(probes),
        weights=saved_weights(folder / "checkpoints", STEPS),
        lags=[row["data"].get("async_pipeline/lag/mean") for row in trained],
    )


def summary_lag(overrides: tuple[str, ...], strategy: str) -> int:
    given = [o.partition("=")[2] for o in overrides if "max_lag" in o]
    return int(given[0]) if given else {"on_policy": 0, "one_step_off": 1}[strategy]


def _answers(dump: Path) -> Counter[tuple[str, str]]:
    return Counter((row["input"], row["output"]) for row in map(json.loads, dump.read_text().splitlines()))


def _metrics(row: dict[str, Any]) -> dict[str, float]:
    # The other figures of a distillation are means of micro-batches, whose rows come in the order of arrival.
    teachers = [name for name in row["data"] if name == "actor/distillation/loss"]
    return {name: float(row["data"][name]) for name in (*COMPARED, *teachers)}


def _log_probs(folder: Path) -> list[list[Rows]]:
    rows = [row for file in sorted(folder.iterdir()) for row in torch.load(file)]
    size, rest = divmod(len(rows), STEPS)
    assert rest == 0
    return [rows[step * size : (step + 1) * size] for step in range(STEPS)]


def assert_same_log_probs(ours: list[Rows], theirs: list[Rows]) -> None:
    """Each answer of one has one of the other whose every token is as likely.

    verl sums over its batch in the order in which answers arrived, and Adam magnifies the rounding: how many
    tokens then differ by more than `TOLERANCE` depends on the processor, but their mean stays far below it.
    Between two steps it is 0.25 and more.
    """
    left, gaps = list(theirs), []
    for row in ours:
        alike = [other for other in left if len(other[0]) == len(row[0])]
        assert alike, "an answer of this length is missing in the other run"
        nearest = min(alike, key=lambda other: max(_gaps(row, other)))
        gaps += _gaps(row, nearest)
        left.remove(nearest)
    assert not left
    assert max(gaps) <= 10 * TOLERANCE
    assert sum(gaps) / len(gaps) <= TOLERANCE


def _gaps(one: Rows, other: Rows) -> list[float]:
    return [abs(a - b) for mine, its in zip(one, other, strict=True) for a, b in zip(mine, its, strict=True)]


def assert_equal(one: Outcome, other: Outcome) -> None:
    assert len(one.metrics) == len(other.metrics) == STEPS
    for step, (ours, theirs) in enumerate(zip(one.answers, other.answers, strict=True), start=1):
        assert ours == theirs, f"answers of step {step}"
    for ours_rows, theirs_rows in zip(one.log_probs, other.log_probs, strict=True):
        assert_same_log_probs(ours_rows, theirs_rows)
    for ours_m, theirs_m in zip(one.metrics, other.metrics, strict=True):
        assert ours_m == pytest.approx(theirs_m, abs=TOLERANCE, rel=TOLERANCE)
    assert_same_weights(one.weights, other.weights)


def test_on_policy_is_verls_own_sync_trainer(run: Run) -> None:
    assert_equal(run("on_policy"), run("verl"))


@pytest.mark.nightly
def test_on_policy_with_megatron_is_verls_own_sync_trainer_with_megatron(run: Run) -> None:
    assert_equal(run("on_policy", MEGATRON), run("verl", MEGATRON))


@pytest.mark.nightly
@pytest.mark.parametrize("engine", [(), (MEGATRON,)], ids=["fsdp2", "megatron"])
def test_with_a_teacher_on_policy_is_verls_own_sync_trainer(
    run: Run, untied_model: Path, engine: tuple[str, ...]
) -> None:
    section = "distillation.distillation_loss"
    distils = (
        "distillation.enabled=true",
        f"distillation.teacher_models.teacher_model.model_path={untied_model / 'model'}",
        f"{section}.loss_mode=forward_kl_topk",
        f"{section}.topk=4",
        "ray_kwargs.ray_init.num_gpus=3",
        *engine,
    )
    ours = run("on_policy", *distils)
    assert all(step["actor/distillation/loss"] > 0.01 for step in ours.metrics)
    assert_equal(ours, run("verl", *distils))


@pytest.mark.nightly
def test_with_pictures_on_policy_is_verls_own_sync_trainer(run_seeing: Run) -> None:
    assert_equal(run_seeing("on_policy", *LOOK), run_seeing("verl", *LOOK, NORMALIZED))


@pytest.mark.nightly
def test_with_a_pretrained_model_on_policy_is_verls_own_sync_trainer(run_pretrained: Run) -> None:
    gentle = (*WORDS, "actor_rollout_ref.actor.optim.lr=1.0e-5")
    ours, theirs = run_pretrained("on_policy", *gentle), run_pretrained("verl", *gentle)
    # 135 million squares are added in another order.
    norms = [[step.pop("actor/grad_norm") for step in one.metrics] for one in (ours, theirs)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert_equal(ours, theirs)


@pytest.mark.nightly
def test_megatron_is_fsdp(run: Run) -> None:
    """Two engines round differently, so their figures are close, not equal."""
    ours, theirs = run("on_policy", MEGATRON), run("on_policy")
    assert ours.answers == theirs.answers
    for ours_m, theirs_m in zip(ours.metrics, theirs.metrics, strict=True):
        assert ours_m == pytest.approx(theirs_m, abs=TWO_ENGINES, rel=TWO_ENGINES)
    # FSDP's checkpoint has the tied head as well.
    assert theirs.weights.keys() - ours.weights.keys() <= {"lm_head.weight"}
    for name, weight in ours.weights.items():
        if not name.endswith(WITHOUT_GRADIENT):
            assert (weight - theirs.weights[name]).abs().max() <= TWO_ENGINES, name


@pytest.mark.nightly
def test_fully_async_without_lag_is_on_policy(run: Run) -> None:
    assert_equal(run("fully_async", "trainer.v1.async_pipeline.staleness.max_lag=0"), run("on_policy"))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("strategy", "lag"), [("tests.e2e.parts:OneStepOff", 1), ("tests.e2e.parts:OneAhead", 1)]
)
def test_one_step_ahead_is_a_loop_that_anyone_can_read(
    run: Run, strategy: str, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    override = f"trainer.v1.async_pipeline.staleness.max_lag={lag}"
    ours = run(strategy, override)
    assert_equal(ours, run("tests.e2e.parts:Reference", override))
    assert ours.lags == [0, *[lag] * (STEPS - 1)]
