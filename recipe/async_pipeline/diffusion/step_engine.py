# SPDX-License-Identifier: Apache-2.0
"""A sampler whose unit of work is one denoising step of all open samples.

Samples join, leave and get new weights between two steps, each at its own place in its schedule:

    submit ──► waiting ──► open ──► step, step, ... ──► Sample
                             ▲
                  load (between two steps; nothing is aborted)

Each SDE step records the version that made it. A diffusion model has no keys and values that outlive a step,
so a sample that continues with new weights is exactly a sample of both policies, each for its own steps: the
log-prob of a step can be computed again from the version that made it.

Not thread-safe: one thread calls all methods, so a load is between two steps by construction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from ..errors import ConfigError, WeightSyncError
from .families import Conditions, stacked
from .schedule import NoiseSchedule, joined
from .sde import SdeKind, VelocityField, check_noise, transition, velocities
from .windows import SdeWindow, stream

T = TypeVar("T")
StepSpan = tuple[int, int]
"""A version, and the first of the SDE steps, counted from 0, that it made."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a sample is drawn."""

    schedule: NoiseSchedule
    shape: tuple[int, ...]
    """Shape of its latent."""
    kind: SdeKind = "ode"
    noise_level: float = 0.0
    window: SdeWindow | None = None
    """Its SDE steps; None if all steps are ODE steps, as in validation."""

    def __post_init__(self) -> None:
        check_noise(self.kind, self.noise_level)
        if self.window is None:
            return
        if self.kind == "ode" or self.noise_level == 0:
            raise ConfigError(
                f"SDE steps need noise, got sde_type {self.kind} with noise_level {self.noise_level}; "
                "leave out the window to sample by the ODE"
            )
        if not 0 < self.window.size <= self.schedule.num_steps - 1 - self.window.start:
            raise ConfigError(
                f"the SDE steps {list(self.window.steps)} must be before the last of "
                f"{self.schedule.num_steps} steps"
            )


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """One sample to be drawn."""

    name: str
    conditions: Conditions
    """Of its prompt, without the row dimension."""
    seed: int
    """Decides its noise; other samples in a batch have no influence."""
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class FinishedSample:
    """A finished sample; all tensors on the CPU, float32."""

    name: str
    latent: torch.Tensor
    """Without noise, to be decoded."""
    latents: torch.Tensor
    """(SDE steps + 1, ...): before the first SDE step, and after each. Empty without SDE steps."""
    steps: tuple[int, ...]
    """Index of each SDE step in the schedule."""
    log_probs: torch.Tensor
    """Of each SDE step, by the version that made it."""
    spans: tuple[StepSpan, ...]


@dataclass
class _Open:
    """A sample that is being drawn."""

    request: SampleRequest
    x: torch.Tensor
    noise: torch.Generator
    step: int = 0
    """The next one."""
    latents: list[torch.Tensor] = field(default_factory=list)
    log_probs: list[torch.Tensor] = field(default_factory=list)
    spans: list[StepSpan] = field(default_factory=list)

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling

    @property
    def stochastic(self) -> bool:
        window = self.sampling.window
        return window is not None and self.step in window.steps

    @property
    def done(self) -> bool:
        return self.step == self.sampling.schedule.num_steps

    def record(self, version: int, before: torch.Tensor, after: torch.Tensor, log_prob: torch.Tensor) -> None:
        if not self.latents:
            self.latents.append(before.cpu())
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append((version, len(self.log_probs)))
        self.latents.append(after.cpu())
        self.log_probs.append(log_prob.cpu())

    def finished(self) -> FinishedSample:
        window = self.sampling.window
        return FinishedSample(
            name=self.request.name,
            latent=self.x.cpu(),
            latents=torch.stack(self.latents) if self.latents else torch.empty(0, *self.sampling.shape),
            steps=() if window is None else tuple(window.steps),
            log_probs=torch.stack(self.log_probs) if self.log_probs else torch.empty(0),
            spans=tuple(self.spans),
        )


class StepEngine:
    """Draws samples from a velocity field."""

    def __init__(self, field: VelocityField, *, max_rows: int, device: str = "cpu") -> None:
        """`max_rows`: samples that are open at once; further ones wait."""
        if max_rows < 1:
            raise ConfigError(f"a step engine needs max_rows >= 1, got {max_rows}")
        self.version: int | None = None
        """The version of the next step; None before the first load, and after one that failed."""
        self._field, self._max_rows, self._device = field, max_rows, device
        self._waiting: deque[SampleRequest] = deque()
        self._open: list[_Open] = []

    @property
    def busy(self) -> bool:
        """Return whether a step has work to do."""
        return bool(self._open or self._waiting)

    def submit(self, request: SampleRequest) -> None:
        """Queue a sample. Raises ConfigError if the name is in use."""
        if request.name in self._names():
            raise ConfigError(f"a sample named {request.name} is being drawn already; names must differ")
        self._waiting.append(request)

    def withdraw(self, name: str) -> bool:
        """Forget a sample; return whether it was here."""
        found = name in self._names()
        self._waiting = deque(one for one in self._waiting if one.name != name)
        self._open = [one for one in self._open if one.request.name != name]
        return found

    def progress(self) -> dict[str, int]:
        """Return the number of SDE steps that each sample has made so far."""
        waiting = {request.name: 0 for request in self._waiting}
        return waiting | {one.request.name: len(one.log_probs) for one in self._open}

    def load(self, version: int, commit: Callable[[], T]) -> T:
        """Run `commit`, which replaces the weights; the next step is made by `version`.

        Raises the error of `commit`. The weights are then unknown, and no step is made until a load succeeds.
        """
        self.version = None
        result = commit()
        self.version = version
        return result

    @torch.no_grad()
    def step(self) -> list[FinishedSample]:
        """Make one step of every open sample; return the ones that are finished.

        Raises WeightSyncError if no version is served.
        """
        if self.version is None:
            raise WeightSyncError("no weights are served: load a version before the first step")
        while self._waiting and len(self._open) < self._max_rows:
            self._admit(self._waiting.popleft())
        for rows in self._batches():
            self._advance(rows, self.version)
        finished = [one.finished() for one in self._open if one.done]
        self._open = [one for one in self._open if not one.done]
        return finished

    def _admit(self, request: SampleRequest) -> None:
        noise = stream("noise", request.seed)
        x = torch.randn(request.sampling.shape, generator=noise).to(self._device)
        self._open.append(_Open(request, x, noise))

    def _batches(self) -> Iterator[list[_Open]]:
        """Yield the open samples whose tensors fit together."""
        batches: dict[object, list[_Open]] = {}
        for one in self._open:
            shapes = tuple((name, value.shape) for name, value in one.request.conditions.items())
            batches.setdefault((one.x.shape, shapes), []).append(one)
        yield from batches.values()

    def _advance(self, rows: list[_Open], version: int) -> None:
        """Make one step of some samples with one forward."""
        sigma = torch.stack([one.sampling.schedule.sigmas[one.step] for one in rows])
        conditions = stacked([one.request.conditions for one in rows])
        on_device = {name: value.to(self._device) for name, value in conditions.items()}
        velocity = velocities(self._field, torch.stack([one.x for one in rows]), sigma, on_device)

        kinds: dict[tuple[SdeKind, float], list[int]] = {}
        for index, one in enumerate(rows):
            how = (one.sampling.kind, one.sampling.noise_level) if one.stochastic else ("ode", 0.0)
            kinds.setdefault(how, []).append(index)  # type: ignore[arg-type]
        for (kind, noise_level), indices in kinds.items():
            self._apply([rows[i] for i in indices], velocity[indices], kind, noise_level, version)
        for one in rows:
            one.step += 1

    def _apply(
        self, rows: list[_Open], velocity: torch.Tensor, kind: SdeKind, noise_level: float, version: int
    ) -> None:
        """Move samples by their velocity, all by the same kind of step."""
        interval = joined([one.sampling.schedule.at(torch.tensor([one.step])) for one in rows])
        step = transition(kind, interval, noise_level)
        before = torch.stack([one.x for one in rows])
        after = mean = step.mean(before, velocity)
        if kind != "ode":
            drawn = [torch.randn(one.sampling.shape, generator=one.noise) for one in rows]
            after = step.sample(mean, torch.stack(drawn).to(self._device))
            log_probs = step.log_prob(after, mean)
            for index, one in enumerate(rows):
                one.record(version, before[index], after[index], log_probs[index])
        for index, one in enumerate(rows):
            one.x = after[index]

    def _names(self) -> set[str]:
        return {one.name for one in self._waiting} | {one.request.name for one in self._open}
