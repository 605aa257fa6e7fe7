# SPDX-License-Identifier: Apache-2.0
"""The step engine behind `VersionedEngine`: loads come between two steps, and policies do what they say."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import pytest
import torch

from recipe.async_pipeline.core.groups.items import LoadReport
from recipe.async_pipeline.diffusion.step_engine import FinishedSample, SampleRequest, StepEngine
from recipe.async_pipeline.errors import EngineDeadError, WeightSyncError
from recipe.async_pipeline.verl_bridge.rollout.diffusers.engine import DiffusersEngine, DrawnImage
from recipe.async_pipeline.weight_sync.engine.versioned_engine import Loaded, VersionedEngine, recorded_spans
from tests import HANG_S
from tests.fakes.tiny_flow import Field, requests

Spans = list[tuple[int, int]]
REPORT = LoadReport(load_s=0.1, stall_s=0.1, prove_s=0.0, tensors_proved=1)


class HeldField(Field):
    """Stops in its forwards with these numbers, in the engine's thread, until the test lets it continue."""

    def __init__(self, *hold_at: int) -> None:
        super().__init__()
        self._hold_at = hold_at
        self.reached, self.released = threading.Event(), threading.Event()

    def forward(self, x: Any, sigma: Any, conditions: Mapping[str, Any]) -> torch.Tensor:
        if len(self.rows) in self._hold_at:
            self.reached.set()
            assert self.released.wait(HANG_S)
        return super().forward(x, sigma, conditions)

    async def until_held(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, HANG_S)


class Server:
    """An engine with a field, as a server has it."""

    def __init__(self, field: Field, decode: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self.field = field
        self.engine = DiffusersEngine(StepEngine(field, max_rows=96), decode or (lambda latents: latents * 2))
        self.versioned = VersionedEngine[SampleRequest, DrawnImage](self.engine)

    async def load(self, version: int, seed: int, in_flight: str = "keep") -> None:
        """Load the weights of another field."""

        def commit() -> None:
            self.field.load_state_dict(Field(seed).state_dict())

        async def load() -> Loaded:
            _, progress = await self.engine.load(version, commit)
            return Loaded([REPORT], progress)

        await self.versioned.load(version, load, in_flight)

    async def draw(self, request: SampleRequest) -> tuple[DrawnImage, Spans]:
        with recorded_spans() as spans:
            async with aclosing(self.versioned.generate(request)) as outputs:
                drawn = [output async for output in outputs]
        return drawn[-1], [(version, start) for version, start in spans]


def run(field: Field, play: Callable[[Server], Awaitable[Any]], **more: Any) -> Any:
    """Run a test's coroutine with a server that serves version 0."""

    async def played() -> Any:
        server = Server(field, **more)
        try:
            await server.load(0, 0)
            return await play(server)
        finally:
            server.engine.close()

    return asyncio.run(played())


def alone(request: SampleRequest, loads: Mapping[int, tuple[int, int]]) -> FinishedSample:
    """The sample of a step engine without a thread, with loads of (version, seed) before a step."""
    field, done = Field(), list[FinishedSample]()
    engine = StepEngine(field, max_rows=96)
    engine.submit(request)
    for step in range(request.sampling.schedule.num_steps):
        if step in loads:
            version, seed = loads[step]
            engine.load(version, lambda seed=seed: field.load_state_dict(Field(seed).state_dict()))  # type: ignore[misc]
        done = engine.step()
    (sample,) = done
    return sample


def require_equal(drawn: DrawnImage, sample: FinishedSample) -> None:
    assert drawn.sample is not None and drawn.picture is not None
    for name in ("latent", "latents", "log_probs"):
        assert torch.equal(getattr(drawn.sample, name), getattr(sample, name)), name
    assert torch.equal(drawn.picture, sample.latent * 2)


def test_samples_equal_the_ones_of_the_step_engine() -> None:
    asked = requests(3, 4)
    found = run(Field(), lambda server: asyncio.gather(*map(server.draw, asked)))
    for request, (drawn, spans) in zip(asked, found, strict=True):
        require_equal(drawn, alone(request, {0: (0, 0)}))
        assert spans == [(0, 0)]


@pytest.mark.parametrize("before", range(6))
def test_a_kept_sample_continues_with_the_new_weights(before: int) -> None:
    """The engine's own record of the steps and the one of `VersionedEngine` agree."""
    (request,) = requests(1, 1)
    field = HeldField(before)

    async def play(server: Server) -> tuple[DrawnImage, Spans]:
        drawing = asyncio.create_task(server.draw(request))
        await field.until_held()
        loading = asyncio.create_task(server.load(1, 1))
        await asyncio.sleep(0)  # the load waits for the thread
        field.released.set()
        await loading
        return await drawing

    drawn, spans = run(field, play)
    expected = alone(request, {0: (0, 0), before + 1: (1, 1)} if before < 5 else {0: (0, 0)})
    require_equal(drawn, expected)
    assert spans == [tuple(one) for one in expected.spans]


def test_an_aborted_sample_begins_again() -> None:
    (request,) = requests(1, 1)
    field = HeldField(3)

    async def play(server: Server) -> tuple[DrawnImage, Spans]:
        drawing = asyncio.create_task(server.draw(request))
        await field.until_held()
        loading = asyncio.create_task(server.load(1, 1, "abort"))
        await asyncio.sleep(0)
        field.released.set()
        await loading
        return await drawing

    drawn, spans = run(field, play)
    require_equal(drawn, alone(request, {0: (1, 1)}))
    assert spans == [(1, 0)]


def test_a_drained_sample_ends_before_the_load() -> None:
    first, second = requests(1, 2)
    field = HeldField(3)

    async def play(server: Server) -> list[tuple[DrawnImage, Spans]]:
        drawing = asyncio.create_task(server.draw(first))
        await field.until_held()
        loading = asyncio.create_task(server.load(1, 1, "drain"))
        await asyncio.sleep(0)
        late = asyncio.create_task(server.draw(second))
        await asyncio.sleep(0)
        field.released.set()
        await loading
        return [await drawing, await late]

    (early, of_old), (late, of_new) = run(field, play)
    require_equal(early, alone(first, {0: (0, 0)}))
    require_equal(late, alone(second, {0: (1, 1)}))
    assert (of_old, of_new) == ([(0, 0)], [(1, 0)])


def test_a_cancelled_sample_is_forgotten() -> None:
    first, second = requests(1, 2)
    field = HeldField(2)

    async def play(server: Server) -> tuple[DrawnImage, Spans]:
        drawing = asyncio.create_task(server.draw(first))
        await field.until_held()
        drawing.cancel()
        await asyncio.wait([drawing])
        field.released.set()
        return await server.draw(second)

    drawn, _ = run(field, play)
    require_equal(drawn, alone(second, {0: (0, 0)}))
    assert len(field.rows) == 3 + 6, "no step was made of the one that was cancelled"


def test_no_step_is_made_with_weights_of_a_failed_load() -> None:
    (request,) = requests(1, 1)
    field = HeldField(3)

    async def fail(server: Server) -> None:
        def commit() -> None:
            field.load_state_dict(Field(5).state_dict())
            raise WeightSyncError("the values differ")

        await server.versioned.load(1, lambda: server.engine.load(1, commit), "keep")  # type: ignore[arg-type, return-value]

    async def play(server: Server) -> tuple[DrawnImage, Spans]:
        drawing = asyncio.create_task(server.draw(request))
        await field.until_held()
        failing = asyncio.create_task(fail(server))
        await asyncio.sleep(0)
        field.released.set()
        with pytest.raises(WeightSyncError, match="the values differ"):
            await failing
        assert len(field.rows) == 4 and not drawing.done()
        await server.load(2, 2)
        return await drawing

    drawn, _ = run(field, play)
    require_equal(drawn, alone(request, {0: (0, 0), 4: (2, 2)}))


def test_an_error_of_a_step_ends_the_engine() -> None:
    first, second = requests(1, 2)

    class Broken(Field):
        def forward(self, x: Any, sigma: Any, conditions: Any) -> torch.Tensor:
            raise RuntimeError("out of memory")

    async def play(server: Server) -> BaseException | None:
        for request in (first, second):
            with pytest.raises(EngineDeadError, match="has ended: RuntimeError: out of memory"):
                await server.draw(request)
        return server.engine.death

    assert isinstance(run(Broken(), play), EngineDeadError)


def test_an_error_of_the_decoder_ends_the_engine_too() -> None:
    (request,) = requests(1, 1)

    def decode(latents: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such latent")

    async def play(server: Server) -> None:
        with pytest.raises(EngineDeadError, match="ValueError: no such latent"):
            await server.draw(request)

    run(Field(), play, decode=decode)
