# SPDX-License-Identifier: Apache-2.0
"""An agent that speaks HTTP is trained on the tokens that an agent loop in the worker would be trained on."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import inspect
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import textwrap
import threading
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from omegaconf import OmegaConf

from recipe.async_pipeline.agents.episodes import COUNTS, PEAKS, EndPolicies, EpisodeRules
from recipe.async_pipeline.agents.processes.sandbox import reason_without
from recipe.async_pipeline.agents.runners import Policy
from recipe.async_pipeline.config.knobs.agentic import AgenticConfig, GatewayConfig
from recipe.async_pipeline.errors import AgentFailed, ConfigError, EnvironmentFailed
from recipe.async_pipeline.gateway.client import Client, claimed
from recipe.async_pipeline.lab.bench.two_hosts import TwoHosts
from recipe.async_pipeline.lab.tasks.tokenizer import make_tokenizer
from recipe.async_pipeline.verl_bridge.agent_loop.episodes.episode import (
    END,
    NOTED,
    TOOK_MS,
    WHY,
    current_attempt,
    kept_turns,
    take_turn,
)
from recipe.async_pipeline.verl_bridge.agent_loop.episodes.episode_attempts import Episodes
from recipe.async_pipeline.verl_bridge.agent_loop.tokens.version_spans import ROW_SPANS, ROW_TURNS, merged
from tests import HANG_S
from tests.fakes.environments import COUNTING, Counting
from tests.fakes.private_mounts import may_unshare

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
pytestmark = pytest.mark.real_engine
TURNS = 5
TOKENIZER = make_tokenizer()
EOS = int(TOKENIZER.eos_token_id)
STOP: list[int] = TOKENIZER.encode("stop", add_special_tokens=False)


class Engine:
    """Writes bytes that follow from the prompt, mostly no text, and "stop" in the last turn."""

    def __init__(self, turns: int = TURNS) -> None:
        self.turns, self.calls = turns, 0
        self.error: Exception | None = None
        self.waits = False
        self.params: list[Mapping[str, Any]] = []

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: Mapping[str, Any], image_data: None
    ) -> Any:
        self.calls += 1
        self.params.append(sampling_params)
        await asyncio.sleep(3600 if self.waits else 0)
        if self.error is not None:
            raise self.error
        last = prompt_ids.count(EOS) >= self.turns - 1
        seed = hashlib.blake2b(json.dumps(prompt_ids).encode(), digest_size=7).digest()
        tokens = [*(STOP if last else seed), EOS][: sampling_params["max_tokens"]]
        spans = [(self.calls, 0), (self.calls + 1, 2)]
        take_turn(len(prompt_ids), spans, "r", len(tokens), 0.0)
        return SimpleNamespace(
            token_ids=tokens,
            log_probs=[-seed[0] - i / 64 for i in range(len(tokens))],
            extra_fields={"version_spans": spans},
            num_preempted=0,
        )


async def plays(task: dict[str, Any], answer: Callable[[list[Any]], Awaitable[str]]) -> float:
    """Play the environment of the white box."""
    game: Any = Counting()
    reward: float = 0.0
    messages: list[Any] = [{"role": "user", "content": game.reset(task["seed"], **task["task"])}]
    while True:
        text = await answer(messages)
        step = game.step(text)
        reward += step.reward
        if step.over:
            return float(reward)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": step.observation}]


async def plays_openai(task: dict[str, Any], policy: Policy) -> float:
    async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:

        async def answer(messages: list[Any]) -> str:
            said = await client.chat.completions.create(model="policy", messages=messages)
            return str(said.choices[0].message.content)

        return await plays(task, answer)


async def plays_anthropic(task: dict[str, Any], policy: Policy) -> float:
    url = policy.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=url, api_key=policy.api_key) as client:

        async def answer(messages: list[Any]) -> str:
            said = await client.messages.create(model="policy", messages=messages, max_tokens=100)
            return str(said.content[0].text)

        return await plays(task, answer)


async def says(policy: Policy, *texts: str) -> str:
    """Send a conversation of these messages, and return the answer."""
    roles = ("user", "assistant")
    messages: list[Any] = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
        answer = await client.chat.completions.create(model="policy", messages=messages)
    return str(answer.choices[0].message.content)


async def compacts(task: dict[str, Any], policy: Policy) -> float:
    """Forget everything after a turn."""
    await says(policy, "first")
    await says(policy, "summary")
    return 0.25


async def reminds(task: dict[str, Any], policy: Policy) -> None:
    """Have a reminder in the newest message only, as many agents do."""
    texts: list[str] = []
    for left in range(12, 0, -1):
        answer = await says(policy, *texts, f"next, {left} left")
        texts += ["next", answer]


async def endless(task: dict[str, Any], policy: Policy) -> None:
    """Ask until it is refused."""
    texts = ["first"]
    while True:
        texts += [await says(policy, *texts), "more"]


async def careful(task: dict[str, Any], policy: Policy) -> float:
    """Stop when it is refused."""
    try:
        await endless(task, policy)
    except openai.BadRequestError:
        return 0.5
    raise AssertionError("unreachable")


async def raises(task: dict[str, Any], policy: Policy) -> None:
    await says(policy, "first")
    raise ValueError("a bug")


async def quiet(task: dict[str, Any], policy: Policy) -> float:
    return 1.0


async def silent(task: dict[str, Any], policy: Policy) -> None:
    await says(policy, "first")


AGENTS = "agents_of_loop"
TableOf = Callable[..., "Table"]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, AGENTS, sys.modules[__name__])


class Table:
    """Plays episodes with the toy's tokenizer and verl's own builders."""

    def __init__(self, module: ModuleType, monkeypatch: pytest.MonkeyPatch, **knobs: Any) -> None:
        self.module = module
        rollout = {"prompt_length": 64, "response_length": knobs.pop("response_length", 300)}
        self.config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
        if knobs.get("agent") in globals():
            knobs["agent"] = f"{AGENTS}:{knobs['agent']}"
        agentic = AgenticConfig(**knobs)
        monkeypatch.setattr(module, "knobs_of", lambda config: SimpleNamespace(agentic=agentic))

    def loop_of(self, kind: Any, engine: Engine) -> Any:
        return kind(
            trainer_config=SimpleNamespace(config=self.config),
            server_manager=engine,
            tokenizer=TOKENIZER,
            processor=None,
            dataset_cls=None,
            data_config=SimpleNamespace(config=OmegaConf.create({})),
            hf_model_type="qwen2",
        )

    def play(self, engine: Engine, **row: Any) -> list[Any]:
        async def episode() -> list[Any]:
            setup = self.module.setup_of(self.config)
            loop = self.loop_of(self.module.AgentSessionLoop, engine)
            try:
                outputs: list[Any] = await loop.run({"temperature": 1.0}, **(ROW | row))
                return outputs
            finally:
                assert len(setup.sessions) == 0, "its keys are gone"
                await self.module.stop()

        return asyncio.run(asyncio.wait_for(episode(), HANG_S))


@pytest.fixture
def table_of(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> TableOf:
    """Return a function that makes a table; an agent is a function of this file, or a command."""
    return partial(Table, module, monkeypatch)


ROW = {"raw_prompt": [{"role": "user", "content": ""}], "extra_info": {"seed": 5}, "index": 0}


def white_box(table: Table) -> tuple[Any, Any]:
    """Return the episode as the agent loop `environment` plays it, and the versions of its tokens."""
    from recipe.async_pipeline.verl_bridge.agent_loop.episodes import environment_loop

    async def episode() -> tuple[Any, Any]:
        loop = table.loop_of(environment_loop.EnvironmentLoop, Engine())
        with kept_turns() as turns:
            output = await loop.run({"temperature": 1.0}, **ROW)
        await environment_loop.stop()
        return output, merged(turns, len(output.prompt_ids))

    knobs = AgenticConfig(environment=COUNTING.name, isolation="inline", env_timeout_s=5)
    given = SimpleNamespace(agentic=knobs)
    with mock.patch.object(environment_loop, "knobs_of", lambda config: given):
        return asyncio.run(episode())


@pytest.mark.parametrize("agent", ["plays_openai", "plays_anthropic"])
def test_black_box_is_white_box(table_of: TableOf, agent: str) -> None:
    """Token for token, log-prob for log-prob, span for span."""
    table = table_of(agent=agent)
    white, spans = white_box(table)
    (black,) = table.play(Engine())
    assert black.prompt_ids == white.prompt_ids
    assert black.response_ids == white.response_ids
    assert black.response_mask == white.response_mask
    assert black.response_logprobs == white.response_logprobs
    assert black.extra_fields[ROW_SPANS] == spans and len(spans) == 2 * TURNS
    assert black.extra_fields[ROW_TURNS] == TURNS
    assert (black.reward_score, black.num_turns) == (white.reward_score, white.num_turns)
    assert black.extra_fields[END] == white.extra_fields[END] == "done"


def test_an_agent_that_forgets_has_two_rows_and_the_main_one_is_scored(table_of: TableOf) -> None:
    first, last = table_of(agent="compacts").play(Engine())
    assert (first.reward_score, last.reward_score) == (None, 0.25)
    assert [TOKENIZER.decode(one.prompt_ids) for one in (first, last)] == ["summary", "first"]
    assert first.extra_fields[ROW_SPANS] == [(2, 0), (3, 2)]
    assert last.extra_fields[ROW_SPANS] == [(1, 0), (2, 2)]
    assert END not in first.extra_fields and last.extra_fields[END] == "done"


@pytest.mark.parametrize(("knobs", "end"), [({"max_turns": 3}, "turns"), ({"response_length": 36}, "tokens")])
@pytest.mark.parametrize(("agent", "reward"), [("endless", None), ("careful", 0.5)])
def test_an_agent_at_a_limit(
    table_of: TableOf, knobs: dict[str, Any], end: str, agent: str, reward: float | None
) -> None:
    """Whether it fails at the limit or stops, the policy is to blame, and its tokens are kept."""
    table = table_of(agent=agent, **knobs)
    (output,) = table.play(Engine(turns=100))
    assert (output.extra_fields[END], output.reward_score, output.num_turns) == (end, reward, 6)
    assert bool(output.extra_fields[WHY]) == (agent == "endless")


def test_an_agent_that_begins_a_conversation_each_turn_is_trained(table_of: TableOf) -> None:
    outputs = table_of(agent="reminds").play(Engine(turns=100))
    assert len(outputs) == 12 and outputs[-1].extra_fields[END] == "done"
    assert outputs[-1].extra_fields[NOTED]["rows_of_reminder"] >= 10


def test_too_many_conversations_are_no_failure_of_the_agent(table_of: TableOf) -> None:
    gateway = GatewayConfig(max_chains=3)
    outputs = table_of(agent="reminds", gateway=gateway).play(Engine(turns=100))
    assert len(outputs) == 3 and outputs[-1].extra_fields[END] == "chains"
    assert "begins another conversation" in outputs[-1].extra_fields[WHY]


JUDGE = "echo '{\"reward\": -1}'"
"""A `verify` that is content with nothing."""


@pytest.mark.parametrize("agent", ["endless", "careful"])
def test_verify_judges_an_agent_at_a_limit(table_of: TableOf, agent: str) -> None:
    table = table_of(agent=agent, max_turns=3, verify=JUDGE)
    (output,) = table.play(Engine(turns=100))
    assert (output.extra_fields[END], output.reward_score) == ("turns", -1.0)


def test_a_verify_that_fails_at_a_limit_is_no_reward(table_of: TableOf) -> None:
    table = table_of(agent="endless", max_turns=3, verify="false")
    with pytest.raises(EnvironmentFailed, match="verify: exit status 1"):
        table.play(Engine(turns=100))


async def gives_up(task: dict[str, Any], policy: Policy) -> None:
    """Await a task that it has cancelled itself."""
    await says(policy, "first")
    waiting = asyncio.create_task(asyncio.sleep(3600))
    waiting.cancel()
    await waiting


def gives_up_in_a_thread(task: dict[str, Any], policy: Policy) -> None:
    asyncio.run(gives_up(task, policy))


@pytest.mark.parametrize("agent", ["gives_up", "gives_up_in_a_thread"])
def test_a_cancellation_of_the_agents_own_is_its_failure(table_of: TableOf, agent: str) -> None:
    with pytest.raises(AgentFailed, match="raised CancelledError"):
        table_of(agent=agent).play(Engine())


NO_FUNCTION = {
    "custom_reward_function": {"path": None},
    "reward_model": {"enable": False},
    "reward_manager": {"module": {"path": None}},
}


def test_an_agent_without_a_reward_fails_if_nothing_else_scores(table_of: TableOf) -> None:
    table = table_of(agent="silent")
    (output,) = table.play(Engine())
    assert output.reward_score is None, "a reward function scores it"
    table.config.reward = NO_FUNCTION
    with pytest.raises(AgentFailed, match=r"gave no reward.*set agentic.verify or reward.custom_reward"):
        table.play(Engine(), data_source="of_no_benchmark")
    (output,) = table.play(Engine(), data_source="openai/gsm8k")
    assert output.reward_score is None, "verl has a function for it"


def test_an_agent_that_fails_at_a_limit_is_scored_if_nothing_else_scores(table_of: TableOf) -> None:
    table = table_of(agent="endless", max_turns=3, failure_reward=-0.5)
    table.config.reward = NO_FUNCTION
    (output,) = table.play(Engine(turns=100), data_source="of_no_benchmark")
    assert (output.extra_fields[END], output.reward_score) == ("turns", -0.5)


def test_a_request_that_the_engine_refuses_is_the_agents(table_of: TableOf) -> None:
    engine = Engine()
    engine.error = ValueError("prompt of an odd length\nand more")
    with pytest.raises(AgentFailed, match="400.*the engine refuses the request: prompt of an odd length$"):
        table_of(agent="silent").play(engine)


def test_a_last_turn_that_is_cut_off(table_of: TableOf) -> None:
    (output,) = table_of(agent="silent", response_length=3).play(Engine())
    assert (output.extra_fields[END], len(output.response_ids)) == ("cut_off", 3)


def test_a_program_outside_of_the_run_claims_the_episode(table_of: TableOf, tmp_path: Path) -> None:
    gateway = GatewayConfig(runners_dir=str(tmp_path))
    table = table_of(agent="external", gateway=gateway)

    def plays() -> None:
        played = False
        while not played:
            with claimed(tmp_path, 0.05) as task:
                if task is not None:
                    asyncio.run(says(Policy(task.base_url, task.api_key), "first"))
                    task.reward, played = 0.5, True

    runner = threading.Thread(target=plays, daemon=True)
    runner.start()
    (output,) = table.play(Engine())
    runner.join()
    assert (output.extra_fields[END], output.reward_score, output.num_turns) == ("done", 0.5, 2)
    assert list(tmp_path.iterdir()) == [], "its address is gone"


RUNNER = """
import sys
from client import Client, GatewayError, claimed

played = False
while not played:
    with claimed(sys.argv[1], 0.05) as task:
        if task is None:
            continue
        try:
            Client(task.base_url, "sk-of-another").generate([5, 6, 7])
        except GatewayError as error:
            refused = error.status
        Client(task.base_url, task.api_key).generate([5, 6, 7])
        task.reward, played = refused, True
"""


@pytest.mark.skipif(not may_unshare(), reason="namespaces require root")
def test_a_runner_on_another_host_plays_the_episode(
    table_of: TableOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a copy of the client. The hosts share a folder and a link, and no loopback."""
    monkeypatch.setattr(TwoHosts, "_start_ray", lambda *_: None)
    hosts, outputs = TwoHosts(1, 1), list[Any]()
    table = table_of(agent="external", gateway=GatewayConfig(runners_dir=str(tmp_path), host="0.0.0.0"))

    def play_on_the_first() -> None:
        with open(f"/proc/{hosts.first.pid}/ns/net") as network:
            assert ctypes.CDLL(None).setns(network.fileno(), 0) == 0
        outputs.extend(table.play(Engine()))

    try:
        hosts.first.run("ip", "route", "add", "default", "via", hosts.second.address)
        playing = threading.Thread(target=play_on_the_first, daemon=True)
        playing.start()
        shutil.copy(str(inspect.getsourcefile(Client)), tmp_path)
        (tmp_path / "runner.py").write_text(RUNNER)
        hosts.second.run(sys.executable, str(tmp_path / "runner.py"), str(tmp_path))
        playing.join(HANG_S)
    finally:
        hosts.close()
    (output,) = outputs
    assert (output.extra_fields[END], output.reward_score) == ("done", 401.0)
    assert f"agents on other hosts reach the gateway at http://{hosts.first.address}:" in caplog.text


async def test_a_gateway_whose_address_cannot_be_written_is_started_by_the_next_episode(
    table_of: TableOf, module: ModuleType, tmp_path: Path
) -> None:
    folder = tmp_path / "runners"
    folder.write_text("a file")
    table = table_of(agent="external", gateway=GatewayConfig(runners_dir=str(folder)))

    setup = module.setup_of(table.config)
    for _ in range(2):
        with pytest.raises(OSError, match=r"^cannot write .*; correct gateway.runners_dir$"):
            await setup.server()
    folder.unlink()
    server = await setup.server()
    (file,) = folder.iterdir()
    assert json.loads(file.read_text())["url"] == server.url
    assert await setup.server() is server
    await module.stop()
    assert list(folder.iterdir()) == []


def test_what_is_the_agents_fault(table_of: TableOf) -> None:
    for agent, why in (("raises", "ValueError: a bug"), ("quiet", "ended without an answer of the policy")):
        with pytest.raises(AgentFailed, match=why):
            table_of(agent=agent).play(Engine())


def test_an_error_of_the_rollout_is_raised_as_it_is(table_of: TableOf) -> None:
    """The run ends with it, not with what the agent says about it."""
    engine = Engine()
    engine.error = OSError("five replicas died")
    with pytest.raises(OSError, match="five replicas died"):
        table_of(agent="plays_openai").play(engine)
    assert engine.calls == 1, "the client does not repeat it"


def test_the_reward_of_verify(table_of: TableOf) -> None:
    code = (
        "import json, os; t = json.load(open(os.environ['ASYNC_PIPELINE_TASK'])); "
        "print(json.dumps({'reward': t['reward_model']['ground_truth']}))"
    )
    verify = f'{sys.executable} -I -c "{code}"'
    table = table_of(agent="compacts", verify=verify)
    assert table.play(Engine(), reward_model={"ground_truth": 7})[-1].reward_score == 7.0
    with pytest.raises(EnvironmentFailed, match="verify: exit status 1: .*KeyError"):
        table.play(Engine())


def test_commands_are_in_a_sandbox_where_there_is_one(
    table_of: TableOf,
    module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = tmp_path / "train.parquet"
    data.write_text("truth")
    judge = f"print('{{\"reward\": %d}}' % ('truth' in open({str(data)!r}).read()))"

    def reward(**knobs: Any) -> float:
        verify = shlex.join([sys.executable, "-I", "-c", judge])
        table = table_of(agent="silent", verify=verify, **knobs)
        table.config.data = {"train_files": [str(data)]}
        scored: float = table.play(Engine())[-1].reward_score
        return scored

    assert reward(sandbox="off") == 1.0
    if not reason_without():
        with pytest.raises(EnvironmentFailed, match="No such file"):
            reward()

    monkeypatch.setattr(module, "reason_without", lambda *_: "not permitted")
    assert reward() == 1.0 and "without a sandbox (not permitted)" in caplog.text
    for value in ("on", "offline"):
        with pytest.raises(ConfigError, match=rf"sandbox={value} requires .*, got none \(not permitted\)"):
            reward(sandbox=value)


async def rewards_itself(task: dict[str, Any], policy: Policy) -> float:
    """Set the reward over HTTP, and return another one."""
    await says(policy, "first")
    if policy.control_key is not None:
        control = Client(policy.base_url, policy.control_key)
        await asyncio.get_running_loop().run_in_executor(None, control.reward, 0.75)
    return 0.25


def test_an_agent_sets_its_reward_only_if_it_may(table_of: TableOf) -> None:
    for may, reward in ((False, 0.25), (True, 0.75)):
        knobs = {"agent": "rewards_itself", "gateway": GatewayConfig(agent_may_reward=may)}
        (output,) = table_of(**knobs).play(Engine())
        assert output.reward_score == reward
    (output,) = table_of(**knobs, verify="echo '{\"reward\": -1}'").play(Engine())
    assert output.reward_score == -1.0, "the program that judges has the last word"


async def rewards_turns(task: dict[str, Any], policy: Policy) -> float:
    """Play three turns, reward two of them, and return a reward of the end."""
    assert policy.control_key is not None
    control, texts = Client(policy.base_url, policy.control_key), ["go"]
    for turn in (1, 2, 3):
        texts += [await says(policy, *texts), "on"]
        if turn != 2:
            await asyncio.get_running_loop().run_in_executor(None, control.reward, turn / 4, turn)
    return 2.0


def test_rewards_of_turns_are_at_their_last_tokens(table_of: TableOf) -> None:
    gateway = GatewayConfig(agent_may_reward=True, max_chains=1)
    knobs = {"agent": "rewards_turns", "gateway": gateway, "turn_rewards": True}
    (output,) = table_of(**knobs).play(Engine(3))
    ends = [i for i, one in enumerate(output.response_ids) if one == EOS and output.response_mask[i]]
    scores = output.as_dict()["rm_scores"].tolist()
    assert {i: one for i, one in enumerate(scores) if one} == {ends[0]: 0.25, ends[2]: 2.75}
    assert output.reward_score == sum(scores) == 3.0
    assert output.extra_fields["turn_scores"] == [0.25, 0.75, 2.0]
    (judged,) = table_of(**knobs, verify="echo '{\"reward\": -1}'").play(Engine(3))
    assert judged.as_dict()["rm_scores"].sum() == judged.reward_score == -1.0


async def through_a_socket(task: dict[str, Any], policy: Policy) -> float:
    """Reach the policy without a network."""
    transport = httpx.AsyncHTTPTransport(uds=policy.unix_socket)
    async with (
        httpx.AsyncClient(transport=transport) as http,
        openai.AsyncOpenAI(base_url="http://policy/v1", api_key=policy.api_key, http_client=http) as client,
    ):
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "first"}])
    return 0.5


def test_an_agent_without_a_network(table_of: TableOf) -> None:
    with tempfile.TemporaryDirectory() as folder:
        gateway = GatewayConfig(unix_dir=folder)
        table = table_of(agent="through_a_socket", gateway=gateway)
        (output,) = table.play(Engine())
        assert (output.extra_fields[END], output.reward_score) == ("done", 0.5)
        assert [*Path(folder).iterdir()] == []


def test_the_runs_sampling_parameters_win(table_of: TableOf) -> None:
    engine = Engine()
    table_of(agent="silent").play(engine)
    assert engine.params == [{"temperature": 1.0, "max_tokens": 300}]


async def insists(task: dict[str, Any], policy: Policy) -> None:
    """Name a temperature, and have the client send a request that was answered again."""
    messages: list[Any] = [{"role": "user", "content": "first"}]
    async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
        for attempt in ("0", "1"):
            await client.chat.completions.create(
                model="policy",
                messages=messages,
                temperature=0.1,
                extra_headers={"x-stainless-retry-count": attempt},
            )


def test_what_happened_in_a_session_is_counted(table_of: TableOf) -> None:
    (output,) = table_of(agent="insists").play(Engine())
    counts = output.extra_fields[NOTED]
    happened = {"retries_coalesced": 1, "params_overridden": 1, "retokenized": 0}
    happened |= {"undelivered": 0, "auxiliary": 0, "constrained": 0}
    assert counts == {**happened, "open_sessions": 1}
    assert happened.keys() <= COUNTS.keys() and "open_sessions" in PEAKS
    (took_ms,) = output.extra_fields[TOOK_MS]
    assert took_ms > 0, "of the one request that an engine answered"


async def stays(task: dict[str, Any], policy: Policy) -> None:
    """Continue after the end of the session."""
    assert policy.control_key is not None
    await says(policy, "first")
    control = Client(policy.base_url, policy.control_key)
    await asyncio.get_running_loop().run_in_executor(None, control.end)
    await asyncio.sleep(3600)


def test_an_agent_that_continues_after_its_session_is_stopped_and_counted(
    table_of: TableOf, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.1)
    knobs = {"agent": "stays", "gateway": GatewayConfig(agent_may_reward=True)}
    (output,) = table_of(**knobs).play(Engine())
    assert output.extra_fields[NOTED]["closed_late"] == 1
    (judged,) = table_of(**knobs, verify=JUDGE).play(Engine())
    assert judged.reward_score == -1.0, "the control key does not replace it"


def test_what_a_program_leaves_behind_is_ended(table_of: TableOf, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    leaves = f"""
    import subprocess
    left = subprocess.Popen(["sleep", "600"], start_new_session=True, stdin=-3, stdout=-3, stderr=-3)
    open({str(pid)!r}, "w").write(str(left.pid))
"""
    (tmp_path / "agent.py").write_text(textwrap.dedent(ASKS + leaves))
    agent = f"{sys.executable} {tmp_path / 'agent.py'}"
    # In a sandbox, its number would be another one.
    (output,) = table_of(agent=agent, sandbox="off").play(Engine())
    assert "left_behind" not in output.extra_fields[NOTED]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.parametrize(
    ("message", "reason"), [(None, "recalled"), ("redundant", "redundant"), ("deadline", "deadline")]
)
async def test_a_cancelled_episode_ends_its_session(
    table_of: TableOf, module: ModuleType, monkeypatch: pytest.MonkeyPatch, message: str | None, reason: str
) -> None:
    table = table_of(agent="plays_openai")

    begun: list[Any] = []
    session_of = module.Session

    def begin(*args: Any) -> Any:
        begun.append(session_of(*args))
        return begun[-1]

    monkeypatch.setattr(module, "Session", begin)

    setup, engine = module.setup_of(table.config), Engine()
    engine.waits = True
    running = asyncio.create_task(table.loop_of(module.AgentSessionLoop, engine).run({}, **ROW))
    while not engine.calls:  # noqa: ASYNC110 - the engine has no event for it
        await asyncio.sleep(0.01)
    (session,) = begun
    running.cancel(message)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert session.ended == reason and session.rows() == [] and len(setup.sessions) == 0
    await setup.stop()


def test_the_agent_does_not_see_what_judges_it(module: ModuleType) -> None:
    row = {**ROW, "extra_info": {"answer": 4, "task": {"a": 1}}, "reward_model": {"ground_truth": 4}}
    shown, hidden = module.task_of(row, 0)
    assert shown["task"] == {"a": 1} and "4" not in json.dumps(shown["messages"])
    assert set(shown) == {"messages", "seed", "task"}
    assert hidden["reward_model"] == {"ground_truth": 4} and hidden["extra_info"]["answer"] == 4


def test_the_loop_requires_an_agent(table_of: TableOf) -> None:
    table = table_of()
    with pytest.raises(ConfigError, match=r"requires .*agentic.agent; set it"):
        table.play(Engine())


ASKS = """
    import json, os, signal, sys, time, urllib.request
    body = json.dumps({"messages": [{"role": "user", "content": "first"}]}).encode()
    head = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    urllib.request.urlopen(
        urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)
    ).read()
"""
"""A program that has got one answer."""


def fates(
    table_of: TableOf,
    file: Path,
    program: str,
    timeout_s: float | None,
    failed: list[Any] | None = None,
) -> tuple[list[tuple[str, str]], list[str], Any]:
    """Play the episode of a program as an agent loop worker does. Returns the end and the action of each
    attempt, the flaws of the group, and the reward. `failed` gets the failed attempts with output.
    """
    file.write_text(textwrap.dedent(program))
    # Without a sandbox, programs may mark their first attempt.
    table = table_of(agent=f"{sys.executable} {file}", sandbox="off")
    attempts: list[Any] = []
    rewards: list[Any] = []
    failed = [] if failed is None else failed

    async def episode() -> list[Any]:
        async def begin(number: int) -> None:
            attempt = current_attempt()
            assert attempt is not None
            attempts.append(attempt)
            loop = table.loop_of(table.module.AgentSessionLoop, Engine())
            outputs = await loop.run({"temperature": 1.0}, **ROW)
            attempt.returned(outputs)
            rewards.append(outputs[-1].reward_score)

        try:
            rules = EpisodeRules.of(2, EndPolicies())
            return await Episodes(rules, timeout_s).play(begin, "e", failed.append)
        finally:
            await table.module.stop()

    flaws = asyncio.run(episode())
    return [(one.end, one.action) for one in attempts], [one.why for one in flaws], rewards


@pytest.mark.parametrize(
    ("then", "why"),
    [
        (None, "the agent ended without an answer of the policy"),
        ("sys.exit(3)", "exit status 3"),
        ("raise ValueError('a bug')", "exit status 1: .*ValueError: a bug"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
        ("print(json.dumps({'reward': 'much'}))", "the reward must be a finite number, got 'much'"),
        ("print(json.dumps({'reward': float('nan')}))", "the reward must be a finite number, got nan"),
    ],
)
def test_a_program_that_fails_is_run_again_and_then_costs_its_group(
    table_of: TableOf, tmp_path: Path, then: str | None, why: str
) -> None:
    ends, flaws, rewards = fates(
        table_of, tmp_path / "agent.py", "" if then is None else f"{ASKS}    {then}", None
    )
    assert ends == [("agent_failed", "again"), ("agent_failed", "drop")]
    (flaw,) = flaws
    assert re.search(f"attempt 2: agent_failed: .*{why}", flaw) and rewards == []


def test_a_program_that_hangs_is_killed_at_the_deadline(table_of: TableOf, tmp_path: Path) -> None:
    ends, flaws, _ = fates(table_of, tmp_path / "agent.py", "while True: pass", 0.5)
    assert ends == [("deadline", "again"), ("deadline", "drop")]
    assert "an episode to end (agentic.episode_timeout_s)" in flaws[0]
    program = str(tmp_path / "agent.py").encode()
    alive = [one for one in Path("/proc").glob("[0-9]*/cmdline") if program in read(one)]
    assert alive == []


def test_a_program_that_fails_once_is_trained_from_its_second_attempt(
    table_of: TableOf, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    fails_once = f"""
    if not os.path.exists({str(mark)!r}):
        open({str(mark)!r}, "x").close()
        print("bye", file=sys.stderr)
        sys.exit(3)
    print("some text")
    print(json.dumps({{"reward": 0.5}}))
"""
    failed: list[Any] = []
    ends, flaws, rewards = fates(table_of, tmp_path / "agent.py", ASKS + fails_once, None, failed)
    assert (ends, flaws, rewards) == ([("agent_failed", "again"), ("done", "train")], [], [0.5])
    (one,) = failed
    assert one == ("e", 1, "agent_failed", "AgentFailed: exit status 3: bye", "bye\n"), (
        "of the first one only"
    )


@pytest.mark.parametrize("printed", ["no object", "[0.5]", '{"score": 1}'])
def test_a_program_that_prints_no_reward_is_scored_by_the_reward_function(
    table_of: TableOf, tmp_path: Path, printed: str
) -> None:
    program = f"{ASKS}    print({printed!r})"
    ends, flaws, rewards = fates(table_of, tmp_path / "agent.py", program, None)
    assert (ends, flaws, rewards) == ([("done", "train")], [], [None])


def read(file: Path) -> bytes:
    """Return the content of a file, or nothing if it is gone."""
    try:
        return file.read_bytes()
    except OSError:
        return b""
