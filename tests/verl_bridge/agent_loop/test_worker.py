# SPDX-License-Identifier: Apache-2.0
"""A group that is given up ends, whenever that is heard of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from recipe.async_pipeline.agents.episodes import EndPolicies, EpisodeRules
from recipe.async_pipeline.errors import RolloutError
from tests.conftest import Load

pytestmark = pytest.mark.real_engine

PROMPT = {"uid": "a", "index": 3, "global_steps": 2}


@pytest.fixture
def agent_loop(load: Load) -> ModuleType:
    return load("recipe.async_pipeline.verl_bridge.agent_loop.worker")


def worker_of(agent_loop: ModuleType, before: asyncio.Event) -> Any:
    """verl's part stands still until `before` is set; the answer itself never comes."""

    class Worker(agent_loop.PushAgentLoopWorker):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            self._groups: dict[str, Any] = {}
            self.background_tasks: set[Any] = set()
            self._sampling: dict[str, Any] = {}
            self.rollout_config = SimpleNamespace(agent=SimpleNamespace(default_agent_loop="one_turn"))
            self._redundancy = 0
            self._episodes = agent_loop.Episodes(EpisodeRules.of(2, EndPolicies()))
            self.begun = 0

        async def _run_prompt(self, *args: Any, **kwargs: Any) -> None:
            await before.wait()
            await super()._run_prompt(*args, **kwargs)

        async def _answer(self, *args: Any) -> Any:
            self.begun += 1
            await asyncio.get_running_loop().create_future()

    return Worker()


def test_the_process_of_a_worker_knows_the_agent_loop_of_environments(
    agent_loop: ModuleType, load: Load
) -> None:
    registry = load("verl.experimental.agent_loop.agent_loop")._agent_loop_registry
    assert registry[agent_loop.environment_loop.NAME]["_target_"].endswith("EnvironmentLoop")


@pytest.mark.parametrize("begun", [False, True])
def test_a_group_that_is_given_up_ends_with_nothing(agent_loop: ModuleType, begun: bool) -> None:
    async def story() -> None:
        before = asyncio.Event()
        worker = worker_of(agent_loop, before)
        group = asyncio.create_task(worker.run_group(PROMPT))
        if begun:
            before.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert worker.begun == begun
        await worker.give_up("a")
        before.set()
        assert await asyncio.wait_for(group, 5) == agent_loop.Answered([], [], [])
        assert worker.begun == begun, "no engine got a request for it afterwards"
        assert not worker._groups

    asyncio.run(story())


def test_one_that_is_over_is_left_alone(agent_loop: ModuleType) -> None:
    async def story() -> None:
        worker = worker_of(agent_loop, asyncio.Event())
        await worker.give_up("a")
        assert not worker._groups

    asyncio.run(story())


@pytest.mark.parametrize("stored", [False, True], ids=["before it is stored", "while it is stored"])
def test_a_group_that_is_given_up_tells_whether_it_was_stored(agent_loop: ModuleType, stored: bool) -> None:
    async def story() -> None:
        before, scored, put = (asyncio.Event() for _ in range(3))
        before.set()
        worker = worker_of(agent_loop, before)
        del type(worker)._answer
        worker.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(n=1)))
        worker._saves, worker._checks = False, SimpleNamespace(usable=lambda found: True)
        puts: list[str] = []

        async def run(own: Any, params: Any, *, session_id: int, **kwargs: Any) -> None:
            await scored.wait()
            fields = {"uid": "a", "session_id": 0, "extra_fields": {}, "response_mask": Mask()}
            await own._store_trajectories(["a_0_0"], [fields], [TAG], "train")

        async def store(group: Any) -> None:
            await put.wait()
            puts.extend(one.trajectory.key for one in group)

        type(worker)._run_agent_loop, worker._store_group = run, store
        group = asyncio.create_task(worker.run_group(PROMPT))
        if stored:
            scored.set()
        for _ in range(9):
            await asyncio.sleep(0)
        assert worker._groups["a"].is_stored == stored

        giving_up = asyncio.create_task(worker.give_up("a"))
        await asyncio.sleep(0)
        scored.set()
        put.set()
        answered = await asyncio.wait_for(group, 5)
        await asyncio.wait_for(giving_up, 5)
        assert [one.key for one in answered.trajectories] == puts == (["a_0_0"] if stored else [])
        assert not worker._groups

    asyncio.run(story())


TAG = {"response_len": 3, "min_global_steps": 1, "max_global_steps": 2}


def test_each_response_is_generated_through_a_client_with_its_transcript(agent_loop: ModuleType) -> None:
    async def story() -> None:
        seen: list[Any] = []
        worker = worker_of(agent_loop, asyncio.Event())
        worker.llm_client = SimpleNamespace(tokenizer="t", generate=lambda *a, **k: _kept(seen, k))
        worker._saves = False

        async def run(own: Any, *args: Any, session_id: int, **kwargs: Any) -> None:
            await own.llm_client.generate(f"r{session_id}")

        type(worker)._run_agent_loop = run
        begun = [["one"], ["two"]]
        transcripts = [agent_loop.Transcript(before) for before in begun]
        for i in range(2):
            await worker._session([], transcripts[i], agent_loop.Begun(), session_id=i)
        assert [one["transcript"]._before for one in seen] == begun
        await worker._session([], None, agent_loop.Begun(), session_id=2)
        assert "transcript" not in seen[2], "a run without checkpoints keeps none"
        assert agent_loop.RecordingClient(worker.llm_client, transcripts[0]).tokenizer == "t"

    asyncio.run(story())


def begin(worker: Any, agent_loop: ModuleType) -> Any:
    """Return a group of which nothing is finished."""
    worker._groups["a"] = agent_loop.GroupInProgress()
    return worker._groups["a"]


async def finish(worker: Any, session_id: int) -> None:
    """Store the response of a session, as verl does at its end."""
    fields = {"uid": "a", "session_id": session_id, "extra_fields": {}, "response_mask": Mask()}
    await worker._store_trajectories([f"a_{session_id}_0"], [fields], [TAG], "train")


def stored_by(worker: Any, run: Callable[..., Any]) -> tuple[list[str], Callable[..., Any]]:
    """Let sessions run `run`; returns the keys that will have been stored, and the call for a group."""
    stored: list[str] = []

    async def store(group: Any) -> None:
        stored.extend(one.trajectory.key for one in group)

    type(worker)._run_agent_loop, worker._store_group = run, store
    return stored, super(type(worker), worker)._answer


def test_an_episode_that_fails_is_repeated_without_its_group(agent_loop: ModuleType) -> None:
    """Its second attempt generates all tokens again, and the group has one response of each episode."""

    async def story() -> None:
        worker, begun = worker_of(agent_loop, asyncio.Event()), list[int]()
        worker.llm_client, worker._saves = SimpleNamespace(), True
        worker.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(n=2)))
        worker._checks = SimpleNamespace(usable=lambda found: not found)

        async def run(own: Any, params: Any, *, session_id: int, **kwargs: Any) -> None:
            begun.append(session_id)
            transcript = own.llm_client._transcript
            assert transcript.said == transcript._before == []
            if session_id == 1 and begun.count(1) <= failures:
                transcript.said.append("of an attempt that fails")
                raise ValueError("a tool")
            attempt = agent_loop.current_attempt()
            attempt.returned([])
            await finish(own, session_id)

        stored, answer = stored_by(worker, run)
        failures = 1
        answered = await answer(begin(worker, agent_loop), {"uid": "a"}, {}, {}, False)
        found = {one.key: one.attempts for one in answered.trajectories}
        assert found == {"a_0_0": 1, "a_1_0": 2}
        assert (begun, answered.flaws, sorted(stored)) == ([0, 1, 1], [], ["a_0_0", "a_1_0"])

        begun.clear()
        stored.clear()
        failures = 2
        answered = await answer(begin(worker, agent_loop), {"uid": "a"}, {}, {}, False)
        assert [flaw.kind for flaw in answered.flaws] == ["failed_episode"]
        assert "episode a_1, attempt 2: agent_failed: ValueError: a tool" in answered.flaws[0].why
        assert (begun, stored) == ([0, 1, 1], []), "and nothing of the group is stored"

    asyncio.run(story())


def test_the_episodes_that_finish_first_make_the_group(agent_loop: ModuleType) -> None:
    """Of 2 + 2, one fails and one is slow: the other two are stored, and no failure is reported."""

    async def story() -> None:
        worker, ended = worker_of(agent_loop, asyncio.Event()), list[int]()
        worker.llm_client, worker._saves, worker._redundancy = SimpleNamespace(), False, 2
        worker.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(n=2)))
        worker._checks = SimpleNamespace(usable=lambda found: not found)

        async def run(own: Any, params: Any, *, session_id: int, **kwargs: Any) -> None:
            if session_id == 0:
                raise ValueError("a tool")
            agent_loop.current_attempt().returned([])
            if session_id == slow:
                try:
                    await asyncio.get_running_loop().create_future()
                finally:
                    ended.append(session_id)
            await finish(own, session_id)

        stored, answer = stored_by(worker, run)
        slow = 2
        answered = await answer(begin(worker, agent_loop), {"uid": "a"}, {}, {}, False)
        assert [one.key for one in answered.trajectories] == stored == ["a_1_0", "a_3_0"]
        assert (answered.flaws, ended) == ([], [2])
        assert [(one.tokens, one.turns) for one in answered.redundant] == [(None, 1)] * 2

        slow = -1
        stored.clear()
        answered = await answer(begin(worker, agent_loop), {"uid": "a"}, {}, {}, False)
        assert stored == ["a_1_0", "a_2_0"], "one that finishes in the same moment is not stored"
        assert [one.tokens for one in answered.redundant] == [None, 3]

    asyncio.run(story())


def test_a_response_that_comes_after_its_group_is_not_stored(agent_loop: ModuleType) -> None:
    async def story() -> None:
        worker = worker_of(agent_loop, asyncio.Event())
        fields = {"uid": "gone", "session_id": 0}

        async def late(number: int) -> None:
            agent_loop.current_attempt().returned([])
            await worker._store_trajectories(["gone_0_0"], [fields], [TAG], "train")

        with pytest.raises(RolloutError, match="gone was given up before gone_0_0 was finished"):
            await worker._episodes.play(late, "gone_0")

    asyncio.run(story())


async def _kept(seen: list[Any], kwargs: dict[str, Any]) -> None:
    seen.append(kwargs)


def test_a_group_is_answered_from_its_row(agent_loop: ModuleType) -> None:
    """Resumed responses reach the transcripts, and are neither stored nor given to the agent loop."""

    async def story() -> None:
        worker, stored = worker_of(agent_loop, asyncio.Event()), list[Any]()
        worker.llm_client, worker._saves = SimpleNamespace(), False
        worker.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(n=2)))
        worker._checks = SimpleNamespace(usable=lambda found: True)

        async def run(own: Any, params: Any, *, session_id: int, **kwargs: Any) -> None:
            transcript = own.llm_client._transcript
            assert set(kwargs) == {"trajectory", "trace", "uid"}
            extra = {"reward_extra_info": {"acc": 1}, "resumed": transcript._before}
            fields = {"uid": "a", "session_id": session_id, "extra_fields": extra, "response_mask": Mask()}
            await own._store_trajectories([f"a_{session_id}_0"], [fields], [TAG], "train")

        async def store(group: Any) -> None:
            stored.extend(group)

        type(worker)._run_agent_loop, worker._store_group = run, store
        prompt = {"uid": "a", agent_loop.COLUMN: [["x"], ["y"]]}
        answered = await super(type(worker), worker)._answer(begin(worker, agent_loop), prompt, {}, {}, False)
        assert [one.key for one in answered.trajectories] == ["a_0_0", "a_1_0"]
        assert [one.columns for one in answered.details] == [sorted(stored[0].fields)] * 2
        assert [one.reward_info for one in answered.details] == [{"acc": 1}] * 2
        assert [one.fields["extra_fields"]["resumed"] for one in stored] == [["x"], ["y"]]
        assert [(one.trajectory.payload, one.partition_id) for one in stored] == [(TAG, "train")] * 2

    asyncio.run(story())


class Mask:
    """A mask of three tokens that count."""

    def sum(self) -> int:
        return 3


@pytest.mark.parametrize("agent", [None, "another"])
def test_a_prompt_is_begun_as_verl_begins_it(agent_loop: ModuleType, agent: str | None) -> None:
    """Compare with verl's `generate_sequences` for a batch of one row."""
    from omegaconf import OmegaConf
    from verl.utils import tensordict_utils as tu

    rollout = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "calculate_log_probs": True}
    config = {
        "actor_rollout_ref": {"rollout": {**rollout, "agent": {"default_agent_loop": "one_turn"}, "n": 2}}
    }
    row = {**PROMPT, "raw_prompt": [{"role": "user", "content": "1+2="}]}
    if agent is not None:
        row["agent_name"] = agent

    async def story() -> list[tuple[Any, ...]]:
        begun: list[tuple[Any, ...]] = []
        worker = worker_of(agent_loop, asyncio.Event())
        worker.config = OmegaConf.create(config)
        worker.rollout_config = worker.config.actor_rollout_ref.rollout
        worker._sampling = agent_loop.sampling_of(worker.rollout_config)

        async def run_prompt(
            own: Any, prompt: Any, params: Any, trajectory: Any, trace: bool = False
        ) -> None:
            begun.append((prompt, params, trajectory, trace))
            if prompt["uid"] in own._groups:
                own._groups[prompt["uid"]].answered.set_result(None)

        type(worker)._run_prompt = run_prompt
        await worker.run_group(dict(row))
        batch = tu.get_tensordict({name: [value] for name, value in row.items() if name != "global_steps"})
        tu.assign_non_tensor_data(batch, "global_steps", row["global_steps"])
        await worker.generate_sequences(batch)
        await asyncio.gather(*worker.background_tasks)
        return begun

    ours, verls = asyncio.run(story())
    assert ours == verls


def test_a_worker_ends_what_its_episodes_share(agent_loop: ModuleType) -> None:
    ended: list[str] = []

    async def story() -> None:
        worker, loop = worker_of(agent_loop, asyncio.Event()), asyncio.get_running_loop()
        await worker.close()

        async def ends(name: str) -> None:
            ended.append(name)

        gateway = SimpleNamespace(stop=lambda: ends("gateway"))
        pool = SimpleNamespace(close=lambda: ends("environments"))
        agent_loop.agent_session_loop._setups[loop] = gateway
        agent_loop.environment_loop._setups[loop] = SimpleNamespace(pool=pool)
        for _ in range(2):
            await worker.close()

    asyncio.run(story())
    assert ended == ["gateway", "environments"]


def test_the_counts_of_an_episode_are_kept_once(
    agent_loop: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = SimpleNamespace(counts={"params_overridden": 2}, took_ms=[1.5], end="done", number=1)

    async def story() -> list[Any]:
        worker = worker_of(agent_loop, asyncio.Event())
        begin(worker, agent_loop)
        agent_loop.change_episode(cost={}, waits=(0.25, 0.5), attempt=attempt)
        rows = [{"uid": "a", "session_id": 0, "extra_fields": {}} for _ in range(2)]
        await worker._store_trajectories(["a_0_0", "a_0_1"], rows, [TAG, TAG], "train")
        return [(one.counts, one.took_ms, one.trajectory.env_s) for one in worker._groups["a"].finished]

    assert asyncio.run(story()) == [({}, (), 0.5), ({"params_overridden": 2}, [1.5], 0.5)]
