# SPDX-License-Identifier: Apache-2.0
"""The step engine of images as an engine that serves versions.

A thread makes the steps, one after the other; loads, new requests and abandoned ones come between two steps.
A second thread decodes finished latents meanwhile. A token is an SDE step of a sample.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch

from ....diffusion.step_engine import FinishedSample, SampleRequest, StepEngine
from ....errors import EngineDeadError
from ....weight_sync.engine.response import Part
from ....weight_sync.engine.versioned_engine import AttemptOptions, AttemptTokens

T = TypeVar("T")
DecodeLatents = Callable[[torch.Tensor], torch.Tensor]
"""Latents (rows, ...) to pictures: uint8 (rows, 3, height, width)."""


class DrawnImage(NamedTuple):
    """What an attempt ends with."""

    sample: FinishedSample | None
    """None if a load has stopped the attempt."""
    picture: torch.Tensor | None


STOPPED = DrawnImage(None, None)


class DiffusersEngine:
    """See `weight_sync.versioned_engine.Engine`; call its methods on one event loop."""

    rejections = ()

    def __init__(self, steps: StepEngine, decode: DecodeLatents) -> None:
        self._steps, self._decode = steps, decode
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="denoising")
        self._decoding = ThreadPoolExecutor(1, thread_name_prefix="decoding")
        self._frozen = False
        self._open: dict[str, asyncio.Future[DrawnImage]] = {}
        self._driver: asyncio.Task[None] | None = None
        self._more = False
        """Something has changed since the driver began its last step."""
        self._delivering: set[asyncio.Task[None]] = set()
        self.death: EngineDeadError | None = None
        """Why no step will be made again, or None."""

    def close(self) -> None:
        """End the threads, after the step that they make."""
        if self._driver is not None:
            self._driver.cancel()
        self._thread.shutdown()
        self._decoding.shutdown()

    async def between_steps(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread of the engine, between two steps. Raises what it raises."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def load(self, version: int, commit: Callable[[], T]) -> tuple[T, Mapping[str, int]]:
        """Replace the weights between two steps; return the result, and the SDE steps of each sample.

        Raises the error of `commit`; then no step is made until a load succeeds.
        """

        def replaced() -> tuple[T, Mapping[str, int]]:
            return self._steps.load(version, commit), self._steps.progress()

        loaded = await self.between_steps(replaced)
        self._drive()
        return loaded

    def name(self, request: SampleRequest) -> str:
        return request.name

    def has_form(self, request: SampleRequest) -> bool:
        return False

    def prompt_tokens(self, request: SampleRequest) -> int:
        return 0  # nothing is read again

    async def attempt(self, request: SampleRequest, how: AttemptOptions) -> AsyncGenerator[DrawnImage, None]:
        """Draw a sample from its beginning: an attempt that a load has stopped leaves nothing to continue."""
        if self.death is not None:
            raise self.death
        drawn: asyncio.Future[DrawnImage] = asyncio.get_running_loop().create_future()
        self._open[request.name] = drawn
        try:
            await self.between_steps(lambda: self._steps.submit(request))
            how.sent()
            self._drive()
            yield await drawn
        finally:
            self._open.pop(request.name, None)
            if not drawn.done() or drawn.cancelled():
                self._thread.submit(self._steps.withdraw, request.name)

    def part(self, output: DrawnImage) -> Part | None:
        if output.sample is None:
            return Part((), True, output)
        return Part(output.sample.steps, False, output)

    def log_probs(self, part: Part) -> Sequence[float] | None:
        drawn: DrawnImage = part.raw
        return [] if drawn.sample is None else drawn.sample.log_probs.tolist()

    def finished(self, output: DrawnImage) -> bool:
        return True

    def joined(self, output: DrawnImage, before: Sequence[Part]) -> DrawnImage:
        return output

    async def written(self, names: Sequence[str]) -> Mapping[str, AttemptTokens]:
        """Return nothing: a sample that another process continues would need its latent."""
        return {}

    async def pause(self, mode: str) -> None:
        if mode == "freeze":
            self._frozen = True
            await self.between_steps(lambda: None)
            return
        while self._open:
            if mode == "abort":
                for name, drawn in list(self._open.items()):
                    # A sample that is being decoded is no longer in the engine, and ends by itself.
                    found = await self.between_steps(lambda name=name: self._steps.withdraw(name))  # type: ignore[misc]
                    if found and not drawn.done():
                        drawn.set_result(STOPPED)
            pending = [one for one in self._open.values() if not one.done()]
            if pending:
                await asyncio.wait(pending)
            await asyncio.sleep(0)  # the attempts' own tasks take their results

    async def resume(self) -> None:
        self._frozen = False
        self._drive()

    def _drive(self) -> None:
        """Begin to make steps, unless that is done already."""
        self._more = True
        if self._driver is None:
            self._driver = asyncio.create_task(self._make_steps(), name="denoise")

    async def _make_steps(self) -> None:
        """Make steps until no sample is open, or no version is served."""

        def step() -> list[FinishedSample] | None:
            served = self._steps.version is not None
            return self._steps.step() if served and self._steps.busy else None

        try:
            while not self._frozen:
                self._more = False
                finished = await self.between_steps(step)
                if finished is None and not self._more:
                    return
                if finished:
                    task = asyncio.create_task(self._deliver(finished), name="deliver samples")
                    self._delivering.add(task)
                    task.add_done_callback(self._delivering.discard)
        except Exception as error:  # noqa: BLE001 - every waiting caller receives it
            self._die(error)
        finally:
            self._driver = None

    async def _deliver(self, samples: Sequence[FinishedSample]) -> None:
        """Decode samples and hand them to their attempts."""
        latents = torch.stack([one.latent for one in samples])
        try:
            pictures = await asyncio.get_running_loop().run_in_executor(self._decoding, self._decode, latents)
        except Exception as error:  # noqa: BLE001 - every waiting caller receives it
            self._die(error)
            return
        for sample, picture in zip(samples, pictures, strict=True):
            waiting = self._open.get(sample.name)
            if waiting is not None and not waiting.done():
                waiting.set_result(DrawnImage(sample, picture))

    def _die(self, error: Exception) -> None:
        """Fail all attempts: the state of the engine is unknown."""
        self.death = EngineDeadError(f"the engine of images has ended: {type(error).__name__}: {error}")
        self.death.__cause__ = error
        for drawn in self._open.values():
            if not drawn.done():
                drawn.set_exception(self.death)
