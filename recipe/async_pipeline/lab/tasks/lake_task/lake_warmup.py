# SPDX-License-Identifier: Apache-2.0
"""Supervised warm-up on FrozenLake: imitation of the shortest ways, then of a careless teacher.

As for addition (`warmup`), the result knows more than it shows: when it takes the likeliest action it still
finds the goal, and when it is sampled it slips as its last teacher did, which RL has to unlearn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from recipe.async_pipeline.lab.tasks.lake_task.lake import LakeTask, Shown, Teacher
from recipe.async_pipeline.lab.tasks.tokenizer import answer_ids, prompt_ids
from recipe.async_pipeline.lab.tasks.warmup import IGNORED, Labelled, TextWarmup, WarmupSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

WARMUP = WarmupSpec(
    taught_accuracy=0.75,
    max_taught_steps=600,
    slip_rate=0.45,
    num_slip_steps=80,
    max_slip_steps=160,
    batch_size=32,
    num_checked=128,
)
"""Lengths and rates for boards of four rows."""


def encode_shown(tokenizer: PreTrainedTokenizerFast, shown: Shown) -> Labelled:
    """Return an episode, with the tokens that the agent loop `environment` makes of it.

    Only the actions and the tokens that end them are labelled.
    """
    ids = prompt_ids(tokenizer, [{"role": "user", "content": shown.first}])
    labels = [IGNORED] * len(ids)
    for action, observation in shown.turns:
        written = answer_ids(tokenizer, action)
        # The chat template ends a turn of the policy with a newline.
        seen = tokenizer.encode(f"\n{observation}", add_special_tokens=False) if observation else []
        ids += [*written, *seen]
        labels += [*written, *[IGNORED] * len(seen)]
    return ids, labels


def sampled_success(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, task: LakeTask, seeds: Sequence[int]
) -> float:
    """Return the share of boards on which the policy reaches the goal, one episode each at temperature 1.

    Uses torch's global random state. All observations have the same length, so the episodes advance together.
    """
    import torch

    lakes = [task.make() for _ in seeds]
    prompts = [lake.reset(seed) for lake, seed in zip(lakes, seeds, strict=True)]
    new = torch.tensor([prompt_ids(tokenizer, [{"role": "user", "content": text}]) for text in prompts])
    view = len(lakes[0].render(0))
    playing, reached, cache = set(range(len(lakes))), 0, None

    model.eval()
    with torch.no_grad():
        for _ in range(task.max_turns):
            said = []
            for _ in range(2):  # the action, and the token that ends it
                output = model(input_ids=new, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                new = torch.multinomial(torch.softmax(output.logits[:, -1].float(), -1), 1)
                said.append(new[:, 0].tolist())

            texts = ["#" * view] * len(lakes)
            for i, (action, end) in enumerate(zip(*said, strict=True)):
                if i in playing:
                    whole = end == tokenizer.eos_token_id
                    step = lakes[i].step(tokenizer.decode([action]) if whole else "")
                    reached += step.reward > 0
                    texts[i] = step.observation
                    playing -= {i} if step.over else set()
            if not playing:
                break
            seen = [tokenizer.encode(f"\n{text}", add_special_tokens=False) for text in texts]
            new = torch.cat([new, torch.tensor(seen)], dim=1)
    model.train()
    return reached / len(lakes)


class LakeWarmup(TextWarmup):
    """Boards, and random actions."""

    def __init__(self, task: LakeTask, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self._task, self._teacher = task, Teacher(task)
        self._train_seeds, self._val_seeds = task.seeds(self.seed)

    def episodes(self, count: int, slip_rate: float) -> list[Labelled]:
        return [
            encode_shown(self.tokenizer, self._teacher.show(seed, self.rng, slip_rate))
            for seed in self.rng.choices(self._train_seeds, k=count)
        ]

    def accuracy(self, *, unseen: bool) -> float:
        count = min(self.spec.num_checked, len(self._train_seeds))
        seeds = self._val_seeds if unseen else self.rng.sample(self._train_seeds, count)
        return sampled_success(self.model, self.tokenizer, self._task, seeds)
