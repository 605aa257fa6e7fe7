# SPDX-License-Identifier: Apache-2.0
"""Supervised warm-up: from random weights to a policy that is right some of the time.

RL needs groups with both correct and wrong responses: a random policy writes none of the former, a
well-taught one few of the latter. Warm-up therefore has two phases. First, the policy learns correct
answers until sampling reaches a given accuracy. Then it trains on answers with random digit errors for a
number of steps, and longer while it is less accurate than required. The result knows more about addition
than it shows, and imitates the errors; the reward does not accept them, which is what RL has to learn.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recipe.async_pipeline.errors import ConfigError, WarmupFailed
from recipe.async_pipeline.lab.tasks.task import careless_answer
from recipe.async_pipeline.lab.tasks.tokenizer import answer_ids, prompt_ids, prompt_messages

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2ForCausalLM

    from recipe.async_pipeline.lab.tasks.task import Problem, Split

# The label that torch's cross entropy ignores.
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class WarmupSpec:
    """Length and learning rates of the supervised training."""

    taught_accuracy: float = 0.6
    """The first phase ends at this share of correct responses, sampled at temperature 1."""

    max_taught_steps: int = 1500
    """Optimizer steps after which the first phase fails."""

    learning_rate: float = 2e-3
    """Learning rate of AdamW in the first phase, reached after `ramp_steps`."""

    ramp_steps: int = 50
    """Steps over which that learning rate rises from zero."""

    slip_rate: float = 0.25
    """Probability that the second phase replaces a digit of an answer by a random one."""

    num_slip_steps: int = 100
    """Optimizer steps of the second phase."""

    max_slip_steps: int = 300
    """Steps after which the second phase fails.

    Accuracy dips before it settles; how far depends on the machine's arithmetic.
    """

    slip_learning_rate: float = 5e-4
    """Learning rate of the second phase; at the full rate it would erase what the first phase taught."""

    min_accuracy: float = 0.1
    """Lowest share of correct responses after both phases that RL can start from."""

    batch_size: int = 64
    """Sums per optimizer step."""

    check_every: int = 25
    """Steps between two measurements of the accuracy."""

    num_checked: int = 512
    """Sums per measurement; the standard error is at most 0.022."""

    num_threads: int = 1
    """Torch threads. The layers are too small to gain from a second one, and on busy cores it costs time."""

    def __post_init__(self) -> None:
        for name in ("taught_accuracy", "slip_rate", "min_accuracy"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"warmup {name} must lie between 0 and 1, got {getattr(self, name)}")
        counts = (
            "max_taught_steps",
            "ramp_steps",
            "num_slip_steps",
            "max_slip_steps",
            "batch_size",
            "check_every",
        )

        for name in (*counts, "num_checked", "num_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"warmup {name} must be >= 1, got {getattr(self, name)}")
        if self.max_slip_steps < self.num_slip_steps:
            raise ConfigError(f"warmup max_slip_steps must be >= num_slip_steps, got {self.max_slip_steps}")


Labelled = tuple[list[int], list[int]]
"""Ids of the tokens of an episode, and a label for each: its id where the policy writes it, else IGNORED."""


def encode_example(tokenizer: PreTrainedTokenizerFast, problem: Problem, answer: str) -> Labelled:
    """Encode a sum and one answer with its end token, with the same prompt ids as in RL."""
    prompt, written = prompt_ids(tokenizer, prompt_messages(problem)), answer_ids(tokenizer, answer)
    return [*prompt, *written], [*[IGNORED] * len(prompt), *written]


def collate(episodes: Sequence[Labelled], pad_id: int) -> tuple[list[list[int]], list[list[int]]]:
    """Pad ids and labels on the right to the longest episode."""
    width = max(len(ids) for ids, _ in episodes)
    return (
        [[*ids, *[pad_id] * (width - len(ids))] for ids, _ in episodes],
        [[*labels, *[IGNORED] * (width - len(labels))] for _, labels in episodes],
    )


def sampled_accuracy(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]
) -> float:
    """Return the share of `problems` answered exactly right, one response each, sampled at temperature 1.

    Uses torch's global random state.
    """
    import torch

    asked = [prompt_ids(tokenizer, prompt_messages(problem)) for problem in problems]
    answers = [answer_ids(tokenizer, problem.answer) for problem in problems]
    width, pad_id = max(map(len, asked)), tokenizer.pad_token_id
    prompts = torch.tensor([[pad_id] * (width - len(one)) + one for one in asked])

    model.eval()
    with torch.no_grad():
        output = model.generate(
            prompts,
            attention_mask=(prompts != pad_id).long(),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=max(map(len, answers)),
        )
    model.train()

    responses = output[:, width:].tolist()
    correct: int = sum(ids[: len(answer)] == answer for ids, answer in zip(responses, answers, strict=True))
    return correct / len(problems)


class TwoPhases(ABC):
    """The two phases, on one model and one optimizer; a task says what a batch and the accuracy are."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        spec: WarmupSpec,
        *,
        seed: int,
        report: Callable[[str], None],
    ) -> None:
        """`model` is trained in place. `report` receives a line per measurement."""
        import torch

        self.model, self.tokenizer, self.spec, self.report = model, tokenizer, spec, report
        self.seed, self.rng = seed, random.Random(seed)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=spec.learning_rate, betas=(0.9, 0.99), weight_decay=0.01
        )

    @abstractmethod
    def accuracy(self, *, unseen: bool) -> float:
        """Return the share of tasks that the policy does right when sampled: held-out ones, or others."""

    @abstractmethod
    def batch(self, slip_rate: float) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return the model's inputs for the episodes of one step, and their labels, [episode, token].

        Their teacher errs with this probability.
        """

    def run(self) -> float:
        """Run both phases; return the accuracy on held-out tasks.

        Restores torch's thread count and random state. Raises WarmupFailed if a required accuracy is not
        reached.
        """
        with reproducible(self.spec, self.seed):
            self._teach()
            return self._spoil()

    def _teach(self) -> None:
        """Train on correct answers until the accuracy is reached. Raises WarmupFailed if it never is."""
        spec, accuracy = self.spec, 0.0
        for step in range(1, spec.max_taught_steps + 1):
            self._train(spec.learning_rate * min(1.0, step / spec.ramp_steps), slip_rate=0.0)
            if step % spec.check_every:
                continue

            accuracy = self.accuracy(unseen=False)
            self.report(
                f"warm-up 1 of 2, supervised: {step} steps, success {accuracy:.2f}; ends at "
                f"{spec.taught_accuracy:.2f}"
            )
            if accuracy >= spec.taught_accuracy:
                return

        raise WarmupFailed(
            f"warm-up reached accuracy {accuracy:.2f} after {spec.max_taught_steps} steps, "
            f"needs {spec.taught_accuracy}; use another --seed"
        )

    def _spoil(self) -> float:
        """Train on answers with errors; return the accuracy. Raises WarmupFailed if it is too low."""
        spec, accuracy = self.spec, 0.0
        for step in range(1, spec.max_slip_steps + 1):
            self._train(spec.slip_learning_rate, slip_rate=spec.slip_rate)
            if step < spec.num_slip_steps or (step - spec.num_slip_steps) % spec.check_every:
                continue

            accuracy = self.accuracy(unseen=True)
            if accuracy >= spec.min_accuracy:
                return accuracy
            self.report(
                f"warm-up 2 of 2, on answers with errors: {step} steps, success {accuracy:.2f}; RL needs "
                f"{spec.min_accuracy:.2f}"
            )
        raise WarmupFailed(
            f"warm-up ended at accuracy {accuracy:.2f}, RL needs {spec.min_accuracy} to start; use another "
            "--seed"
        )

    def _train(self, learning_rate: float, *, slip_rate: float) -> None:
        import torch

        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        inputs, labels = self.batch(slip_rate)
        logits = self.model(**inputs).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


class TextWarmup(TwoPhases):
    """Episodes that are text alone."""

    @abstractmethod
    def episodes(self, count: int, slip_rate: float) -> list[Labelled]:
        """Return the episodes of a batch; their teacher errs with this probability."""

    def batch(self, slip_rate: float) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        import torch

        episodes = self.episodes(self.spec.batch_size, slip_rate)
        ids, labels = map(torch.tensor, collate(episodes, int(self.tokenizer.pad_token_id)))
        return {"input_ids": ids}, labels


class Addition(TextWarmup):
    """Sums, and wrong digits."""

    def __init__(self, split: Split, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self._split = split

    def episodes(self, count: int, slip_rate: float) -> list[Labelled]:
        return [
            encode_example(self.tokenizer, problem, careless_answer(problem, self.rng, slip_rate))
            for problem in self.rng.choices(self._split.train, k=count)
        ]

    def accuracy(self, *, unseen: bool) -> float:
        train, count = self._split.train, min(self.spec.num_checked, len(self._split.train))
        problems = self._split.val if unseen else self.rng.sample(train, count)
        return sampled_accuracy(self.model, self.tokenizer, problems)


@contextmanager
def reproducible(spec: WarmupSpec, seed: int) -> Iterator[None]:
    """Seed torch and limit its threads inside; restores both."""
    import torch

    threads_before = torch.get_num_threads()
    torch.set_num_threads(spec.num_threads)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads_before)
