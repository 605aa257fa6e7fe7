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
from typing import TYPE_CHECKING

from recipe.async_pipeline.errors import ConfigError, WarmupFailed
from recipe.async_pipeline.lab.tasks.task import careless_answer
from recipe.async_pipeline.lab.tasks.tokenizer import answer_ids, prompt_ids, prompt_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

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


@dataclass(frozen=True)
class Example:
    """One sum as token ids: the prompt as RL sends it, and an answer with its end token."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def encode_example(tokenizer: PreTrainedTokenizerFast, problem: Problem, answer: str) -> Example:
    """Encode a sum and one answer to it, with the same prompt ids as in RL."""
    return Example(
        prompt=tuple(prompt_ids(tokenizer, prompt_messages(problem))),
        answer=tuple(answer_ids(tokenizer, answer)),
    )


def collate(examples: Sequence[Example], pad_id: int) -> tuple[list[list[int]], list[list[int]]]:
    """Pad on the right and label the answer tokens only.

    Returns ids and labels, both [num_examples, longest example]; labels[i][j] equals ids[i][j] where that
    token belongs to the answer, and -100 where it is prompt or padding.
    """
    width = max(len(example.prompt) + len(example.answer) for example in examples)
    ids: list[list[int]] = []
    labels: list[list[int]] = []
    for example in examples:
        fill = width - len(example.prompt) - len(example.answer)
        ids.append([*example.prompt, *example.answer, *[pad_id] * fill])
        labels.append([*[IGNORED] * len(example.prompt), *example.answer, *[IGNORED] * fill])
    return ids, labels


def sampled_accuracy(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]
) -> float:
    """Return the share of `problems` answered exactly right, one response each, sampled at temperature 1.

    Uses torch's global random state.
    """
    import torch

    examples = [encode_example(tokenizer, problem, problem.answer) for problem in problems]
    width = max(len(example.prompt) for example in examples)
    pad_id = tokenizer.pad_token_id
    prompts = torch.tensor([[pad_id] * (width - len(e.prompt)) + list(e.prompt) for e in examples])

    model.eval()
    with torch.no_grad():
        output = model.generate(
            prompts,
            attention_mask=(prompts != pad_id).long(),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=max(len(example.answer) for example in examples),
        )
    model.train()

    responses = output[:, width:].tolist()
    correct = sum(
        tuple(ids[: len(example.answer)]) == example.answer
        for ids, example in zip(responses, examples, strict=True)
    )
    return correct / len(problems)


def warm_up(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    split: Split,
    spec: WarmupSpec,
    *,
    seed: int,
    report: Callable[[str], None],
) -> float:
    """Train `model` in place on `split.train`, in two phases; return the accuracy on `split.val`.

    Restores torch's thread count and random state. `report` receives a line per measurement. Raises
    WarmupFailed if a required accuracy is not reached.
    """
    with reproducible(spec, seed):
        return _Addition(model, tokenizer, split, spec, random.Random(seed), report).run()


class TwoPhases(ABC):
    """The two phases, on one model and one optimizer; a task says what a batch and the accuracy are."""

    def __init__(
        self, model: Qwen2ForCausalLM, spec: WarmupSpec, rng: random.Random, report: Callable[[str], None]
    ) -> None:
        import torch

        self.model, self.spec, self.rng, self.report = model, spec, rng, report
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=spec.learning_rate, betas=(0.9, 0.99), weight_decay=0.01
        )

    @abstractmethod
    def batch(self, slip_rate: float) -> tuple[list[list[int]], list[list[int]]]:
        """Return ids and labels of a batch, as `collate`; its teacher errs with this probability."""

    @abstractmethod
    def accuracy(self, *, unseen: bool) -> float:
        """Return the share of tasks that the policy does right when sampled: held-out ones, or others."""

    def run(self) -> float:
        """Run both phases; return the accuracy on held-out tasks."""
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
        ids, labels = (torch.tensor(rows) for rows in self.batch(slip_rate))
        logits = self.model(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


class _Addition(TwoPhases):
    """Sums, and wrong digits."""

    def __init__(
        self,
        model: Qwen2ForCausalLM,
        tokenizer: PreTrainedTokenizerFast,
        split: Split,
        spec: WarmupSpec,
        rng: random.Random,
        report: Callable[[str], None],
    ) -> None:
        super().__init__(model, spec, rng, report)
        self._tokenizer, self._split = tokenizer, split

    def batch(self, slip_rate: float) -> tuple[list[list[int]], list[list[int]]]:
        problems = self.rng.choices(self._split.train, k=self.spec.batch_size)
        examples = [
            encode_example(self._tokenizer, problem, careless_answer(problem, self.rng, slip_rate))
            for problem in problems
        ]
        return collate(examples, self._tokenizer.pad_token_id)

    def accuracy(self, *, unseen: bool) -> float:
        train, count = self._split.train, min(self.spec.num_checked, len(self._split.train))
        problems = self._split.val if unseen else self.rng.sample(train, count)
        return sampled_accuracy(self.model, self._tokenizer, problems)


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
