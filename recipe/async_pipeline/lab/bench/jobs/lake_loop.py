# SPDX-License-Identifier: Apache-2.0
"""Episodes of FrozenLake for every arm of a benchmark, in an environment that answers late, with spans."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from omegaconf import DictConfig, OmegaConf

from ....agents.env_hosts import EnvironmentPool, PoolLimits
from ....agents.environment import EnvironmentSpec, Step
from ....agents.frozen_lake import FrozenLake
from ....verl_bridge.agent_loop.episodes import environment_loop
from ....verl_bridge.agent_loop.episodes.environment_loop import EnvironmentLoop, EnvironmentSetup
from ....verl_bridge.agent_loop.episodes.episode import END, WHY
from ..inputs.waits import LognormalWait
from ..inputs.workload import EpisodeWorkload
from ..measuring.spans import of_this_job
from .agent_loop import session_of, versions_in

EPISODES = 4096
"""More than any workload has at once: the waits of an environment bound nothing here."""
_setups: WeakKeyDictionary[asyncio.AbstractEventLoop, EnvironmentSetup] = WeakKeyDictionary()


class RemoteLake(FrozenLake):
    """Answers each step after a latency that its prompt, session and turn determine."""

    def __init__(self, *, wait: Mapping[str, float], run_seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._wait, self._run_seed = LognormalWait(**wait), run_seed
        self._key: tuple[int, int] = (0, 0)
        self._turn = 0

    def reset(self, seed: int, *, prompt: int = 0, session: int = 0, **task: Any) -> Any:
        """Begin an episode."""
        self._key, self._turn = (prompt, session), 0
        return super().reset(seed, **task)

    async def step(self, text: str) -> Step:  # type: ignore[override]
        """Wait, and do the action."""
        self._turn += 1
        with of_this_job().measure("tool"):
            await asyncio.sleep(self._wait.draw(self._run_seed, "tool", *self._key, self._turn))
        return super().step(text)


class LakeLoop(EnvironmentLoop):  # type: ignore[misc]
    """Plays one episode as this package's agent loop does, under any trainer."""

    def __init__(self, *args: Any, episode: DictConfig, seed: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._episode = msgspec.convert(OmegaConf.to_container(episode), EpisodeWorkload)
        self._seed = seed

    def setup(self) -> EnvironmentSetup:
        """Return the setup of this process, which does not depend on the trainer's configuration."""
        loop = asyncio.get_running_loop()
        found = _setups.get(loop)
        if found is None:
            wait = msgspec.to_builtins(self._episode.tool_s)
            kwargs = {"size": 4, "frozen": 0.8, "wait": wait, "run_seed": self._seed}
            spec = EnvironmentSpec(name=f"{__name__}:{RemoteLake.__name__}", kwargs=kwargs)
            pool = EnvironmentPool(spec, PoolLimits(isolation="inline", concurrency=EPISODES))
            length = int(self.rollout_config.response_length)
            found = _setups[loop] = EnvironmentSetup(pool, self._episode.turns, None, length, self._seed)
        return found

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        """Play one episode; the loss mask excludes the observations."""
        prompt, session = int(row["index"]), session_of(row)
        info = environment_loop.plain(row.get("extra_info") or {})
        info["task"] = {"prompt": prompt, "session": session}
        started = time.monotonic()
        output = await super().run(sampling_params, **{**row, "extra_info": info})
        of_this_job().add("episode", started, prompt=prompt)
        # Only this package's worker takes these, and verl's would store them.
        for name in (END, WHY):
            output.extra_fields.pop(name)
        return output

    async def _turn(self, *args: Any) -> list[int]:
        with of_this_job().measure("generate"):
            found: list[int] = await super()._turn(*args)
        return found

    def _note_versions(self, episode: Any, said: Mapping[str, Any]) -> None:
        fields = episode.extra_fields
        known = [fields[name] for name in ("min_global_steps", "max_global_steps") if name in fields]
        versions = [*known, *versions_in(said)]
        fields.update(min_global_steps=min(versions), max_global_steps=max(versions))
