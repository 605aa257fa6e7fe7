# SPDX-License-Identifier: Apache-2.0
"""A request is sent to another replica when its replica dies, if there is one."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from recipe.async_pipeline.agents.episodes import EndPolicies, EpisodeRules
from recipe.async_pipeline.core.groups.items import spans_of
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.errors import VersionNotServed
from recipe.async_pipeline.verl_bridge.agent_loop.episodes.episode import episode_with, kept_turns
from recipe.async_pipeline.verl_bridge.agent_loop.episodes.episode_attempts import Episodes
from recipe.async_pipeline.verl_bridge.rollout.router import Router

pytestmark = pytest.mark.real_engine


class EngineDeadError(RuntimeError):
    """Has the name of vLLM's error."""


def raised_remotely(cause: Exception) -> Exception:
    raised: Exception = RayTaskError("generate", "traceback", cause).as_instanceof_cause()
    return raised


class Balancer:
    """Stands for verl's load balancer: sends every request to the first server."""

    by_default = False
    """Whether it uses verl's default policy, which lets the client choose a server itself."""

    def __init__(self, **servers: Callable[[], Awaitable[Any]]) -> None:
        self.servers = servers
        self.given_up: list[str] = []
        self.requested: list[str] = []
        self.asked: list[dict[str, Any]] = []
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
        return name, self.handle_of(name)

    def handle_of(self, name: str) -> Any:
        respond = self.servers[name]

        def generate(**kwargs: Any) -> Any:
            self.requested.append(name)
            self.asked.append(kwargs)
            return asyncio.ensure_future(respond())

        give_up = SimpleNamespace(remote=lambda request: self.given_up.append(f"{name}: {request}"))
        return SimpleNamespace(generate=SimpleNamespace(remote=generate), give_up=give_up)

    def ___ray_call__(self, names: Any) -> Any:
        return {name: self.handle_of(name) for name in self.servers} if self.by_default else None

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
    async def respond() -> Any:
        raise error

    return respond


WAIT_S = 0.2
SHARE = 2
"""Requests that one worker may have open on one replica."""


def client_of(module: ModuleType, balancer: Balancer, reuse: bool | str = False) -> Any:
    rollout = SimpleNamespace(name="vllm", prompt_length=4, response_length=10)
    knobs = SimpleNamespace(
        faults=SimpleNamespace(wait_timeout_s=WAIT_S), weight_sync=SimpleNamespace(reuse_prefixes=reuse)
    )
    v1 = SimpleNamespace(async_pipeline=knobs)
    config = SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(rollout=rollout), trainer=SimpleNamespace(v1=v1)
    )
    return module.PipelineLLMClient(config=config, load_balancer_handle=balancer)


def generate(module: ModuleType, balancer: Balancer, times: int = 1) -> Any:
    """Send requests one after another, and return the response to the last one."""
    client = client_of(module, balancer)

    async def main() -> Any:
        try:
            for _ in range(times - 1):
                with suppress(RuntimeError):
                    await client.generate("r", prompt_ids=[1], sampling_params={})
            return await client.generate("r", prompt_ids=[1], sampling_params={})
        finally:
            await asyncio.sleep(0)
            assert client.server_of == {}

    return run_virtual(main())


@pytest.fixture(autouse=True, params=[False, True], ids=["verl decides", "client decides"])
def who_decides(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    monkeypatch.setattr(Balancer, "by_default", request.param)
    monkeypatch.setattr(module, "REFRESH_S", 0.01)
    # Choose the first of equally busy servers.
    monkeypatch.setattr(module, "Router", lambda share: Router(share, choose=lambda names: names[0]))
    monkeypatch.setattr(module, "open_requests_of", lambda config: SimpleNamespace(share=SHARE))


DEATHS = [ActorDiedError(), raised_remotely(EngineDeadError("died"))]


@pytest.mark.parametrize("death", DEATHS, ids=["server", "engine"])
def test_another_replica_responds(module: ModuleType, death: Exception) -> None:
    balancer = Balancer(a=failing(death), b=well)
    assert generate(module, balancer).token_ids == [1]
    assert balancer.requested == ["a", "b"]
    assert balancer.released == ([] if Balancer.by_default else ["a", "b"])
    assert list(balancer.servers) == ["b"], "no other request is sent to the dead replica"


@pytest.mark.parametrize("death", DEATHS, ids=["server", "engine"])
def test_the_caller_gets_the_last_death(module: ModuleType, death: Exception) -> None:
    balancer = Balancer(a=failing(ActorDiedError()), b=failing(death))
    with pytest.raises(type(death)):
        generate(module, balancer)
    assert balancer.requested == ["a", "b"]


@pytest.mark.parametrize(
    ("reuse", "sent"), [(False, [None] * 3), (True, [None] * 3), ("session", [None, 4, 4])]
)
async def test_later_turns_say_which_version_began_their_session(
    module: ModuleType, reuse: bool | str, sent: list[int | None]
) -> None:
    versions = iter([4, 5, 6])

    async def turn() -> Any:
        spans = [[next(versions), 0], [9, 1]]
        return SimpleNamespace(extra_fields={"version_spans": spans}, token_ids=[1, 2])

    balancer = Balancer(a=turn)

    client = client_of(module, balancer, reuse)
    with kept_turns():
        for _ in range(3):
            await client.generate("r", prompt_ids=[1], sampling_params={})
    assert [asked.get("session") for asked in balancer.asked] == sent


def test_an_error_of_a_request_is_no_failure_of_its_episode(module: ModuleType) -> None:
    """An agent loop that raises something else instead does not hide it."""
    balancer = Balancer(a=failing(ActorDiedError()))

    async def begin(number: int) -> None:
        try:
            await client_of(module, balancer).generate("r", prompt_ids=[1], sampling_params={})
        except RuntimeError as error:
            raise ValueError("the agent failed") from error

    with pytest.raises(ActorDiedError):
        asyncio.run(Episodes(EpisodeRules.of(2, EndPolicies())).play(begin, "a_0"))
    assert balancer.requested == ["a"]


class VLLMClientError(Exception):
    """Has the name of vLLM's base of errors about a request."""


class EmptyPrompt(VLLMClientError):
    pass


@pytest.mark.parametrize("error", [EmptyPrompt("no tokens"), ValueError("no tokens")])
def test_a_request_that_an_engine_refuses_costs_its_episode_only(
    module: ModuleType, error: Exception
) -> None:
    balancer = Balancer(a=failing(raised_remotely(error)))

    async def begin(number: int) -> None:
        await client_of(module, balancer).generate("r", prompt_ids=[], sampling_params={})

    episodes = Episodes(EpisodeRules.of(2, EndPolicies()))
    (flaw,) = asyncio.run(episodes.play(begin, "a_0"))
    assert balancer.requested == ["a", "a"], "it is repeated, as any failure of an agent loop"
    assert flaw.why.startswith(f"episode a_0, attempt 2: agent_failed: {type(error).__name__}: no tokens")


def test_a_later_request_gets_the_last_death_of_an_empty_pool(module: ModuleType) -> None:
    balancer = Balancer(a=failing(raised_remotely(EngineDeadError("died"))))
    with pytest.raises(EngineDeadError):
        generate(module, balancer, times=2)
    assert balancer.requested == ["a"]


@pytest.mark.parametrize("death", DEATHS, ids=["server", "engine"])
def test_a_request_to_an_empty_pool_waits_for_a_replica(module: ModuleType, death: Exception) -> None:
    balancer = Balancer()

    async def dies() -> Any:
        asyncio.get_running_loop().call_later(WAIT_S / 4, balancer.servers.update, {"b": well})
        raise death

    balancer.servers["a"] = dies
    assert generate(module, balancer).token_ids == [1]
    assert balancer.requested == ["a", "b"]


def test_a_worker_that_saw_no_death_waits_for_a_replica_too(module: ModuleType) -> None:
    """It replaces one that was lost together with the last replica."""
    balancer = Balancer()

    async def main() -> Any:
        asyncio.get_running_loop().call_later(WAIT_S / 4, balancer.servers.update, {"b": well})
        return await client_of(module, balancer).generate("r", prompt_ids=[1], sampling_params={})

    assert run_virtual(main()).token_ids == [1]
    assert balancer.requested == ["b"]


def test_a_request_that_kills_every_replica_is_not_retried_forever(module: ModuleType) -> None:
    balancer = Balancer()

    def next_server() -> Callable[[], Awaitable[Any]]:
        async def dies() -> Any:
            balancer.servers[f"s{len(balancer.requested)}"] = next_server()
            raise ActorDiedError

        return dies

    balancer.servers["s0"] = next_server()
    with pytest.raises(ActorDiedError):
        generate(module, balancer)
    assert len(balancer.requested) == module.DEATHS


def test_a_pool_without_servers_is_reported_as_empty(module: ModuleType) -> None:
    with pytest.raises(RuntimeError) as caught:
        generate(module, Balancer())
    assert "No available servers" in str(module.cause_of(caught.value))


def test_other_errors_propagate(module: ModuleType) -> None:
    balancer = Balancer(a=failing(raised_remotely(ValueError("prompt too long"))), b=well)
    with pytest.raises(ValueError, match="traceback"):
        generate(module, balancer)
    assert balancer.requested == ["a"]


UNREACHABLE = ActorUnavailableError("the connection is gone", b"x" * 16)


def test_only_the_client_that_noticed_avoids_an_unreachable_replica(module: ModuleType) -> None:
    """It may be reachable again before another client notices."""
    balancer = Balancer(a=failing(UNREACHABLE), b=well)
    assert generate(module, balancer).token_ids == [1]
    assert balancer.requested == ["a", "b"]
    assert list(balancer.servers) == (["a", "b"] if Balancer.by_default else ["b"])


def test_the_only_replica_is_retried_until_it_is_reachable(module: ModuleType) -> None:
    balancer = Balancer()
    errors = iter([UNREACHABLE, UNREACHABLE, None])

    async def respond() -> Any:
        error = next(errors)
        if error is not None:
            balancer.servers.setdefault("a", respond)
            asyncio.get_running_loop().call_later(WAIT_S / 4, balancer.servers.update, {"a": respond})
            raise error
        return await well()

    balancer.servers["a"] = respond
    assert generate(module, balancer).token_ids == [1]
    assert balancer.requested == ["a", "a", "a"]


async def test_a_cancelled_request_is_cancelled_on_its_replica(module: ModuleType) -> None:
    begun = asyncio.Event()

    async def never() -> Any:
        begun.set()
        await asyncio.Event().wait()

    balancer = Balancer(a=never)
    client = client_of(module, balancer)

    task = asyncio.create_task(client.generate("r", prompt_ids=[1], sampling_params={}))
    await begun.wait()
    (asked,) = balancer.asked
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert balancer.given_up == [f"a: {asked['request_id']}"]
    assert client.server_of == {}


async def test_a_replica_that_is_added_later_is_used(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REFRESH_S", 0.0)
    balancer = Balancer(a=well)
    client = client_of(module, balancer)

    await client.generate("first", prompt_ids=[1], sampling_params={})
    balancer.servers = {"b": well}
    for number in range(10):
        await client.generate(f"later {number}", prompt_ids=[1], sampling_params={})
    assert balancer.requested[0] == "a"
    assert balancer.requested[-1] == "b"


# Requests that wait for room on a replica, where the client decides.


class Held:
    """Responses that come when `end` is called, in the order of their requests."""

    def __init__(self) -> None:
        self.requests: list[asyncio.Future[None]] = []
        self.dead = False

    async def __call__(self) -> Any:
        if self.dead:
            raise ActorDiedError
        self.requests.append(asyncio.get_running_loop().create_future())
        await self.requests[-1]
        return await well()

    async def until(self, requests: int) -> None:
        while len(self.requests) < requests:  # noqa: ASYNC110
            await asyncio.sleep(0)


def waiting_clients(story: Callable[[Any, Balancer, Held], Awaitable[None]], module: ModuleType) -> None:
    if not Balancer.by_default:
        pytest.skip("verl's balancer bounds nothing")
    held = Held()
    balancer = Balancer(a=held)

    async def main() -> None:
        await story(client_of(module, balancer), balancer, held)

    run_virtual(main())


def begin(client: Any, *names: str) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(client.generate(name, prompt_ids=[1], sampling_params={})) for name in names]


def test_requests_above_the_share_wait_in_the_client(module: ModuleType) -> None:
    async def story(client: Any, balancer: Balancer, held: Held) -> None:
        tasks = begin(client, "r0", "r1", "r2")
        await held.until(SHARE)
        for _ in range(9):
            await asyncio.sleep(0)
        assert len(held.requests) == SHARE
        held.requests[0].set_result(None)
        await held.until(SHARE + 1)
        for request in held.requests[1:]:
            request.set_result(None)
        await asyncio.gather(*tasks)

    waiting_clients(story, module)


def test_a_waiting_request_is_cancelled_without_a_word_to_a_replica(module: ModuleType) -> None:
    async def story(client: Any, balancer: Balancer, held: Held) -> None:
        *tasks, last = begin(client, "r0", "r1", "r2")
        await held.until(SHARE)
        last.cancel()
        await asyncio.wait([last])
        assert last.cancelled() and balancer.given_up == []
        for request in held.requests:
            request.set_result(None)
        await asyncio.gather(*tasks)
        assert len(held.requests) == SHARE and client.server_of == {}

    waiting_clients(story, module)


def test_waiting_requests_go_to_a_replica_that_joins(module: ModuleType) -> None:
    """No request begins or ends meanwhile, so only waiting requests can notice it."""

    async def story(client: Any, balancer: Balancer, held: Held) -> None:
        tasks = begin(client, "r0", "r1", "r2")
        await held.until(SHARE)
        balancer.servers["b"] = well
        assert (await tasks[2]).token_ids == [1]
        assert balancer.requested == ["a", "a", "b"]
        for request in held.requests:
            request.set_result(None)
        await asyncio.gather(*tasks)
        following = [task for task in asyncio.all_tasks() if task.get_name() == "follow replicas"]
        await asyncio.gather(*following)
        assert len(following) == 1, "nothing is refreshed while nothing waits"

    waiting_clients(story, module)


def test_waiting_requests_wait_for_the_return_of_a_replica_that_dies(module: ModuleType) -> None:
    async def story(client: Any, balancer: Balancer, held: Held) -> None:
        tasks = begin(client, "r0", "r1", "r2")
        await held.until(SHARE)
        held.dead = True
        for request in held.requests:
            request.set_exception(ActorDiedError())
        asyncio.get_running_loop().call_later(WAIT_S / 4, balancer.servers.update, {"b": well})
        assert [one.token_ids for one in await asyncio.gather(*tasks)] == [[1]] * 3
        assert balancer.requested[-3:] == ["b"] * 3

    waiting_clients(story, module)


# Responses that an earlier process has begun.


def recorded_request(module: ModuleType, tokens: list[int], stop: str | None) -> Any:
    return importlib.import_module(
        "recipe.async_pipeline.verl_bridge.agent_loop.tokens.partial_rollouts"
    ).RecordedRequest([1], tokens, [-0.5] * len(tokens), spans_of([[3, 0]]), stop, "replica 0")


async def resumed(
    module: ModuleType,
    before: list[Any],
    responses: list[Any],
    prompts: list[list[int]],
    params: dict[str, Any] | None = None,
) -> tuple[list[Any], Any, list[Any]]:
    """Return the outputs for some prompts, the transcript after them, and the requests to servers."""
    params = params or {"temperature": 0.5}
    transcripts = importlib.import_module(
        "recipe.async_pipeline.verl_bridge.agent_loop.tokens.partial_rollouts"
    )
    requests: list[Any] = []

    async def respond() -> Any:
        return responses[len(requests) - 1]

    class Server(Balancer):
        def handle_of(self, name: str) -> Any:
            handle = super().handle_of(name)
            generate = handle.generate.remote

            def recorded(**kwargs: Any) -> Any:
                requests.append((kwargs["prompt_ids"], kwargs["sampling_params"]))
                return generate(**kwargs)

            handle.generate.remote = recorded
            return handle

    transcript = transcripts.Transcript(before)
    client = transcripts.RecordingClient(client_of(module, Server(a=respond)), transcript)
    outputs = [
        await client.generate(f"r{i}", prompt_ids=prompt, sampling_params=params)
        for i, prompt in enumerate(prompts)
    ]
    return outputs, transcript, requests


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


def test_a_finished_response_is_not_requested_again(module: ModuleType) -> None:
    (again,), transcript, requests = asyncio.run(
        resumed(module, [recorded_request(module, [5, 6], "completed")], [], [[1]])
    )
    assert requests == []
    assert (again.token_ids, again.log_probs, again.extra_fields["version_spans"]) == (
        [5, 6],
        [-0.5, -0.5],
        [[3, 0]],
    )
    assert (again.extra_fields["min_global_steps"], again.extra_fields["max_global_steps"]) == (3, 3)
    assert [list(one.token_ids) for one in transcript.said] == [[5, 6]], "the next checkpoint contains it"


def test_a_partial_response_is_continued(module: ModuleType) -> None:
    (whole, other), transcript, requests = asyncio.run(
        resumed(
            module, [recorded_request(module, [5, 6], None)], [output([7], 4), output([8], 4)], [[1], [2]]
        )
    )
    assert requests == [([1, 5, 6], {"temperature": 0.5, "max_tokens": 8}), ([2], {"temperature": 0.5})], (
        "10 tokens are allowed"
    )
    assert (whole.token_ids, whole.log_probs) == ([5, 6, 7], [-0.5, -0.5, -1.0])
    assert whole.extra_fields["version_spans"] == [[3, 0], [4, 2]]
    assert (whole.extra_fields["min_global_steps"], whole.extra_fields["max_global_steps"]) == (3, 4)
    assert other.token_ids == [8], "another prompt does not continue it"
    assert [(list(one.prompt_ids), list(one.token_ids)) for one in transcript.said] == [
        ([1], [5, 6, 7]),
        ([2], [8]),
    ]


FORMED = {"structured_outputs": {"json": "{}"}}


@pytest.mark.parametrize("params", [{"seed": 7}, FORMED], ids=["seed", "form"])
def test_a_partial_response_that_is_not_continued_is_generated_again(
    module: ModuleType, params: dict[str, Any]
) -> None:
    partial, finished = (recorded_request(module, [5, 6], stop) for stop in (None, "completed"))
    (whole,), transcript, requests = asyncio.run(
        resumed(module, [partial], [output([5, 6, 7], 4)], [[1]], params)
    )
    assert requests == [([1], params)]
    assert (whole.token_ids, whole.extra_fields["version_spans"]) == ([5, 6, 7], [[4, 0]])
    assert [list(one.token_ids) for one in transcript.said] == [[5, 6, 7]]
    _, _, requests = asyncio.run(resumed(module, [finished], [], [[1]], params))
    assert requests == [], "what was finished is kept"


@pytest.mark.parametrize("params", [{"seed": None}, {"seed": 7}, FORMED])
def test_only_tokens_that_another_process_can_use_are_recorded(
    module: ModuleType, params: dict[str, Any]
) -> None:
    """The ledger counts the recorded tokens as kept."""
    transcripts = importlib.import_module(
        "recipe.async_pipeline.verl_bridge.agent_loop.tokens.partial_rollouts"
    )
    transcript = transcripts.Transcript()
    places: list[Any] = []

    async def respond() -> Any:
        places.extend(one.where() for one in transcript.open.values())
        return output([5], 4)

    client = transcripts.RecordingClient(client_of(module, Balancer(a=respond)), transcript)
    asyncio.run(client.generate("r", prompt_ids=[1], sampling_params=params))
    assert [place is None for place in places] == [params != {"seed": None}]


def test_a_request_whose_connection_ended_is_sent_again(module: ModuleType) -> None:
    """It is no death of the replica; only Ray knows that."""
    ends = iter([module.ConnectionLost("closed"), module.ConnectionLost("closed"), None])

    async def respond() -> Any:
        error = next(ends)
        if error is not None:
            raise error
        return await well()

    balancer = Balancer(a=respond)
    assert generate(module, balancer).token_ids == [1]
    assert balancer.requested == ["a"] * 3
    assert balancer.servers, "the replica stays in the rotation"


def test_a_partial_response_of_maximum_length_is_finished(module: ModuleType) -> None:
    (whole,), _, requests = asyncio.run(
        resumed(module, [recorded_request(module, list(range(10)), None)], [], [[1]])
    )
    assert requests == [] and (whole.token_ids, whole.stop_reason) == (list(range(10)), "completed")


def test_a_replica_that_refuses_because_it_is_behind_is_avoided_and_is_not_dead(module: ModuleType) -> None:
    asked: list[dict[str, Any]] = []
    error = raised_remotely(
        VersionNotServed("replica 0 serves version 3, and the request requires version 4")
    )
    balancer = Balancer(behind=failing(error), current=well)
    handle = balancer.handle_of

    def with_log(name: str) -> Any:
        made = handle(name)
        remote = made.generate.remote

        def generate(**kwargs: Any) -> Any:
            asked.append(kwargs)
            if name == "behind" and not balancer.by_default:
                # verl's balancer no longer has it when the client asks again.
                balancer.servers.pop("behind")
            return remote(**kwargs)

        made.generate.remote = generate
        return made

    balancer.handle_of = with_log  # type: ignore[method-assign]
    with episode_with(admitted=4):
        assert generate(module, balancer).token_ids == [1]
    assert balancer.requested == ["behind", "current"]
    assert {one["admitted"] for one in asked} == {4}
    assert ("behind" in balancer.servers) == balancer.by_default, "the client does not remove it for others"
