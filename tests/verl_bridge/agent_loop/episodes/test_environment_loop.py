# SPDX-License-Identifier: Apache-2.0
"""An episode in an environment, token for token: what is written once is never encoded again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image
from verl.utils.dataset.rl_dataset import RLHFDataset

from recipe.async_pipeline.agents.environment import EnvironmentSpec
from recipe.async_pipeline.config.knobs.agentic import AgenticConfig
from recipe.async_pipeline.errors import ConfigError, EnvironmentFailed
from recipe.async_pipeline.lab.tasks.look_task.look_model import (
    IMAGE,
    VISION_END,
    VISION_START,
    make_processor,
)
from recipe.async_pipeline.lab.tasks.tokenizer import make_tokenizer
from recipe.async_pipeline.verl_bridge.agent_loop.episodes.episode import END, WHY
from tests.fakes.environments import COUNTING

pytestmark = pytest.mark.real_engine
SAMPLING = {"temperature": 1.0}
FIRST = "seed 5 episode 1"


class Policy:
    """Writes these tokens, turn by turn, and notes the prompts and limits."""

    def __init__(self, *turns: Sequence[int], log_probs: bool = True) -> None:
        self.turns, self.log_probs = list(turns), log_probs
        self.prompts: list[list[int]] = []
        self.limits: list[int] = []
        self.seen: list[list[Any]] = []

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling_params: Mapping[str, Any],
        image_data: Sequence[Any] | None,
    ) -> Any:
        self.prompts.append(list(prompt_ids))
        self.seen.append(list(image_data or ()))
        self.limits.append(sampling_params["max_tokens"])
        turn = len(self.prompts)
        tokens = list(self.turns[turn - 1])[: sampling_params["max_tokens"]]
        return SimpleNamespace(
            token_ids=tokens,
            log_probs=[-turn - i / 8 for i in range(len(tokens))] if self.log_probs else None,
            extra_fields={"min_global_steps": turn, "max_global_steps": turn},
            num_preempted=0,
        )


class Table:
    """Plays episodes of a policy in an environment, with the toy's tokenizer and verl's own builder."""

    def __init__(
        self,
        module: ModuleType,
        *,
        response_length: int = 200,
        max_turns: int = 9,
        max_turn_tokens: int | None = None,
        spec: EnvironmentSpec = COUNTING,
        turn_rewards: bool = False,
        sees: bool = False,
        limit_images: int | None = None,
    ) -> None:
        """`sees`: the policy reads pictures."""
        self.module, self.processor = module, make_processor() if sees else None
        self.tokenizer = self.processor.tokenizer if self.processor else make_tokenizer()
        self.eos = int(self.tokenizer.eos_token_id)
        rollout = {
            "prompt_length": 64,
            "response_length": response_length,
            "limit_images": limit_images,
        }
        self.config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {"seed": 3}})
        self.knobs = AgenticConfig(
            environment=spec.name,
            environment_kwargs=spec.kwargs,
            isolation="inline",
            env_timeout_s=5,
            max_turns=max_turns,
            max_turn_tokens=max_turn_tokens,
            turn_rewards=turn_rewards,
        )
        self.left_behind = -1

    def encode(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return found

    def said(self, text: str) -> list[int]:
        return [*self.encode(text), self.eos]

    def play(self, policy: Policy, **row: Any) -> Any:
        async def episode() -> Any:
            pool = self.module.setup_of(self.config).pool
            wrap = SimpleNamespace
            loop = self.module.EnvironmentLoop(
                trainer_config=wrap(config=self.config),
                server_manager=policy,
                tokenizer=self.tokenizer,
                processor=self.processor,
                dataset_cls=RLHFDataset,
                data_config=wrap(config=OmegaConf.create({})),
                hf_model_type="qwen2_5_vl" if self.processor else "qwen2",
            )
            given = {"raw_prompt": [{"role": "user", "content": ""}], "extra_info": {"seed": 5}, "index": 0}
            try:
                return await loop.run(dict(SAMPLING), **{**given, **row})
            finally:
                await self.module.stop()
                self.left_behind = pool.left_behind

        given = SimpleNamespace(agentic=self.knobs)
        with mock.patch.object(self.module, "knobs_of", lambda config: given):
            return asyncio.run(episode())


def test_an_episode_token_for_token(module: ModuleType) -> None:
    table = Table(module)
    turns = [table.said("a"), table.said("bc"), table.said("stop")]
    policy = Policy(*turns)
    output = table.play(policy)

    first, second = table.encode("\na 1"), table.encode("\nbc 2")
    assert output.prompt_ids == table.encode(FIRST)
    assert output.response_ids == [*turns[0], *first, *turns[1], *second, *turns[2]]
    assert output.response_mask == [1, 1, *[0] * 4, 1, 1, 1, *[0] * 5, *[1] * 5]
    written = [value for value, on in zip(output.response_logprobs, output.response_mask, strict=True) if on]
    assert written == [-1, -1.125, -2, -2.125, -2.25, -3, -3.125, -3.25, -3.375, -3.5]
    assert all(v == 0 for v, on in zip(output.response_logprobs, output.response_mask, strict=True) if not on)

    whole = output.prompt_ids + output.response_ids
    assert all(prompt == whole[: len(prompt)] for prompt in policy.prompts), "each prompt is a prefix"
    assert policy.limits == [200, 194, 186]
    fields = output.extra_fields
    assert (fields[END], output.reward_score, fields["turn_scores"]) == ("done", 1.5, [0.5] * 3)
    assert (fields["min_global_steps"], fields["max_global_steps"], output.num_turns) == (1, 3, 6)
    assert table.left_behind == 0


SHOWING = EnvironmentSpec(name=COUNTING.name, kwargs={"pictures": 2})


def test_pictures_of_an_environment_have_placeholders_in_the_tokens(module: ModuleType) -> None:
    table = Table(module, spec=SHOWING, sees=True)
    policy = Policy(table.said("a"), table.said("stop"))
    asked = [{"type": "image", "image": Image.new("RGB", (56, 56))}, {"type": "text", "text": "?"}]
    output = table.play(policy, raw_prompt=[{"role": "user", "content": asked}])

    def shown(tokens: int) -> list[int]:
        return table.encode(VISION_START + IMAGE * tokens + VISION_END)

    seen = [*shown(4), *shown(8)]
    assert output.prompt_ids == [*shown(4), *table.encode("?" + FIRST), *seen]
    response = [*table.said("a"), *table.encode("\na 1"), *seen, *table.said("stop")]
    assert output.response_ids == response
    assert output.response_mask == [1, 1, *[0] * (len(response) - 7), *[1] * 5]
    sizes = [[picture.size for picture in pictures] for pictures in policy.seen]
    assert sizes == [[(56, 56), (56, 56), (56, 112)], [(56, 56), *[(56, 56), (56, 112)] * 2]]
    assert output.multi_modal_data["images"] == policy.seen[-1]
    assert output.extra_fields[END] == "done"


def test_an_episode_ends_before_it_has_more_pictures_than_the_engine_takes(module: ModuleType) -> None:
    table = Table(module, spec=SHOWING, sees=True, limit_images=3)
    output = table.play(Policy(table.said("a")))
    assert (output.extra_fields[END], len(output.multi_modal_data["images"])) == ("tokens", 2)
    assert output.extra_fields[WHY] == "it has 4 pictures, and rollout.limit_images is 3"


def test_a_picture_that_cannot_be_decoded_is_a_fault_of_the_environment(module: ModuleType) -> None:
    table = Table(module, spec=SHOWING, sees=True)
    output = table.play(Policy(table.said("broken")))
    assert output.extra_fields[END] == "env_failed"
    assert "step: a picture of the observation cannot be decoded" in output.extra_fields[WHY]
    with pytest.raises(EnvironmentFailed, match="reset: a picture of the observation cannot be decoded"):
        table.play(Policy(), extra_info={"seed": 5, "task": {"hint": "broken"}})


def test_a_model_that_reads_text_gets_no_pictures(module: ModuleType) -> None:
    with pytest.raises(ConfigError, match="shows pictures, but actor_rollout_ref.model.path reads text only"):
        Table(module, spec=SHOWING).play(Policy())


def test_an_episode_needs_a_text_to_begin_with(module: ModuleType) -> None:
    table = Table(module)
    with pytest.raises(EnvironmentFailed, match="neither the prompt nor the first observation has a text"):
        table.play(Policy(table.said("a")), extra_info={"seed": 5, "task": {"silent": True}})


def test_each_reward_is_at_the_end_of_its_turn_or_all_of_them_at_the_end_of_the_response(
    module: ModuleType,
) -> None:
    for turn_rewards in (False, True):
        table = Table(module, turn_rewards=turn_rewards)
        output = table.play(Policy(table.said("a"), table.said("bc"), table.said("stop")))
        stored = output.as_dict()
        scores, mask = stored["rm_scores"].tolist(), output.response_mask
        assert "turn_rewards" not in stored and sum(scores) == output.reward_score == 1.5
        ends = [at for at, on in enumerate(mask) if on and not (mask[at + 1 :] or [0])[0]]
        assert len(ends) == 3 and scores[-1] == (0.5 if turn_rewards else 1.5)
        if turn_rewards:
            assert [(at, score) for at, score in enumerate(scores) if score] == [(at, 0.5) for at in ends]

    output.reward_score = -2.0
    assert output.as_dict()["rm_scores"].tolist() == [*[0.0] * (len(mask) - 1), -2.0], "failure_reward"


def test_verls_estimators_give_each_turn_what_came_after_it(module: ModuleType) -> None:
    """Without discounting, a turn has no part in the rewards of earlier turns."""
    import torch
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    table = Table(module, turn_rewards=True)
    output = table.play(Policy(table.said("a"), table.said("bc"), table.said("stop")))
    scores, mask = output.as_dict()["rm_scores"].unsqueeze(0), torch.tensor([output.response_mask])
    _, returns = get_adv_estimator_fn("reinforce_plus_plus")(
        token_level_rewards=scores, response_mask=mask, config=SimpleNamespace(gamma=1.0)
    )
    assert returns[mask.bool()].tolist() == [1.5] * 2 + [1.0] * 3 + [0.5] * 5


def test_bytes_that_are_no_text_stay_as_they_were_written(module: ModuleType) -> None:
    """The environment gets their text, in which they are replaced; the tokens are the policy's."""
    table = Table(module)
    broken = [*range(128, 140), table.eos]
    output = table.play(Policy(broken, table.said("stop")))
    assert output.response_ids[: len(broken)] == broken
    assert output.extra_fields[END] == "done"


def test_a_turn_that_is_too_long_is_cut_off(module: ModuleType) -> None:
    table = Table(module, max_turn_tokens=4)
    policy = Policy(table.said("abc"), table.said("abcd"))
    output = table.play(policy)
    assert policy.limits == [4, 4]
    assert output.extra_fields[END] == "cut_off" and output.response_ids[-4:] == table.encode("abcd")


def test_without_log_probs(module: ModuleType) -> None:
    table = Table(module)
    output = table.play(Policy(table.said("a"), table.said("stop"), log_probs=False))
    assert output.response_logprobs is None and output.extra_fields[END] == "done"


@pytest.mark.parametrize(
    ("turns", "limits", "end", "kept"),
    [
        (["a", "a", "a"], {"max_turns": 2}, "turns", 8),
        (["a", "a"], {"response_length": 6}, "tokens", 2),
        (["a", "abcdef"], {"response_length": 9}, "cut_off", 9),
        (["raise"], {}, "env_failed", 6),
    ],
)
def test_the_other_ends(
    module: ModuleType, turns: list[str], limits: dict[str, Any], end: str, kept: int
) -> None:
    table = Table(module, **limits)
    output = table.play(Policy(*map(table.said, turns)))
    assert output.extra_fields[END] == end
    assert len(output.response_ids) == len(output.response_mask) == kept
    assert output.response_mask[-1] == 1, "it ends with what the policy wrote"
    assert ("RuntimeError: in a step" in output.extra_fields[WHY]) == (end == "env_failed")
    assert output.reward_score == 0.5 * len(output.extra_fields["turn_scores"])


def test_a_turn_without_an_end_token_is_cut_off(module: ModuleType) -> None:
    table = Table(module)
    assert table.play(Policy(table.encode("a"))).extra_fields[END] == "cut_off"
    assert table.play(Policy([])).extra_fields[END] == "cut_off"


def test_an_action_that_is_none_ends_as_the_environment_says(module: ModuleType) -> None:
    pytest.importorskip("gymnasium")
    table = Table(module, spec=EnvironmentSpec(name="frozen_lake"))
    output = table.play(Policy(table.said("X")))
    assert (output.extra_fields[END], output.reward_score) == ("invalid", 0.0)
    assert len(output.prompt_ids) == 25, "the board and the four neighbours"


def test_an_environment_that_cannot_begin_leaves_no_response(module: ModuleType) -> None:
    table = Table(module)
    policy = Policy()
    with pytest.raises(EnvironmentFailed, match="reset: ValueError: no such task"):
        table.play(policy, extra_info={"seed": 5, "task": {"raises": True}})
    assert policy.prompts == [] and table.left_behind == 0


def test_the_task_of_a_row_reaches_the_environment(module: ModuleType) -> None:
    table = Table(module)
    info = {"seed": np.int64(5), "task": {"hint": "go"}}
    output = table.play(Policy(table.said("stop")), extra_info=info)
    assert output.prompt_ids == table.encode(f"{FIRST} go")


SYSTEM, USER = {"role": "system", "content": "rules"}, {"role": "user", "content": "play"}


@pytest.mark.parametrize(
    ("prompt", "messages"),
    [
        ([], [{"role": "user", "content": "o"}]),
        ([SYSTEM], [SYSTEM, {"role": "user", "content": "o"}]),
        ([SYSTEM, USER], [SYSTEM, {"role": "user", "content": "play\n\no"}]),
        ([{"role": "user", "content": ""}], [{"role": "user", "content": "o"}]),
    ],
)
def test_the_first_observation_joins_the_prompt(
    module: ModuleType, prompt: list[Any], messages: list[Any]
) -> None:
    assert module.with_observation(prompt, "o") == messages
    assert prompt in ([], [SYSTEM], [SYSTEM, USER], [{"role": "user", "content": ""}]), "rows are shared"


def test_the_seed_belongs_to_the_prompt(module: ModuleType) -> None:
    assert module.seed_of({"seed": "7"}, 1, 0) == 7
    seeds = [module.seed_of({}, index, run) for index in range(50) for run in (0, 1)]
    assert len(set(seeds)) == 100 and all(0 <= seed < 2**32 for seed in seeds)
    assert module.seed_of({}, np.int64(4), 1) == module.seed_of({}, 4, 1)


def test_values_of_a_row_are_plain(module: ModuleType) -> None:
    found = module.plain({"a": np.array([1, 2]), "b": (np.float32(0.5), None), "c": {"d": "x"}})
    assert found == {"a": [1, 2], "b": [0.5, None], "c": {"d": "x"}}
    assert [type(one) for one in (*found["a"], found["b"][0])] == [int, int, float]


async def test_the_loop_requires_an_environment(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = SimpleNamespace(agentic=SimpleNamespace(environment=None, PATH="trainer.agentic"))
    monkeypatch.setattr(module, "knobs_of", lambda config: knobs)

    with pytest.raises(ConfigError, match=r"requires trainer.agentic.environment; set it"):
        module.setup_of(OmegaConf.create({}))
