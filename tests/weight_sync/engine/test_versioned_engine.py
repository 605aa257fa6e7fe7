# SPDX-License-Identifier: Apache-2.0
"""Engines of which each token says the version that wrote it, loaded at random moments in virtual time.

The contract of `Engine`: the same tests run over the engines of vLLM and SGLang, with their servers' objects
faked, and over the simplest engine.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_pipeline.config.knobs.weight_sync import InFlightPolicy
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.weight_sync.engine.versioned_engine import (
    Loaded,
    Salts,
    VersionedEngine,
    recorded_spans,
)
from tests.fakes.async_llm import AsyncLLM, RejectingAsyncLLM, Retryable
from tests.fakes.timed_engine import LOG_PROB, PROMPT, Answer, PlainEngine
from tests.fakes.tokenizer_manager import LaterTokenizerManager, TokenizerManager

pytestmark = pytest.mark.virtual_time

ENGINES: list[Any] = [AsyncLLM, RejectingAsyncLLM, TokenizerManager, LaterTokenizerManager, PlainEngine]
each_engine = pytest.mark.parametrize("engine_class", ENGINES, ids=lambda engine: engine.__name__)


async def answer(
    engine: Any,
    name: str,
    tokens: int,
    after: float = 0.0,
    seed: int | None = None,
    session: int | None = None,
    form: dict[str, str] | None = None,
    due: int | None = None,
) -> tuple[Answer, list[tuple[int, int]]]:
    """A response and its spans."""
    await asyncio.sleep(after)
    with recorded_spans(session, due) as spans:
        said = await engine.ask(name, tokens, seed, form)
    return said, [(version, start) for version, start in spans]


@asynccontextmanager
async def serving(engine: Any, in_flight: str = "keep") -> AsyncIterator[Any]:
    """Run an engine that serves version 0."""
    versioned = engine.serve_versions()
    await versioned.load(0, engine.loading(0, 0.0), in_flight)
    clock = asyncio.create_task(engine.run())
    yield versioned
    clock.cancel()


def spans_of(tokens: list[int]) -> list[tuple[int, int]]:
    """What the spans must be, from the tokens themselves."""
    spans, start = [], 0
    for version, run in groupby(tokens):
        spans.append((version, start))
        start += len(list(run))
    return spans


@dataclass(frozen=True)
class Asked:
    tokens: int
    after: float


MOMENTS = st.floats(0, 30, allow_nan=False).map(lambda t: round(t, 2))


@pytest.mark.slow
@each_engine
@given(
    asks=st.lists(st.builds(Asked, st.integers(1, 12), MOMENTS), min_size=1, max_size=8),
    gaps=st.lists(st.tuples(MOMENTS, st.floats(0, 2).map(lambda t: round(t, 2))), max_size=6),
    in_flight=st.sampled_from(get_args(InFlightPolicy)),
    late_s=st.sampled_from([0.0, 0.3, 2.5]),
    send_s=st.sampled_from([0.0, 0.7]),
    looks=st.lists(MOMENTS, max_size=4),
)
@settings(max_examples=200, deadline=None)
def test_spans_are_what_the_tokens_say(
    engine_class: Any,
    asks: list[Asked],
    gaps: list[tuple[float, float]],
    in_flight: str,
    late_s: float,
    send_s: float,
    looks: list[float],
) -> None:
    """Spans of a whole response, and of its part at any moment."""
    engine = engine_class(late_s, send_s)
    seen: list[dict[str, Any]] = []

    async def look(versioned: VersionedEngine[Any, Any], at: float) -> None:
        await asyncio.sleep(at + 0.0071)
        seen.append(await versioned.written([f"request-{i}" for i in range(len(asks))]))

    async def main() -> list[tuple[Answer, list[tuple[int, int]]]]:
        async with serving(engine, in_flight) as versioned:
            # Off the moments at which the engine steps, so that the order is never left to chance.
            answers = [
                asyncio.create_task(answer(engine, f"request-{i}", ask.tokens, ask.after + 0.001))
                for i, ask in enumerate(asks)
            ]
            looking = [asyncio.create_task(look(versioned, at)) for at in looks]
            for version, (gap, seconds) in enumerate(gaps, start=1):
                await asyncio.sleep(gap + 0.0137)
                await versioned.load(version, engine.loading(version, seconds), in_flight)
                assert versioned.version == version
            results = await asyncio.gather(*answers)
            await asyncio.gather(*looking)
        return results

    results = run_virtual(main())
    for found in seen:
        for name, (tokens, log_probs, spans) in found.items():
            whole = results[int(name.rpartition("-")[2])][0].token_ids
            assert tokens == whole[: len(tokens)] and tokens
            assert log_probs == [LOG_PROB] * len(tokens)
            assert [(version, start) for version, start in spans] == spans_of(tokens)
    for (said, spans), ask in zip(results, asks, strict=True):
        assert len(said.token_ids) == ask.tokens, "no token is lost or written twice"
        assert said.reason == "length"
        assert spans == spans_of(said.token_ids)
        assert said.log_probs == [LOG_PROB] * ask.tokens
        if in_flight == "drain":
            assert len(spans) == 1


def run_two_versions(
    engine: Any,
    in_flight: str,
    tokens: int = 6,
    load_at: float = 2.5,
    seed: int | None = None,
    form: dict[str, str] | None = None,
) -> tuple[Answer, list[tuple[int, int]], tuple[Any, int]]:
    async def main() -> tuple[Answer, list[tuple[int, int]], tuple[Any, int]]:
        async with serving(engine, in_flight) as versioned:
            asked = asyncio.create_task(answer(engine, "r", tokens, seed=seed, form=form))
            await asyncio.sleep(load_at)
            loaded = await versioned.load(1, engine.loading(1, 0.0), in_flight)
            said, spans = await asked
        return said, spans, loaded

    return run_virtual(main())


@each_engine
def test_keep_continues(engine_class: Any) -> None:
    engine = engine_class()
    _, spans, (_, again) = run_two_versions(engine, "keep")
    assert spans == [(0, 0), (1, 2)]
    assert (len(engine.sent), again) == (1, 0), "one request to the engine, nothing read again"


@each_engine
def test_abort_starts_again_from_what_there_is(engine_class: Any) -> None:
    engine = engine_class()
    _, spans, (_, again) = run_two_versions(engine, "abort")
    assert spans == [(0, 0), (1, 2)]
    first, second = engine.sent
    assert second.prompt == [*PROMPT, 0, 0]
    assert again == len(second.prompt)
    assert first.salt != second.salt
    assert (first.max_tokens, first.min_tokens) == (6, 2)
    assert (second.max_tokens, second.min_tokens) == (4, 0), "what is left of a response is shorter"


@each_engine
@pytest.mark.parametrize(("policy", "spans"), [("abort", [(1, 0)]), ("keep", [(0, 0), (1, 2)])])
def test_a_response_that_must_have_a_form_begins_again(
    engine_class: Any, policy: str, spans: list[tuple[int, int]]
) -> None:
    """A grammar begins with the first token of a request, so a continuation would have the form again."""
    engine = engine_class()
    said, found, _ = run_two_versions(engine, policy, form={"json": "{}"})
    assert (found, len(said.token_ids)) == (spans, 6)
    assert [sent.prompt for sent in engine.sent] == [PROMPT] * len(engine.sent)
    assert {sent.max_tokens for sent in engine.sent} == {6}


@each_engine
def test_drain_waits(engine_class: Any) -> None:
    engine = engine_class()
    _, spans, _ = run_two_versions(engine, "drain")
    assert spans == [(0, 0)]
    assert not engine.frozen


@each_engine
@pytest.mark.parametrize("policy", ["abort", "keep"])
@pytest.mark.parametrize("seed", [None, 7, 8])
def test_the_rest_of_a_seeded_response_does_not_repeat_its_random_numbers(
    engine_class: Any, seed: int | None, policy: str
) -> None:
    engine = engine_class()
    run_two_versions(engine, policy, load_at=3.5, seed=seed)
    first, *rest = [sent.seed for sent in engine.sent]
    assert first == seed
    if policy == "keep" or seed is None:
        assert set(rest) <= {seed}
    else:
        # Stable: a run with the same seeds repeats it.
        assert rest == [{7: 3136964407, 8: 4006234441}[seed]]


@each_engine
@pytest.mark.parametrize("reuse", [False, True])
async def test_prefixes_of_other_versions_are_hit_only_if_they_may(engine_class: Any, reuse: bool) -> None:
    engine = engine_class()

    versioned = engine.serve_versions()
    clock = asyncio.create_task(engine.run())
    shared = []
    for version in range(2):
        await versioned.load(version, engine.loading(version, 0.0), "keep", reuse_prefixes=reuse)
        shared.append(versioned.salts(version + 1) is None)
        await answer(engine, f"r{version}", 2)
    clock.cancel()
    assert shared == [reuse, reuse]
    first, second = (sent.salt for sent in engine.sent)
    assert (first == second) == reuse


@each_engine
async def test_what_is_due_first_goes_first(engine_class: Any) -> None:
    """Also what is left of a response that a load has stopped."""
    engine = engine_class()
    async with serving(engine, "abort") as versioned:
        answering = [asyncio.create_task(answer(engine, str(due), 6, due=due)) for due in (7, 3, 0)]
        answering.append(asyncio.create_task(answer(engine, "validation", 6)))
        await asyncio.sleep(2.5)
        await versioned.load(1, engine.loading(1, 0.0), "abort")
        await asyncio.gather(*answering)
    assert Counter(sent.priority for sent in engine.sent) == Counter([7, 3, 0, None] * 2)


@each_engine
async def test_a_session_uses_its_own_prefixes_only(engine_class: Any) -> None:
    engine = engine_class()

    versioned = engine.serve_versions()
    clock = asyncio.create_task(engine.run())
    for version in range(3):
        await versioned.load(version, engine.loading(version, 0.0), "keep", reuse_prefixes="session")
        await answer(engine, f"first of {version}", 2)
        for began in range(version + 1):
            await answer(engine, f"of {began}, later, {version}", 2, session=began)
    await versioned.load(3, engine.loading(3, 0.0), "keep")
    await answer(engine, "of 0, no longer", 2, session=0)
    clock.cancel()
    salts = [sent.salt for sent in engine.sent]
    assert salts == ["v0", "v0", "v1", "v0", "v1", "v2", "v0", "v1", "v2", "v3"]


def test_a_request_that_waited_during_a_load_begins_with_the_new_version() -> None:
    salts = Salts("v1", "v2")
    assert [salts.renewed(one) for one in ("v1", "5eedf00d", "v0", None)] == ["v2", "v2", "v0", None]


@each_engine
async def test_unrecorded_requests_pass_through(engine_class: Any) -> None:
    engine = engine_class()
    async with serving(engine, "abort") as versioned:
        asked = asyncio.create_task(engine.ask("p", 9))
        await asyncio.sleep(1.5)
        await versioned.load(1, engine.loading(1, 0.0), "abort")
        said: Answer = await asked
    assert said.reason == "abort"
    assert engine.sent[0].salt == "v0"


@each_engine
@pytest.mark.parametrize("in_flight", get_args(InFlightPolicy))
async def test_after_a_failed_load_nothing_is_generated_until_one_succeeds(
    engine_class: Any, in_flight: str
) -> None:
    engine = engine_class()

    async def fail() -> Loaded:
        engine.weights = 999
        raise WeightSyncError("corrupt")

    async with serving(engine, in_flight) as versioned:
        asked = asyncio.create_task(answer(engine, "r", 4, after=1.0))
        await asyncio.sleep(0.5)
        with pytest.raises(WeightSyncError, match="corrupt"):
            await versioned.load(1, fail, in_flight)
        await asyncio.sleep(50)
        assert not asked.done() and versioned.version == 0
        await versioned.load(2, engine.loading(2, 0.0), in_flight)
        said, spans = await asked
    assert said.token_ids == [2, 2, 2, 2]
    assert spans == [(2, 0)]


@each_engine
@pytest.mark.parametrize("in_flight", get_args(InFlightPolicy))
@pytest.mark.parametrize("load_at", [0.3, 1.0, 1.3])
async def test_a_load_can_overtake_a_request_that_is_being_sent(
    engine_class: Any, in_flight: str, load_at: float
) -> None:
    engine = engine_class(send_s=0.7)
    async with serving(engine, in_flight) as versioned:
        asked = asyncio.create_task(answer(engine, "r", 90))
        await asyncio.sleep(load_at)
        await asyncio.wait_for(
            versioned.load(1, engine.loading(1, 0.0), in_flight), 95 if in_flight == "drain" else 10
        )
        found = await asked
    said, spans = found
    assert spans == spans_of(said.token_ids)
    assert len(said.token_ids) == 90


@each_engine
@pytest.mark.parametrize("in_flight", ["abort", "drain"])
async def test_requests_that_come_during_a_pause_begin_after_it(engine_class: Any, in_flight: str) -> None:
    """Some are on their way to the engine when it pauses, others come later."""
    engine = engine_class(send_s=0.3)

    async with serving(engine, in_flight) as versioned:
        busy = asyncio.create_task(answer(engine, "busy", 6))
        moments = (2.3, 2.4, 2.6, 2.7)
        asked = [asyncio.create_task(answer(engine, f"r{i}", 2 + i, at)) for i, at in enumerate(moments)]
        await asyncio.sleep(2.55)
        await versioned.load(1, engine.loading(1, 0.5), in_flight)
        results = await asyncio.gather(*asked)
        await busy
    assert [len(said.token_ids) for said, _ in results] == [2, 3, 4, 5]
    assert [spans for _, spans in results] == [spans_of(said.token_ids) for said, _ in results]
    assert [spans for _, spans in results[2:]] == [[(1, 0)]] * 2
    came_later = [sent for sent in engine.sent if sent.max_tokens in (4, 5) and sent.prompt == PROMPT]
    assert [sent.salt for sent in came_later] == ["v1"] * 2, (
        "they share prefixes of the version that writes them"
    )


async def test_a_request_is_rejected_for_good_if_another_caller_has_paused_the_engine() -> None:
    engine = RejectingAsyncLLM()

    versioned = engine.serve_versions()
    await versioned.load(0, engine.loading(0, 0.0), "keep")
    await engine.pause_generation(mode="abort", clear_cache=False)
    with pytest.raises(Retryable, match="paused"):
        await answer(engine, "r", 2)


@each_engine
async def test_a_prefix_is_not_shared_while_a_load_is_under_way(engine_class: Any) -> None:
    engine = engine_class()
    async with serving(engine) as versioned:
        loading = asyncio.create_task(versioned.load(1, engine.loading(1, 2.0), "keep"))
        await asyncio.sleep(0.1)
        await asyncio.gather(answer(engine, "a", 1), answer(engine, "b", 1))
        await loading
        await answer(engine, "c", 1)
    a, b, c = (sent.salt for sent in engine.sent)
    assert a != b and c == "v1"


@each_engine
async def test_what_was_written_so_far(engine_class: Any) -> None:
    engine = engine_class()
    async with serving(engine) as versioned:
        asked = asyncio.create_task(answer(engine, "r", 6))
        found = []
        for version, seconds in enumerate((0.5, 2.0, 0.0), start=1):
            await asyncio.sleep(seconds)
            found.append(await versioned.written(["r", "unknown"]))
            await versioned.load(version, engine.loading(version, 0.0), "keep")
        await asyncio.sleep(1.0)
        found.append(await versioned.written(["r"]))
        await asked
    nothing, before, same, after = found
    assert nothing == {}, "no token is there"
    assert before == {"r": ([1, 1], [LOG_PROB] * 2, [[1, 0]])}
    assert same == before, "the spans of versions that have written nothing are not told"
    assert after == {"r": ([1, 1, 3], [LOG_PROB] * 3, [[1, 0], [3, 2]])}
