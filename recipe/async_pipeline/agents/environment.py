# SPDX-License-Identifier: Apache-2.0
"""Environments that a policy plays in text: the protocol, and calls to one with checked results.

    reset(seed, **task) ─► observation ─► policy ─► step(text) ─► observation, reward, over ─► policy ─► ...

`reset` begins an episode. The seed belongs to the prompt: all episodes of a group, and each attempt at one,
get the same seed, so that only what the policy wrote makes them differ. One object plays many episodes, one
after another. Methods may be coroutines.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import inspect
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from ..errors import ConfigError, EnvironmentFailed

BUILT_IN: Mapping[str, str] = {"frozen_lake": "recipe.async_pipeline.agents.frozen_lake:FrozenLake"}
"""Environments of this package, by the name that a config may use."""
GYMNASIUM = "recipe.async_pipeline.agents.gym_environment:GymEnvironment"
"""The adapter for any other name, which then is an id of gymnasium."""
OPEN_ENV = "recipe.async_pipeline.agents.open_env:OpenEnvEnvironment"
"""The adapter for URLs."""


Isolation = Literal["process", "thread", "inline"]
"""Where an environment runs; see `env_hosts`."""
MESSAGE_BYTES = 1 << 26
"""The longest message to or from the process of an environment."""


class Step(NamedTuple):
    """The answer of an environment to a text."""

    observation: Any
    """What the policy reads or sees next, an `Observation`; unused if the episode is over."""
    reward: float = 0.0
    """Finite. The rewards of all steps of an episode are added up."""
    over: bool = False
    """The episode has ended."""
    invalid: bool = False
    """The text was no action. An episode that is over because of it ended as `invalid`."""


class TextEnvironment(Protocol):
    """An environment. Each method may raise any exception: the episode then ends as `env_failed`."""

    def reset(self, seed: int, **task: Any) -> Any:
        """Begin an episode; return the first observation. `task`: of the row, if it has one."""

    def step(self, text: str) -> Any:
        """Return the `Step` that the text of the policy leads to."""

    def close(self) -> Any:
        """Free what the environment holds."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpec:
    """Which environment to make, with plain values only, which a process can receive."""

    name: str
    """A name of `BUILT_IN`, `module:Class`, the URL of a server of OpenEnv, or an id of gymnasium."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the class."""

    def make(self) -> TextEnvironment:
        """Return a new environment. Raises ConfigError if there is no such class."""
        target, kwargs = BUILT_IN.get(self.name, self.name), dict(self.kwargs)
        if is_url(target):
            target, kwargs = OPEN_ENV, {"url": self.name, **kwargs}
        elif ":" not in target:
            target, kwargs = GYMNASIUM, {"id": self.name, **kwargs}
        module, _, name = target.partition(":")
        try:
            made: TextEnvironment = getattr(importlib.import_module(module), name)(**kwargs)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"the environment {self.name!r} cannot be imported ({error}); write {', '.join(BUILT_IN)}, "
                "module:Class, http://HOST:PORT or ws://HOST:PORT, or an id of gymnasium"
            ) from error
        return made


def is_url(name: str) -> bool:
    """Return whether an environment is named by its URL."""
    return "://" in name


class Player:
    """Calls one environment, made at the first call, and checks what it returns."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._spec = spec
        self._environment: TextEnvironment | None = None

    async def reset(self, seed: int, task: Mapping[str, Any]) -> Observation:
        """Return the first observation. Raises EnvironmentFailed."""
        return checked_observation(await self._call("reset", seed, **task))

    async def step(self, text: str) -> Step:
        """Return the step. Raises EnvironmentFailed."""
        return checked_step(await self._call("step", text))

    async def close(self) -> None:
        """Close the environment if it was made. Raises EnvironmentFailed."""
        if self._environment is not None:
            await self._call("close")

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            if self._environment is None:
                self._environment = self._spec.make()
            call: Callable[..., Any] = getattr(self._environment, method)
            result = call(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result
        # An environment may also call exit(), which must not end the process of others, or await a task that
        # it has cancelled: this one is only cancelled by a host that needs no answer.
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 - any code
            raise EnvironmentFailed(f"{method}: {type(error).__name__}: {error}") from error


def checked_step(found: Any) -> Step:
    """Return what `step` returned as a Step. Raises EnvironmentFailed if it is none."""
    if not (isinstance(found, tuple | list) and 1 <= len(found) <= len(Step._fields)):
        raise EnvironmentFailed(f"step must return a Step (observation, reward, over), got {found!r}"[:500])
    step = Step(*found)
    try:
        reward = float(step.reward)
    except (TypeError, ValueError):
        reward = math.nan
    if not math.isfinite(reward):
        raise EnvironmentFailed(f"the reward of a step must be a finite number, got {step.reward!r}"[:500])
    return Step(checked_observation(step.observation), reward, bool(step.over), bool(step.invalid))


Observation = str | Sequence[str | bytes]
"""A picture is the file of an image, for example a PNG; see `png`."""
PICTURE = "picture"


def png(image: Any) -> bytes:
    """Return the file of a picture.

    `image`: an image of Pillow, or an array of 8-bit numbers with the shape (height, width, 3).
    """
    from PIL import Image

    shown = image if isinstance(image, Image.Image) else Image.fromarray(image)
    file = io.BytesIO()
    shown.save(file, "PNG")
    return file.getvalue()


def squares(colours: Sequence[Sequence[str]], side: int) -> bytes:
    """Return the picture of a board, with a square of so many pixels for each colour."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (side * len(colours[0]), side * len(colours)))
    draw = ImageDraw.Draw(image)
    for down, row in enumerate(colours):
        for right, colour in enumerate(row):
            left, top = side * right, side * down
            draw.rectangle((left, top, left + side - 1, top + side - 1), fill=colour, outline="grey")
    return png(image)


def checked_observation(found: Any) -> Observation:
    """Return what an environment showed. Raises EnvironmentFailed if it is no observation."""
    if isinstance(found, str):
        return found
    if isinstance(found, list | tuple) and found and all(isinstance(one, str | bytes) for one in found):
        return found
    raise EnvironmentFailed(
        f"an observation must be a text, or a list of texts and of files of pictures, got {found!r}"[:500]
    )


def to_json(observation: Observation) -> Any:
    """Return an observation as a value of JSON."""
    if isinstance(observation, str):
        return observation
    return [one if isinstance(one, str) else {PICTURE: base64.b64encode(one).decode()} for one in observation]


def of_json(value: Any) -> Observation:
    """Return the observation that `to_json` wrote."""
    if isinstance(value, str):
        return value
    return [one if isinstance(one, str) else base64.b64decode(one[PICTURE]) for one in value]
