# SPDX-License-Identifier: Apache-2.0
"""The worker answers a prompt with the responses of its agent loop, which these tests write."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from recipe.async_pipeline.agents.episodes import metrics_of
from recipe.async_pipeline.checkpoint import store as checkpoints
from recipe.async_pipeline.checkpoint import tensor_tree
from recipe.async_pipeline.core.groups.items import spans_of
from recipe.async_pipeline.lab.tasks.tokenizer import VOCAB_SIZE, make_tokenizer
from recipe.async_pipeline.verl_bridge.agent_loop.episodes.episode import END, NOTED, TOOK_MS, take_turn
from tests import HANG_S
from tests.conftest import Load
from tests.fakes import image_client
from tests.fakes.environments import Counting
from tests.verl_bridge.conftest import Smoke

pytestmark = pytest.mark.real_engine

PROMPT = {"uid": "a", "index": 3, "global_steps": 2, "raw_prompt": [{"role": "user", "content": "1+2="}]}
AGENTIC = "trainer.v1.async_pipeline.agentic"
ROLLOUT = "actor_rollout_ref.rollout"

Play = Callable[[Any, dict[str, Any], dict[str, Any]], Awaitable[Any]]
"""Plays an episode with a client, sampling parameters and a row; returns what an agent loop returns."""


class ScriptedLoop:
    """An agent loop that does what its client says."""

    def __init__(self, server_manager: Any, **others: Any) -> None:
        self._client = server_manager

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        return await self._client.play(self._client, sampling_params, row)


class Client:
    """Stands for the client of the rollout servers: repeats what a transcript has, and records it."""

    def __init__(self, play: Play) -> None:
        self.play = play
        self.requests: list[dict[str, Any]] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], **options: Any) -> Any:
        self.requests.append(options)
        transcript = options.get("transcript")
        return None if transcript is None else transcript.recall(prompt_ids)


class Store:
    """Stands for TransferQueue; lets puts wait for `may_put`."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.puts: list[dict[str, Any]] = []
        self.begun = 0
        self.asked, self.may_put = asyncio.Event(), asyncio.Event()
        self.may_put.set()

    async def async_kv_batch_put(self, **put: Any) -> None:
        self.begun += 1
        self.asked.set()
        await self.may_put.wait()
        self.keys += put["keys"]
        self.puts.append(put)

    async def async_kv_put(self, **put: Any) -> None:
        """Take the state of a prompt in validation."""

    async def async_kv_list(self, **of: Any) -> dict[str, Any]:
        return {}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, load: Load) -> Path:
    """The toy's model without its weights."""
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer().save_pretrained(folder)
    load("transformers").Qwen2Config(
        vocab_size=VOCAB_SIZE, architectures=["Qwen2ForCausalLM"]
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, load: Load) -> Store:
    store, queue = Store(), load("transfer_queue")
    monkeypatch.setattr(queue, "init", lambda *args: None)
    for name in ("async_kv_batch_put", "async_kv_put", "async_kv_list"):
        monkeypatch.setattr(queue, name, getattr(store, name))
    return store


WorkerOf = Callable[..., Any]


@pytest.fixture
def worker_of(module: ModuleType, smoke: Smoke, model: Path, store: Store, tmp_path: Path) -> WorkerOf:
    """Return a function that makes the worker of a run whose agent loop is scripted."""
    loops = tmp_path / "loops.yaml"
    loops.write_text(f"[{{name: scripted, _target_: {__name__}.ScriptedLoop}}]")

    def make(play: Play, **changes: Any) -> Any:
        config = smoke(
            {
                "actor_rollout_ref.model.path": str(model),
                f"{ROLLOUT}.agent.agent_loop_config_path": str(loops),
                f"{ROLLOUT}.agent.default_agent_loop": "scripted",
                f"{ROLLOUT}.n": 2,
                **changes,
            }
        )
        return module.PushAgentLoopWorker(config, Client(play))

    return make


@pytest.fixture
def response(load: Load) -> Callable[..., Any]:
    """Return a function that makes a response of three tokens of versions 1 and 2."""
    output = load("verl.experimental.agent_loop").AgentLoopOutput

    def make(**extra: Any) -> Any:
        stamps = {"min_global_steps": 1, "max_global_steps": 2, "reward_extra_info": {"acc": 1}}
        return output(
            prompt_ids=[1],
            response_ids=[2, 3, 4],
            response_mask=[1, 1, 1],
            response_logprobs=[-0.5] * 3,
            reward_score=1.0,
            num_turns=2,
            metrics={},
            extra_fields={**stamps, **extra},
        )

    return make


async def never(*args: Any) -> None:
    await asyncio.get_running_loop().create_future()


def test_the_process_of_a_worker_knows_the_agent_loop_of_environments(module: ModuleType, load: Load) -> None:
    registry = load("verl.experimental.agent_loop.agent_loop")._agent_loop_registry
    assert registry[module.environment_loop.NAME]["_target_"].endswith("EnvironmentLoop")


@pytest.mark.parametrize("begun", [False, True])
async def test_a_group_that_is_given_up_ends_with_nothing(
    module: ModuleType, worker_of: WorkerOf, store: Store, begun: bool
) -> None:
    playing, all_play = list[int](), asyncio.Event()

    async def play(client: Any, params: Any, row: dict[str, Any]) -> None:
        playing.append(row["session_id"])
        if len(playing) == 2:
            all_play.set()
        await never()

    worker = worker_of(play)
    group = asyncio.create_task(worker.run_group(PROMPT))
    # Its own task begins one step after it.
    await (asyncio.wait_for(all_play.wait(), HANG_S) if begun else asyncio.sleep(0))
    await worker.give_up("a")
    assert await asyncio.wait_for(group, HANG_S) is None
    assert (playing, store.begun) == ([0, 1] if begun else [], 0)
    await worker.give_up("a")  # It is over, and is left alone.


@pytest.mark.parametrize("stored", [False, True], ids=["before it is stored", "while it is stored"])
async def test_a_group_that_is_given_up_tells_whether_it_was_stored(
    worker_of: WorkerOf, store: Store, response: Callable[..., Any], stored: bool
) -> None:
    scored, playing = asyncio.Event(), asyncio.Event()
    store.may_put.clear()

    async def play(*args: Any) -> Any:
        playing.set()
        await scored.wait()
        return response()

    worker = worker_of(play, **{f"{ROLLOUT}.n": 1})
    group = asyncio.create_task(worker.run_group(PROMPT))
    if stored:
        scored.set()
        await asyncio.wait_for(store.asked.wait(), HANG_S)
    await asyncio.wait_for(playing.wait(), HANG_S)
    giving_up = asyncio.create_task(worker.give_up("a"))
    await asyncio.sleep(0)
    scored.set()
    store.may_put.set()
    answered = await asyncio.wait_for(group, HANG_S)
    await asyncio.wait_for(giving_up, HANG_S)
    keys = [one.key for one in answered[0].trajectories] if answered else []
    assert keys == store.keys == (["a_0_0"] if stored else [])


async def test_without_checkpoints_there_are_no_transcripts(
    worker_of: WorkerOf, response: Callable[..., Any], tmp_path: Path
) -> None:
    async def play(client: Any, params: Any, row: Any) -> Any:
        await client.generate("r", prompt_ids=[1])
        await worker.note_transcripts(["a"])
        await worker.write_transcripts(2, str(tmp_path), "x")
        return response()

    worker = worker_of(play)
    await worker.run_group(PROMPT)
    assert tensor_tree.read(tmp_path / "x") == {}
    assert [set(request) for request in worker.llm_client.requests] == [set(), set()]


def saved(module: ModuleType, root: Path, transcripts: dict[str, Any]) -> Path:
    """Publish a checkpoint that has only transcripts, in one shard."""
    part = checkpoints.begin(root, 2)
    partial = module.partial_rollouts
    noted = {uid: [partial.Transcript(one).noted({}) for one in each] for uid, each in transcripts.items()}
    partial.write(str(part), "transcripts/rank_0", noted, 2)
    facts: dict[str, Any] = {"step": 2, "run": "r", "identity": {}, "saved_unix": 0.0}
    return checkpoints.publish(part, epoch=1, record=1, **facts)


async def test_a_group_is_answered_from_a_checkpoint(
    module: ModuleType, worker_of: WorkerOf, store: Store, response: Callable[..., Any], tmp_path: Path
) -> None:
    """Resumed responses reach the transcripts, are neither stored nor given to the agent loop, and are in the
    next checkpoint until then.
    """
    recorded = [
        module.RecordedRequest([1], [token], None, spans_of([(1, 0)]), "completed") for token in (5, 6)
    ]

    async def play(client: Any, params: Any, row: dict[str, Any]) -> Any:
        assert set(row) == {*PROMPT, "session_id"}
        found = await client.generate("r", prompt_ids=[1])
        return response(resumed=found.token_ids)

    transcripts = {"a": [[one] for one in recorded], "settled": [[recorded[0]]]}
    worker = worker_of(play)
    folder = saved(module, tmp_path / "before", transcripts)
    assert await worker.resume(str(folder), ["transcripts/rank_0"]) == {"a": 2, "settled": 1}
    await worker.note_transcripts(["a", "b"])
    (tmp_path / "after").mkdir()
    await worker.write_transcripts(2, str(tmp_path / "after"), "x")
    again = module.partial_rollouts.from_plain(tensor_tree.read(tmp_path / "after/x"))
    assert [[[*one.token_ids] for one in each] for each in again.pop("a")] == [[[5]], [[6]]]
    assert again == {}, "a prompt that is settled is forgotten"
    group, facts = await worker.run_group(PROMPT)
    assert [one.key for one in group.trajectories] == store.keys == ["a_0_0", "a_1_0"]
    (put,) = store.puts
    rows = put["fields"]
    assert group.payload == [sorted(rows.keys())]
    assert [info["acc"] for info in facts.reward_infos] == [1, 1]
    assert [rows["extra_fields"][i]["resumed"] for i in range(2)] == [[5], [6]]
    assert put["partition_id"] == "train"
    assert put["tags"] == [one.payload for one in group.trajectories]
    assert [(tag["response_len"], tag["max_global_steps"]) for tag in put["tags"]] == [(3, 2)] * 2
    assert group.counts == {"replayed_requests": 2}


@pytest.mark.parametrize("broken", [False, True])
async def test_pictures_are_opened_once_for_a_group_or_are_its_flaw(
    load: Load, worker_of: WorkerOf, store: Store, response: Callable[..., Any], broken: bool
) -> None:
    image, file = load("PIL.Image"), io.BytesIO()
    image.new("RGB", (64, 64), "red").save(file, "PNG")
    data = file.getvalue()[: 60 if broken else None]
    content = [{"type": "image", "bytes": data, "path": None}, {"type": "text", "text": "what?"}]
    seen: list[Any] = []

    async def play(client: Any, params: Any, row: dict[str, Any]) -> Any:
        seen.append(row["raw_prompt"][0]["content"][0]["image"])
        return response()

    row = {**PROMPT, "raw_prompt": [{"role": "user", "content": content}]}
    own = {name: row.pop(name) for name in ("uid", "global_steps")}
    group, facts = await worker_of(play).run_group(own, 1, row)
    if broken:
        (flaw,) = facts.flaws
        assert flaw.kind == "unusable_prompt" and "truncated" in flaw.why
        assert (group.trajectories, seen, store.keys) == ((), [], [])
    else:
        assert facts.flaws == []
        assert len(seen) == 2 and seen[0] is seen[1] and seen[0].getpixel((0, 0)) == (255, 0, 0)


async def test_a_value_that_a_checkpoint_cannot_hold_is_stored_as_its_text(
    worker_of: WorkerOf, store: Store, response: Callable[..., Any]
) -> None:
    async def play(client: Any, params: Any, row: Any) -> Any:
        return response(reward_extra_info={"acc": 1, "judge": play})

    await worker_of(play).run_group(PROMPT)
    (put,) = store.puts
    assert [one["reward_extra_info"] for one in put["fields"]["extra_fields"]] == [
        {"acc": 1, "judge": str(play)}
    ] * 2


async def test_an_episode_that_fails_is_repeated_without_its_group(
    load: Load, worker_of: WorkerOf, store: Store, response: Callable[..., Any], tmp_path: Path
) -> None:
    """Its second attempt generates all tokens again, and the group has one response of each episode."""
    token_output = load("verl.workers.rollout.replica").TokenOutput

    begun, before = list[int](), list[Any]()

    async def play(client: Any, params: Any, row: dict[str, Any]) -> Any:
        number = row["session_id"]
        begun.append(number)
        if number == 0:
            return response()
        await worker.note_transcripts(["a"])
        await worker.write_transcripts(2, str(tmp_path), "x")
        before.append(tensor_tree.read(tmp_path / "x"))
        await client.generate("r", prompt_ids=[1])
        worker.llm_client.requests[-1]["transcript"].keep(
            [1], token_output(token_ids=[2], extra_fields={"version_spans": [(1, 0)]})
        )
        if begun.count(1) <= failures:
            raise ValueError("a tool")
        return response()

    worker = worker_of(play, **{"trainer.save_freq": 1, f"{AGENTIC}.attempts": 2})
    failures = 1
    group, facts = await worker.run_group(PROMPT)
    assert {one.key: one.attempts for one in group.trajectories} == {"a_0_0": 1, "a_1_0": 2}
    assert (begun, facts.flaws, sorted(store.keys)) == ([0, 1, 1], [], ["a_0_0", "a_1_0"])
    assert before == [{}, {}]

    begun.clear()
    store.keys.clear()
    failures = 2
    group, facts = await worker.run_group(PROMPT)
    assert [flaw.kind for flaw in facts.flaws] == ["failed_episode"]
    assert "episode a_1, attempt 2: agent_failed: ValueError: a tool" in facts.flaws[0].why
    assert (begun, store.keys) == ([0, 1, 1], []), "and nothing of the group is stored"


async def test_the_episodes_that_finish_first_make_the_group(
    worker_of: WorkerOf, store: Store, response: Callable[..., Any]
) -> None:
    """Of 2 + 2, one fails and one is slow: the other two are stored, and no failure is reported."""

    ended = list[int]()

    async def play(client: Any, params: Any, row: dict[str, Any]) -> Any:
        number = row["session_id"]
        if number == 0:
            raise ValueError("a tool")
        if number == slow:
            try:
                await never()
            finally:
                ended.append(number)
        return response()

    worker = worker_of(play, **{f"{AGENTIC}.attempts": 1, f"{AGENTIC}.redundancy": 2})
    slow = 2
    group, facts = await worker.run_group(PROMPT)
    assert [one.key for one in group.trajectories] == store.keys == ["a_1_0", "a_3_0"]
    assert (facts.flaws, ended) == ([], [2])
    assert [(one.tokens, one.turns) for one in facts.redundant] == [(None, 1)] * 2

    slow = -1
    store.keys.clear()
    group, facts = await worker.run_group(PROMPT)
    assert store.keys == ["a_1_0", "a_2_0"], "one that finishes in the same moment is not stored"
    assert [one.tokens for one in facts.redundant] == [None, 3]


async def test_a_response_that_comes_after_its_group_is_not_stored(
    worker_of: WorkerOf, store: Store, response: Callable[..., Any]
) -> None:
    playing = asyncio.Event()

    async def play(*args: Any) -> Any:
        playing.set()
        with contextlib.suppress(asyncio.CancelledError):
            await never()
        return response()

    worker = worker_of(play, **{f"{ROLLOUT}.n": 1})
    group = asyncio.create_task(worker.run_group(PROMPT))
    await asyncio.wait_for(playing.wait(), HANG_S)
    group.cancel()
    with pytest.raises(asyncio.CancelledError):
        await group
    await asyncio.wait_for(asyncio.gather(*worker.background_tasks), HANG_S)
    assert store.begun == 0


@pytest.mark.parametrize("agent", [None, "another"])
async def test_a_prompt_is_begun_as_verl_begins_it(
    load: Load,
    worker_of: WorkerOf,
    response: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    agent: str | None,
) -> None:
    """Compare with verl's `generate_sequences` for a batch of one row."""
    tu = load("verl.utils.tensordict_utils")
    traced: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def trace(**attributes: Any) -> Any:
        traced.append(attributes)
        yield

    monkeypatch.setattr(load("verl.experimental.agent_loop.agent_loop"), "rollout_trace_attr", trace)
    row: dict[str, Any] = dict(PROMPT) if agent is None else {**PROMPT, "agent_name": "scripted"}
    changes: dict[str, Any] = {f"{ROLLOUT}.temperature": 0.7, f"{ROLLOUT}.top_p": 0.9, f"{ROLLOUT}.top_k": 5}

    begun: list[Any] = []

    async def play(client: Any, params: Any, row: dict[str, Any]) -> Any:
        begun.append((params, row))
        return response()

    if agent is not None:
        changes[f"{ROLLOUT}.agent.default_agent_loop"] = "one_that_there_is_not"
    worker = worker_of(play, **changes)
    await worker.run_group(dict(row))
    batch = tu.get_tensordict({name: [value] for name, value in row.items() if name != "global_steps"})
    tu.assign_non_tensor_data(batch, "global_steps", row["global_steps"])
    await worker.generate_sequences(batch)
    await asyncio.gather(*worker.background_tasks)
    ours, ours_too, verls, verls_too = begun
    assert (ours, ours_too) == (verls, verls_too)
    assert ours[0]["temperature"] == 0.7
    assert traced[:2] == traced[2:]


class Closing(Counting):
    """Notes its end."""

    closed = 0

    def close(self) -> None:
        Closing.closed += 1
        super().close()


async def test_a_worker_ends_what_its_episodes_share(module: ModuleType, worker_of: WorkerOf) -> None:
    given = {"environment": f"{__name__}:Closing", "isolation": "inline", "agent": f"{__name__}:never"}
    worker = worker_of(never, **{f"{AGENTIC}.{name}": value for name, value in given.items()})
    await worker.close()
    server = await module.agent_session_loop.setup_of(worker.config).server()
    async with module.environment_loop.setup_of(worker.config).pool.episode(1, {}):
        pass
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for _ in range(2):
        await worker.close()
    assert Closing.closed == 1
    # Its port may be another process's by now.
    assert await asyncio.wait_for(reader.read(), HANG_S) == b""
    writer.close()


def validated(load: Load, prompt: dict[str, Any]) -> Any:
    """Return verl's batch of one prompt of validation."""
    tensordict = load("verl.utils.tensordict_utils")
    batch = tensordict.get_tensordict(
        {name: [value] for name, value in prompt.items() if name != "global_steps"}
    )
    tensordict.assign_non_tensor_data(batch, "global_steps", prompt["global_steps"])
    tensordict.assign_non_tensor_data(batch, "validate", True)
    return batch


async def test_validation_counts_failed_episodes_and_their_ends(
    load: Load, worker_of: WorkerOf, store: Store, response: Callable[..., Any]
) -> None:
    """One row for each episode, or the mean would be the one of the episodes that did not fail."""
    begun: list[int] = []

    async def play(client: Any, params: Any, row: dict[str, Any]) -> Any:
        begun.append(number := row["session_id"])
        take_turn(1, [(1, 0)], "r", 3, 0.25)
        if number == 2 or (number == 1 and begun.count(1) == 1):
            raise ValueError("a tool")
        return response(**({END: "turns"} if number == 0 else {}))

    changes = {f"{ROLLOUT}.val_kwargs.n": 3, f"{AGENTIC}.attempts": 2, f"{AGENTIC}.failure_reward": -1.0}
    worker = worker_of(play, **changes, **{f"{AGENTIC}.environment": "m:C", f"{AGENTIC}.ends.turns": "score"})
    groups, failed = await worker.run_validation(validated(load, PROMPT))
    assert [(one.episode, one.attempt) for one in failed if one.episode == "a_2"] == [("a_2", 1), ("a_2", 2)]
    assert len(failed) == 3 and all("ValueError: a tool" in one.why for one in failed)
    assert sorted(begun) == [0, 1, 1, 2, 2] and sorted(store.keys) == ["a_0_0", "a_1_0", "a_2_0"]
    scores = {put["keys"][0]: float(put["fields"]["rm_scores"].sum()) for put in store.puts}
    assert scores == {"a_0_0": -1.0, "a_1_0": 1.0, "a_2_0": -1.0}
    assert {put["partition_id"] for put in store.puts} == {"val"}
    found = metrics_of(groups)
    assert (found["agentic/end/turns"], found["agentic/end/agent_failed"]) == (1.0, 1.0)
    assert (found["agentic/episodes"], found["agentic/again"], found["agentic/turns/mean"]) == (3.0, 2.0, 1.0)


async def test_text_with_places_of_pictures_does_not_end_a_validation(
    load: Load,
    module: ModuleType,
    worker_of: WorkerOf,
    store: Store,
    response: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play(client: Any, params: Any, row: dict[str, Any]) -> Any:
        take_turn(1, [(1, 0)], "r", 3, 0.25)
        return response()

    monkeypatch.setattr(module, "media_tokens", lambda processor: {"images": 3})
    changes = {f"{ROLLOUT}.val_kwargs.n": 1, f"{AGENTIC}.attempts": 2, f"{AGENTIC}.failure_reward": -1.0}
    worker = worker_of(play, **changes, **{f"{AGENTIC}.environment": "m:C"})
    _, failed = await worker.run_validation(validated(load, PROMPT))
    assert [one.attempt for one in failed] == [1, 2]
    assert "text of response a_0 has 1 places for images, of which there are 0" in failed[0].why
    assert [float(put["fields"]["rm_scores"].sum()) for put in store.puts] == [-1.0]


async def test_images_of_validation_have_no_noise(load: Load, worker_of: WorkerOf, store: Store) -> None:
    loop = load("recipe.async_pipeline.verl_bridge.agent_loop.diffusion_loop").DiffusionLoop
    images = image_client.Client()

    async def play(client: Any, params: Any, row: dict[str, Any]) -> Any:
        output = await image_client.response_of(loop, images, row)
        output.reward_score = 1.0
        output.extra_fields |= {"min_global_steps": 7, "max_global_steps": 7, "reward_extra_info": {}}
        return output

    worker = worker_of(play, **{f"{ROLLOUT}.n": 1, f"{ROLLOUT}.val_kwargs.n": 1})
    await worker.run_group(PROMPT)
    await worker.run_validation(validated(load, PROMPT))
    trained, scored = images.asked
    assert trained["window"] is not None and scored["window"] is None and trained["seed"] != scored["seed"]
    assert ["latents" in put["fields"].keys() for put in store.puts] == [True, False]


async def test_the_counts_of_an_episode_are_kept_once(
    worker_of: WorkerOf, store: Store, response: Callable[..., Any]
) -> None:
    async def play(*args: Any) -> Any:
        take_turn(1, [(1, 0)], "r", 3, 0.25)
        return [response(), response(**{NOTED: {"params_overridden": 2}, TOOK_MS: [1.5]})]

    group, _ = await worker_of(play, **{f"{ROLLOUT}.n": 1}).run_group({**PROMPT, "data_source": "math"})
    assert group.source == "math"
    assert store.keys == ["a_0_0", "a_0_1"]
    assert (group.counts, group.took_ms) == ({"params_overridden": 2}, (1.5,))
    assert len({one.env_s for one in group.trajectories}) == 1
