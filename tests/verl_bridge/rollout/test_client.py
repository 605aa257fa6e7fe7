# SPDX-License-Identifier: Apache-2.0
"""A request outlives the replica that answers it, as long as there is another."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from recipe.async_pipeline.verl_bridge.rollout.router import Router
from tests.conftest import Load

pytestmark = pytest.mark.real_engine


class EngineDeadError(RuntimeError):
    """Named as vLLM's."""


def raised_remotely(cause: Exception) -> Exception:
    raised: Exception = RayTaskError("generate", "traceback", cause).as_instanceof_cause()
    return raised


@pytest.fixture(scope="module")
def ours(load: Load) -> ModuleType:
    return load("recipe.async_pipeline.verl_bridge.rollout.client")


class Balancer:
    """verl's, without its actor: sends every request to the first server."""

    by_default = False
    """Does it decide as verl's does by default, so that a client may decide itself?"""

    def __init__(self, **servers: Callable[[], Awaitable[Any]]) -> None:
        self.servers = servers
        self.given_up: list[str] = []
        self.asked: list[str] = []
        self.released: list[str] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(Balancer, f"_{name}")

        async def call(**kwargs: Any) -> Any:
            return method(self, **kwargs)

        def remote(*args: Any, **kwargs: Any) -> Any:
            kwargs |= {"names": args[0]} if args else {}
            return asyncio.ensure_future(call(**kwargs))

        return SimpleNamespace(remote=remote)

    def _require_acquire_fields(self) -> list[str]:
        return []

    _require_release_fields = _require_acquire_fields

    def _acquire_server(self, request_id: str) -> tuple[str, Any]:
        if not self.servers:
            raise raised_remotely(RuntimeError("No available servers in load balancer"))
        name = next(iter(self.servers))
        return name, self._handle(name)

    def _handle(self, name: str) -> Any:
        answer = self.servers[name]

        def generate(**kwargs: Any) -> Any:
            self.asked.append(name)
            return asyncio.ensure_future(answer())

        give_up = SimpleNamespace(remote=lambda request: self.given_up.append(f"{name}: {request}"))
        return SimpleNamespace(generate=SimpleNamespace(remote=generate), give_up=give_up)

    def ___ray_call__(self, names: Any) -> Any:
        return {name: self._handle(name) for name in self.servers} if self.by_default else None

    def _release_server(self, server_id: str) -> None:
        self.released.append(server_id)

    def _remove_servers(self, names: list[str]) -> None:
        for name in names:
            self.servers.pop(name, None)

    def _get_all_servers(self) -> list[str]:
        return list(self.servers)


async def well() -> Any:
    return SimpleNamespace(extra_fields={"global_steps": 4}, token_ids=[1])


def failing(error: Exception) -> Callable[[], Awaitable[Any]]:
    async def answer() -> Any:
        raise error

    return answer


WAIT_S = 0.2


def client_of(ours: ModuleType, balancer: Balancer) -> Any:
    rollout = SimpleNamespace(name="vllm", prompt_length=4, response_length=10)
    v1 = SimpleNamespace(async_pipeline=SimpleNamespace(faults=SimpleNamespace(wait_timeout_s=WAIT_S)))
    config = SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(rollout=rollout), trainer=SimpleNamespace(v1=v1)
    )
    return ours.PipelineLLMClient(config=config, load_balancer_handle=balancer)


def generate(ours: ModuleType, balancer: Balancer, times: int = 1) -> Any:
    """The answer to the last of some requests, one after the other."""

    client = client_of(ours, balancer)

    async def main() -> Any:
        try:
            for _ in range(times - 1):
                with suppress(RuntimeError):
                    await client.generate("r", prompt_ids=[1], sampling_params={})
            return await client.generate("r", prompt_ids=[1], sampling_params={})
        finally:
            await asyncio.sleep(0)
            assert client._server_of == {}

    return asyncio.run(main())


@pytest.fixture(autouse=True, params=[False, True], ids=["verl decides", "the client decides"])
def who_decides(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, ours: ModuleType) -> None:
    monkeypatch.setattr(Balancer, "by_default", request.param)
    monkeypatch.setattr(ours, "REFRESH_S", 0.01)
    # Among equals, the first.
    monkeypatch.setattr(ours, "Router", lambda: Router(choose=lambda names: names[0]))


DEATHS = [ActorDiedError(), raised_remotely(EngineDeadError("died"))]


@pytest.mark.parametrize("death", DEATHS, ids=["the server", "the engine"])
def test_another_replica_answers(ours: ModuleType, death: Exception) -> None:
    balancer = Balancer(a=failing(death), b=well)
    assert generate(ours, balancer).token_ids == [1]
    assert balancer.asked == ["a", "b"]
    assert balancer.released == ([] if Balancer.by_default else ["a", "b"])
    assert list(balancer.servers) == ["b"], "nobody else is sent to the dead one"


@pytest.mark.parametrize("death", DEATHS, ids=["the server", "the engine"])
def test_the_last_death_is_what_the_caller_gets(ours: ModuleType, death: Exception) -> None:
    balancer = Balancer(a=failing(ActorDiedError()), b=failing(death))
    with pytest.raises(type(death)):
        generate(ours, balancer)
    assert balancer.asked == ["a", "b"]


def test_whoever_comes_too_late_learns_what_the_last_one_died_of(ours: ModuleType) -> None:
    balancer = Balancer(a=failing(raised_remotely(EngineDeadError("died"))))
    with pytest.raises(EngineDeadError):
        generate(ours, balancer, times=2)
    assert balancer.asked == ["a"]


@pytest.mark.parametrize("death", DEATHS, ids=["the server", "the engine"])
def test_where_nobody_is_left_a_request_waits_for_whoever_comes_back(
    ours: ModuleType, death: Exception
) -> None:
    balancer = Balancer()

    async def dies() -> Any:
        asyncio.get_running_loop().call_later(WAIT_S / 4, balancer.servers.update, {"b": well})
        raise death

    balancer.servers["a"] = dies
    assert generate(ours, balancer).token_ids == [1]
    assert balancer.asked == ["a", "b"]


def test_a_request_that_everybody_dies_of_is_not_asked_again(ours: ModuleType) -> None:
    balancer = Balancer()

    def next_one() -> Callable[[], Awaitable[Any]]:
        async def dies() -> Any:
            balancer.servers[f"s{len(balancer.asked)}"] = next_one()
            raise ActorDiedError

        return dies

    balancer.servers["s0"] = next_one()
    with pytest.raises(ActorDiedError):
        generate(ours, balancer)
    assert len(balancer.asked) == ours.DEATHS


def test_a_pool_that_was_never_there_is_said_to_be_empty(ours: ModuleType) -> None:
    with pytest.raises(RuntimeError) as caught:
        generate(ours, Balancer())
    assert "No available servers" in str(ours.cause_of(caught.value))


def test_what_is_no_death_comes_through(ours: ModuleType) -> None:
    balancer = Balancer(a=failing(raised_remotely(ValueError("prompt too long"))), b=well)
    with pytest.raises(ValueError, match="traceback"):
        generate(ours, balancer)
    assert balancer.asked == ["a"]


OUT_OF_REACH = ActorUnavailableError("the connection is gone", b"x" * 16)


def test_a_replica_out_of_reach_is_left_out_by_who_noticed_and_by_nobody_else(ours: ModuleType) -> None:
    """It may be there again before anybody else has noticed."""
    balancer = Balancer(a=failing(OUT_OF_REACH), b=well)
    assert generate(ours, balancer).token_ids == [1]
    assert balancer.asked == ["a", "b"]
    assert list(balancer.servers) == (["a", "b"] if Balancer.by_default else ["b"])


def test_the_only_replica_is_asked_again_until_it_is_in_reach(ours: ModuleType) -> None:
    balancer = Balancer()
    answers = iter([OUT_OF_REACH, OUT_OF_REACH, None])

    async def answer() -> Any:
        error = next(answers)
        if error is not None:
            balancer.servers.setdefault("a", answer)
            asyncio.get_running_loop().call_later(WAIT_S / 4, balancer.servers.update, {"a": answer})
            raise error
        return await well()

    balancer.servers["a"] = answer
    assert generate(ours, balancer).token_ids == [1]
    assert balancer.asked == ["a", "a", "a"]


def test_a_request_that_is_cancelled_is_given_up_by_its_replica(ours: ModuleType) -> None:
    begun = asyncio.Event()

    async def never() -> Any:
        begun.set()
        await asyncio.Event().wait()

    balancer = Balancer(a=never)
    client = client_of(ours, balancer)

    async def main() -> None:
        task = asyncio.create_task(client.generate("r", prompt_ids=[1], sampling_params={}))
        await begun.wait()
        name = client._asked["r"][1]
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert balancer.given_up == [f"a: {name}"]
        assert client._asked == client._server_of == {}

    asyncio.run(main())


def test_a_replica_that_came_later_is_found(ours: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "REFRESH_S", 0.0)
    balancer = Balancer(a=well)
    client = client_of(ours, balancer)

    async def main() -> None:
        await client.generate("first", prompt_ids=[1], sampling_params={})
        balancer.servers = {"b": well}
        for number in range(10):
            await client.generate(f"later {number}", prompt_ids=[1], sampling_params={})

    asyncio.run(main())
    assert balancer.asked[0] == "a"
    assert balancer.asked[-1] == "b"


# Answers that an earlier process has begun.


def said(ours: ModuleType, tokens: list[int], stop: str | None) -> Any:
    return importlib.import_module(
        "recipe.async_pipeline.verl_bridge.agent_loop.partial_rollouts"
    ).RecordedRequest([1], tokens, [-0.5] * len(tokens), [[3, 0]], stop, "replica 0")


async def resumed(
    ours: ModuleType, before: list[Any], answers: list[Any], prompts: list[list[int]]
) -> tuple[list[Any], Any, list[Any]]:
    """The outputs to some prompts, the transcript after them, and what servers were asked for."""
    transcripts = importlib.import_module("recipe.async_pipeline.verl_bridge.agent_loop.partial_rollouts")
    asked: list[Any] = []

    async def answer() -> Any:
        return answers[len(asked) - 1]

    class Server(Balancer):
        def _handle(self, name: str) -> Any:
            handle = super()._handle(name)
            generate = handle.generate.remote

            def recorded(**kwargs: Any) -> Any:
                asked.append((kwargs["prompt_ids"], kwargs["sampling_params"]))
                return generate(**kwargs)

            handle.generate.remote = recorded
            return handle

    transcript = transcripts.Transcript(before)
    client = transcripts.RecordingClient(client_of(ours, Server(a=answer)), transcript)
    outputs = [
        await client.generate(f"r{i}", prompt_ids=prompt, sampling_params={"seed": 7})
        for i, prompt in enumerate(prompts)
    ]
    return outputs, transcript, asked


def output(tokens: list[int], version: int) -> Any:
    from verl.workers.rollout.replica import TokenOutput

    fields = {
        "version_spans": [[version, 0]],
        "min_global_steps": version,
        "max_global_steps": version,
        "global_steps": version,
    }
    return TokenOutput(
        token_ids=tokens, log_probs=[-1.0] * len(tokens), stop_reason="completed", extra_fields=fields
    )


def test_what_was_answered_is_not_asked_for_again(ours: ModuleType) -> None:
    (again,), transcript, asked = asyncio.run(resumed(ours, [said(ours, [5, 6], "completed")], [], [[1]]))
    assert asked == []
    assert (again.token_ids, again.log_probs, again.extra_fields["version_spans"]) == (
        [5, 6],
        [-0.5, -0.5],
        [[3, 0]],
    )
    assert (again.extra_fields["min_global_steps"], again.extra_fields["max_global_steps"]) == (3, 3)
    assert [one.token_ids for one in transcript.said] == [[5, 6]], "the next checkpoint has it as well"


def test_what_was_begun_goes_on(ours: ModuleType) -> None:
    (whole, other), transcript, asked = asyncio.run(
        resumed(ours, [said(ours, [5, 6], None)], [output([7], 4), output([8], 4)], [[1], [2]])
    )
    assert asked == [([1, 5, 6], {"seed": 7, "max_tokens": 8}), ([2], {"seed": 7})], "10 tokens are allowed"
    assert (whole.token_ids, whole.log_probs) == ([5, 6, 7], [-0.5, -0.5, -1.0])
    assert whole.extra_fields["version_spans"] == [[3, 0], [4, 2]]
    assert (whole.extra_fields["min_global_steps"], whole.extra_fields["max_global_steps"]) == (3, 4)
    assert other.token_ids == [8], "another prompt has nothing to do with it"
    assert [(list(one.prompt_ids), one.token_ids) for one in transcript.said] == [
        ([1], [5, 6, 7]),
        ([2], [8]),
    ]


def test_what_was_begun_and_may_not_be_longer_is_finished(ours: ModuleType) -> None:
    (whole,), _, asked = asyncio.run(resumed(ours, [said(ours, list(range(10)), None)], [], [[1]]))
    assert asked == [] and (whole.token_ids, whole.stop_reason) == (list(range(10)), "completed")
