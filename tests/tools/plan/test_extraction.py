# SPDX-License-Identifier: Apache-2.0
"""A profile extracted from a run with known costs has these costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from recipe.async_pipeline.tools.plan.distribution import Lognormal, from_normal, largest
from recipe.async_pipeline.tools.plan.extraction import extract
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
from recipe.async_pipeline.tools.plan.run_log import read_run
from tests.tools.plan.runs import write_run
from tests.tools.plan.workloads import profile, setting

KNOWN = profile(
    batch=Batch(groups=8, answers=4),
    answers=Answers(
        tokens=Lognormal(median=60, sigma=0.8, cap=600),
        prompt_share=0.6,
        prompt_tokens=20.0,
        turns=3.0,
        observation_tokens=5.0,
        tool_s=Lognormal(median=0.5, sigma=0.4, cap=3.0),
        request_s=0.05,
        reward_s=0.4,
    ),
    decode=Decode(token_s=(0.02,), slots=512),
    stages=Stages(
        update=Stage(fixed_s=0.4, token_s=4e-4),
        logp=Stage(fixed_s=0.1),
        gather=Stage(fixed_s=0.05),
        assemble=Stage(fixed_s=0.02),
    ),
    sync=Sync(transfer_s=0.1, load_s=0.2, commit_s=0.15, stall_s=0.0),
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    directory: Path = tmp_path_factory.mktemp("run")
    write_run(setting(KNOWN, "one_step_off", train=2, generate=4, steps=40), directory)
    return extract(read_run(directory))


def test_a_teacher_is_fitted(tmp_path: Path) -> None:
    known = TeacherCosts(devices=2, group_s=0.8, token_s=0.001)
    of = msgspec.structs.replace(KNOWN, teacher=known)
    write_run(setting(of, "fully_async", max_lag=2, train=2, generate=4, steps=40), tmp_path)
    log = read_run(tmp_path)
    served = extract(log).teacher
    assert served is not None and served.devices == 0, "its devices are no pool of the run"
    pools = [*log.settings["placement"], {"name": "teacher", "roles": ["teacher"], "per_node": [2]}]
    found = extract(replace(log, settings={**log.settings, "placement": pools})).teacher
    assert found is not None and found.devices == 2
    assert found.group_s == pytest.approx(known.group_s, rel=0.05)
    assert found.token_s == pytest.approx(known.token_s, rel=0.05)


def test_the_origin_is_measured(found: Profile) -> None:
    assert found.origin == "measured"
    assert found.note == "measured: one_step_off, 40 steps on 6 devices"
    assert (found.batch, found.devices_per_replica) == (KNOWN.batch, 1)


def test_lengths_and_their_correlation_are_recovered(found: Profile) -> None:
    z = np.random.default_rng(0).standard_normal(20_000)
    known, seen = (from_normal(of.answers.tokens, z) for of in (KNOWN, found))
    assert np.percentile(seen, [25, 50, 90]) == pytest.approx(np.percentile(known, [25, 50, 90]), rel=0.15)
    assert found.answers.prompt_share == pytest.approx(0.6, abs=0.12)
    assert (found.answers.prompt_tokens, found.answers.turns, found.answers.observation_tokens) == (
        20.0,
        3.0,
        5.0,
    )


def test_waits_and_work_are_separated(found: Profile) -> None:
    z = np.random.default_rng(0).standard_normal(20_000)
    assert found.answers.request_s == pytest.approx(0.05, rel=0.05)
    # The run's log has the mean of a response's two tool calls.
    assert from_normal(found.answers.tool_s, z).mean() == pytest.approx(
        from_normal(KNOWN.answers.tool_s, z).mean(), rel=0.1
    )
    assert from_normal(found.answers.reward_s, z).mean() == pytest.approx(0.4, rel=0.1)


def test_the_engines_speed_is_recovered(found: Profile) -> None:
    assert found.decode.step_s(1) == pytest.approx(0.02, rel=0.05)
    assert found.decode.step_s(64) == pytest.approx(0.02, rel=0.1)


def test_stages_scale_by_the_given_share(found: Profile) -> None:
    tokens = (
        8
        * 4
        * (np.mean(from_normal(KNOWN.answers.tokens, np.random.default_rng(0).standard_normal(20_000))) + 30)
    )
    known, seen = (of.stages.update.seconds(float(tokens), 2) for of in (KNOWN, found))
    assert seen == pytest.approx(known, rel=0.1)
    assert found.stages.update.fixed_s == pytest.approx(0.2 * seen, rel=0.1)
    assert found.stages.gather.seconds(0, 2) == pytest.approx(0.05, rel=0.01)
    assert found.stages.assemble.fixed_s == pytest.approx(0.02, rel=0.01)
    assert found.stages.ref_logp is None


def test_the_parts_of_a_weight_update_are_recovered(found: Profile) -> None:
    of = found.sync
    assert (of.transfer_s, of.load_s, of.commit_s, of.stall_s) == pytest.approx(
        (0.1, 0.2, 0.15, 0.0), abs=1e-3
    )


def test_failures_and_validations_are_counted(tmp_path: Path) -> None:
    of = profile(failures=Failures(group=0.3), validation=Validation(every=4, seconds=1.5))
    write_run(setting(of, "one_step_off", steps=40), tmp_path)
    seen = extract(read_run(tmp_path))
    assert seen.failures.group == pytest.approx(0.3, abs=0.1)
    assert seen.validation == Validation(every=4, seconds=1.5)


def test_an_engine_that_slows_down_under_load_is_fitted(tmp_path: Path) -> None:
    """Groups of two sizes: alone 0.02 s per token, with three others 0.05 s."""
    from recipe.async_pipeline.core.events import LogRecord
    from recipe.async_pipeline.tools.plan.run_log import RunLog

    def group(key: int, begun: float, tokens: list[int], token_s: float) -> LogRecord:
        spent = [n * token_s for n in tokens]
        columns = {
            "prompt_tokens": [1] * len(tokens),
            "tokens": tokens,
            "observation_tokens": [0] * len(tokens),
            "turns": [1] * len(tokens),
        }
        times = {"generate_s": spent, "environment_s": [0.0] * len(tokens), "score_s": [0.0] * len(tokens)}
        return LogRecord(
            t=begun + max(spent),
            role="generate",
            event="ANSWERED",
            state=None,
            fields={"key": str(key), "seconds": max(spent), **columns, **times},
        )

    from recipe.async_pipeline.tools.plan.extraction import _fit_engine, _Table

    records = [
        group(k, 100.0 * k, [40 + k] * (1 if k % 2 else 4), 0.02 if k % 2 else 0.05) for k in range(40)
    ]
    trained = LogRecord(t=0.0, role="train", event="TRAINED", state=None, fields={"step": 1})
    run = RunLog(tmp_path, {}, [trained, *records])
    request_s, first_s, more_s = _fit_engine(_Table(run), replicas=1)
    assert (request_s, first_s, more_s) == pytest.approx((0.0, 0.02, 0.01), abs=1e-3)


def test_groups_dispatched_before_the_first_step_are_left_out(tmp_path: Path) -> None:
    """Scores of these groups are made a hundred times slower; the rest of the run is unchanged."""
    write_run(setting(KNOWN, "n_step_ahead", train=2, generate=4, steps=40), tmp_path)
    events = tmp_path / "events.jsonl"
    records = [json.loads(line) for line in events.read_text().splitlines()]
    first = next(r["t"] for r in records if r["event"] == "TRAINED")
    for record in records:
        if record["event"] == "ANSWERED" and record["t"] - record["seconds"] < first:
            record["score_s"] = [100.0 * s for s in record["score_s"]]
    events.write_text("".join(json.dumps(record) + "\n" for record in records))
    warm = extract(read_run(tmp_path))
    assert largest(warm.answers.reward_s) < 2 * 0.4 + 0.5
    assert "warm-up" not in warm.note
    short = [r for r in records if r["t"] <= first + 1e-6]
    events.write_text("".join(json.dumps(record) + "\n" for record in short))
    assert extract(read_run(tmp_path)).note.endswith(
        "too few to leave the warm-up out (only 0 prompts were dispatched after the first step)"
    )
