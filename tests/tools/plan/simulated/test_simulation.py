# SPDX-License-Identifier: Apache-2.0
"""The simulator against what can be worked out by hand, against its bounds, and against a model written
independently.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import msgspec
import pytest

from recipe.async_pipeline.config.placement import Placement, Pool
from recipe.async_pipeline.core.groups.items import StepBatch
from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.tools.plan.bound import bound_s, bound_terms
from recipe.async_pipeline.tools.plan.distribution import Lognormal
from recipe.async_pipeline.tools.plan.profile import (
    Answers,
    Batch,
    Decode,
    Failures,
    Profile,
    Stage,
    Stages,
    Sync,
    TeacherCosts,
    Validation,
)
from recipe.async_pipeline.tools.plan.search import synchronous
from recipe.async_pipeline.tools.plan.simulated.simulation import LEAST_STEPS, TooSlow, simulate, window
from recipe.async_pipeline.tools.plan.simulated.trainer import SimulatedTrainer
from tests.tools.plan.independent import Pipeline
from tests.tools.plan.workloads import profile, random_profile, setting

WRITTEN_S = 1.0  # of each response of `profile()`
SYNC = Sync(transfer_s=0.05, load_s=0.1, stall_s=0.0, loads_at_once=1)
SERVING_S = 0.05 + 2 * 0.1  # two replicas, which prepare at once and load one after the other


def staged(**stages: Any) -> Profile:
    return profile(stages=Stages(**{"update": Stage(fixed_s=0.5), **stages}), sync=SYNC)


# Worked out by hand: deterministic costs, exact.


def test_on_policy_is_the_sum_of_its_parts() -> None:
    costs = {"draw": 0.01, "assemble": 0.02, "logp": 0.3, "ref_logp": 0.2, "advantage": 0.04, "gather": 0.15}
    serial = sum(costs.values()) + WRITTEN_S + 0.5 + SERVING_S
    of = staged(**{name: Stage(fixed_s=seconds) for name, seconds in costs.items()})
    assert simulate(setting(of)).step_s == pytest.approx(serial, rel=1e-9)


def test_one_step_off_takes_as_long_as_the_slower_half() -> None:
    of = staged(logp=Stage(fixed_s=0.2), gather=Stage(fixed_s=0.1))
    # Prompt to weights to the prompt after next: 1.0 + 0.7 + 0.1 + 0.25, for two steps; training itself takes
    # 0.8.
    assert simulate(setting(of, "one_step_off")).step_s == pytest.approx(2.05 / 2, rel=1e-9)


def test_deep_pipelines_are_limited_by_the_training_devices() -> None:
    of = staged(logp=Stage(fixed_s=0.2), gather=Stage(fixed_s=0.1))
    assert simulate(setting(of, "n_step_ahead", max_lag=3, steps=24)).step_s == pytest.approx(0.8, rel=1e-9)


def test_a_separate_pool_overlaps() -> None:
    of = profile(
        stages=Stages(update=Stage(fixed_s=0.6), logp=Stage(fixed_s=0.1), ref_logp=Stage(fixed_s=0.5))
    )
    together = setting(of, "n_step_ahead", max_lag=4, steps=30)
    pools = (
        Pool("train", ("train", "logp"), (1,)),
        Pool("ref", ("ref_logp",), (1,)),
        Pool("generate", ("generate",), (2,)),
    )
    apart = replace(together, placement=Placement(pools))
    assert simulate(together).step_s == pytest.approx(1.2, rel=1e-9)
    assert simulate(apart).step_s == pytest.approx(0.7, rel=1e-9)


def test_engines_are_the_limit_if_they_are_slowest() -> None:
    # 8 answers of 10 tokens on one replica with two slots: 4 rounds of 1 s.
    of = profile(decode=Decode(token_s=(0.1,), slots=2))
    assert simulate(setting(of, "n_step_ahead", max_lag=3, generate=1, steps=24)).step_s == pytest.approx(
        4.0, rel=1e-9
    )


def test_more_concurrent_responses_are_slower() -> None:
    of = profile(decode=Decode(concurrency=(1, 8), token_s=(0.1, 0.45), slots=64))
    # Alone on policy: 8 answers on one engine, 0.45 s a token; on two, 4 each, 0.25 s.
    assert simulate(setting(of, generate=1)).step_s == pytest.approx(4.5 + 0.5, rel=1e-9)
    assert simulate(setting(of, generate=2)).step_s == pytest.approx(2.5 + 0.5, rel=1e-9)


def test_reading_prompts_and_loading_weights_stop_engines() -> None:
    of = profile(
        answers=Answers(tokens=10.0, prompt_tokens=5.0),
        decode=Decode(token_s=(0.1,), prefill_token_s=0.01, slots=64),
        sync=Sync(load_s=0.2, stall_s=0.2, loads_at_once=1),
    )
    # Four answers a replica are read one after another, then written together.
    assert simulate(setting(of)).step_s == pytest.approx(4 * 5 * 0.01 + 1.0 + 0.5 + 2 * 0.2, rel=1e-9)


def test_turns_tools_and_scores_take_their_time() -> None:
    of = profile(answers=Answers(tokens=10.0, turns=3.0, tool_s=0.7, reward_s=0.3, request_s=0.01))
    assert simulate(setting(of)).step_s == pytest.approx(1.0 + 2 * 0.7 + 0.3 + 3 * 0.01 + 0.5, rel=1e-9)


def test_the_synchronous_layout_has_all_devices_for_both_phases() -> None:
    of = profile(
        decode=Decode(concurrency=(1, 8), token_s=(0.1, 0.45), slots=64),
        stages=Stages(update=Stage(device_s=4.0)),
        sync=Sync(load_s=0.1, switch_s=0.05),
    )
    sync = simulate(synchronous(setting(of, generate=1)))
    # Two replicas with 4 answers each; two devices that train; both loads at once; room for one another.
    assert sync.step_s == pytest.approx(2.5 + 2.0 + 0.1 + 0.05, rel=1e-9)
    assert sync.lag_max == 0


def test_a_teacher_reads_groups_while_others_are_generated() -> None:
    late = msgspec.structs.replace(profile(), teacher=TeacherCosts(devices=1, group_s=2.0))
    without = simulate(setting(profile(), "on_policy"))
    on_policy = simulate(setting(late, "on_policy"))
    assert on_policy.step_s == pytest.approx(without.step_s + 2.0, rel=0.01)
    assert simulate(setting(late, "fully_async", max_lag=4, steps=40)).step_s < without.step_s

    # 4 x 2 responses of 10 tokens, each 0.05 device-seconds, on two devices.
    slow = msgspec.structs.replace(profile(), teacher=TeacherCosts(devices=2, token_s=0.05))
    one = setting(slow, "fully_async", max_lag=4, steps=40)
    found = simulate(one)
    assert max(bound_terms(one), key=bound_terms(one).__getitem__) == "teacher"
    assert bound_s(one) == pytest.approx(2.0) == pytest.approx(found.step_s, rel=0.02)
    assert found.accounting.pools["teacher"].devices == 2
    assert found.accounting.pools["teacher"].shares()["compute_teacher"] > 0.9


def test_a_critic_on_separate_devices_overlaps_with_the_policy() -> None:
    of = profile(
        stages=Stages(update=Stage(fixed_s=0.5), values=Stage(fixed_s=0.1), critic=Stage(fixed_s=0.6))
    )
    pools = (
        Pool("train", ("train", "logp"), (1,)),
        Pool("critic", ("critic",), (1,)),
        Pool("generate", ("generate",), (2,)),
    )
    together = setting(of, "n_step_ahead", max_lag=4, steps=30)
    assert simulate(together).step_s == pytest.approx(1.2, rel=1e-9)
    assert simulate(replace(together, placement=Placement(pools))).step_s == pytest.approx(0.7, rel=1e-9)


# Against bounds.


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["on_policy", "one_step_off", "n_step_ahead", "fully_async"])
@pytest.mark.parametrize("seed", range(6))
def test_no_simulation_beats_its_bound(strategy: str, seed: int) -> None:
    of = random_profile(seed)
    if seed % 2:
        of = msgspec.structs.replace(
            of, teacher=TeacherCosts(devices=seed, group_s=0.3 * seed, token_s=0.004)
        )
    run = setting(of, strategy, generate=2 + seed % 3, steps=40, seed=seed)
    outcome = simulate(run)
    # Over a window the work may be less than over the whole run, which the bound is of.
    assert outcome.step_s >= bound_s(run) * 0.97
    assert outcome.lag_max <= run.knobs.staleness.max_lag


def test_a_long_tail_is_hidden_by_enough_lag() -> None:
    of = profile(
        batch=Batch(groups=16, answers=4),
        answers=Answers(tokens=Lognormal(median=50, sigma=1.0, cap=800)),
        stages=Stages(update=Stage(fixed_s=20.0)),
    )
    slow, fast = (simulate(setting(of, "fully_async", max_lag=lag, generate=8, steps=60)) for lag in (1, 8))
    assert fast.step_s == pytest.approx(20.0, rel=0.02)
    assert slow.step_s > 1.5 * fast.step_s


# Against an independent model.


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "lag"), [("on_policy", 0), ("one_step_off", 1), ("n_step_ahead", 3)])
def test_the_simulator_agrees_with_a_token_by_token_model(strategy: str, lag: int) -> None:
    errors = []
    for seed in range(12):
        run = setting(random_profile(seed), strategy, max_lag=lag, generate=1 + seed % 4, steps=24, seed=seed)
        first, last = window(run.steps, lag)
        ends = Pipeline(run).run()
        independent = (ends[last - 1] - ends[first - 1]) / (last - first)
        errors.append(abs(simulate(run).step_s / independent - 1))
    # An answer that joins an engine waits for the step that is under way there, and not here.
    assert median(errors) <= 0.005
    assert max(errors) <= 0.03


# What else a simulation says.


def test_the_same_seed_gives_the_same_run() -> None:
    run = setting(random_profile(3), "fully_async", generate=3, steps=24)
    assert simulate(run).step_ends_s == simulate(run).step_ends_s


def test_failed_groups_are_replaced() -> None:
    of = profile(failures=Failures(group=0.3), sync=SYNC)
    assert (
        simulate(setting(of, "n_step_ahead", steps=24)).step_s
        > simulate(setting(profile(sync=SYNC), "n_step_ahead", steps=24)).step_s
    )


def test_dying_replicas_cost_time_and_no_response() -> None:
    of = profile(answers=Answers(tokens=100.0), decode=Decode(token_s=(0.1,), slots=2))
    dying = msgspec.structs.replace(of, failures=Failures(replica_mtbf_s=60.0, restart_s=20.0))
    well, ill = (simulate(setting(p, "n_step_ahead", generate=3, steps=30)) for p in (of, dying))
    assert ill.step_s > 1.1 * well.step_s


def test_validation_delays_the_next_version() -> None:
    of = msgspec.structs.replace(profile(sync=SYNC), validation=Validation(every=1, seconds=3.0))
    assert (
        simulate(setting(of, "one_step_off")).step_s
        > 2 * simulate(setting(profile(sync=SYNC), "one_step_off")).step_s
    )


def test_stale_groups_can_be_dropped() -> None:
    of = profile(answers=Answers(tokens=Lognormal(median=20, sigma=1.5, cap=600)))
    waiting, dropping = (
        simulate(setting(of, "fully_async", max_lag=1, generate=4, steps=40, straggler=straggler))
        for straggler in ("wait", "drop")
    )
    assert dropping.step_s < waiting.step_s
    assert dropping.lag_max <= 1


def test_device_seconds_add_up_and_idle_excludes_work() -> None:
    outcome = simulate(setting(random_profile(2), "one_step_off", steps=24))
    for name, pool in outcome.accounting.pools.items():
        assert sum(pool.shares().values()) == pytest.approx(1.0)
        assert not any(reason.startswith("compute") for reason in outcome.idle[name])


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_ends_a_simulation_between_two_events(
    number: signal.Signals, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coroutine that has been made and is not awaited yet would be a warning, which is an error here."""
    finished: list[int] = []

    async def update(self: SimulatedTrainer, batch: StepBatch) -> StepBatch:
        if batch.step == 3:
            signal.raise_signal(number)
        finished.append(batch.step)
        return batch

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    monkeypatch.setattr(SimulatedTrainer, "update", update)
    # A shell starts commands in the background with SIGINT ignored.
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: leave}
    before = {one: signal.signal(one, handler) for one, handler in handlers.items()}
    try:
        with pytest.raises(error):
            simulate(setting(profile(), steps=12))
        assert {one: signal.getsignal(one) for one in handlers} == handlers
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert finished == [1, 2, 3], "the handler has raised nothing where it was called, and the run has ended"


@pytest.mark.parametrize("max_lag", range(9))
def test_a_window_has_whole_bursts(max_lag: int) -> None:
    burst = max_lag + 1
    for steps in range(3 * burst + max(LEAST_STEPS, 2 * burst), 80):
        first, last = window(steps, max_lag)
        assert first == 2 * burst and (last - first) % burst == 0 and last - first >= LEAST_STEPS
        assert steps - 2 * burst < last <= steps - burst, "as many as there are"


def test_steps_in_bursts_are_averaged_over_whole_bursts() -> None:
    """With a lag of 4, five batches are admitted at once: four are trained in a row, and the fifth waits."""
    run = setting(profile(stages=Stages(update=Stage(fixed_s=0.1))), "n_step_ahead", max_lag=4, steps=40)
    found = simulate(run)
    ends = found.step_ends_s
    took = [b - a for a, b in pairwise(ends)][10:35]
    assert max(took) > 3 * min(took), "in bursts"
    assert found.step_s == pytest.approx(fmean(took), rel=1e-9)
    biased = simulate(run, over=(10, 14))
    assert abs(biased.step_s / found.step_s - 1) > 0.1, "a window of four steps of five is not the mean"


def test_a_given_window_is_the_end_of_the_simulation() -> None:
    """The steps before its end are as in the whole run, and nothing after it is simulated."""
    run = setting(random_profile(3), "fully_async", max_lag=2, generate=3, steps=24)
    whole, ended = simulate(run), simulate(run, over=(3, 9))
    assert ended.step_ends_s == whole.step_ends_s[:9] and len(whole.step_ends_s) == 24
    assert ended.events < 0.7 * whole.events
    assert ended.accounting.wall_s == pytest.approx(ended.step_ends_s[-1])
    assert ended.lag_max <= 2


def test_a_simulation_is_given_up_when_its_step_is_certain_to_be_too_slow() -> None:
    run = setting(random_profile(3), "fully_async", max_lag=2, generate=3, steps=24)
    step_s = simulate(run, over=(3, 9)).step_s
    assert simulate(run, over=(3, 9), slowest_s=step_s * 1.001).step_s == step_s
    with pytest.raises(TooSlow):
        simulate(run, over=(3, 9), slowest_s=step_s * 0.999)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="--steps must be at least 16 with max_lag 3, got 10"):
        window(10, 3)
