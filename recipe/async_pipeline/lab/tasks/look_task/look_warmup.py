# SPDX-License-Identifier: Apache-2.0
"""Supervised warm-up on pictures: answers first, then answers with errors. As for addition (`warmup`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from recipe.async_pipeline.lab.tasks.look_task.look import QUESTION, Look, careless_answer
from recipe.async_pipeline.lab.tasks.tokenizer import answer_ids
from recipe.async_pipeline.lab.tasks.warmup import IGNORED, TwoPhases, WarmupSpec, collate

if TYPE_CHECKING:
    import torch

LOOK_WARMUP = WarmupSpec(taught_accuracy=0.7, max_taught_steps=2000, slip_rate=0.5, num_checked=128)
"""Lengths and rates for the default pictures."""


class LookWarmup(TwoPhases):
    """Pictures, and wrong words."""

    def __init__(
        self,
        pictures: tuple[Sequence[Look], Sequence[Look]],
        processor: Any,
        model: Any,
        spec: WarmupSpec,
        **settings: Any,
    ) -> None:
        super().__init__(model, processor.tokenizer, spec, **settings)
        self._train_set, self._val_set = pictures
        self._processor = processor

    def batch(self, slip_rate: float) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        import torch

        pictures = self.rng.choices(self._train_set, k=self.spec.batch_size)
        asked = self.asked(pictures)
        episodes = []
        for picture, prompt in zip(pictures, asked["input_ids"].tolist(), strict=True):
            written = answer_ids(self.tokenizer, careless_answer(picture, self.rng, slip_rate))
            episodes.append(([*prompt, *written], [*[IGNORED] * len(prompt), *written]))
        ids, labels = map(torch.tensor, collate(episodes, int(self.tokenizer.pad_token_id)))
        longer = ids.shape[1] - asked["input_ids"].shape[1]
        kinds = torch.nn.functional.pad(asked["mm_token_type_ids"], (0, longer))
        return {**asked, "input_ids": ids, "mm_token_type_ids": kinds}, labels

    def asked(self, pictures: Sequence[Look]) -> dict[str, torch.Tensor]:
        """Return the inputs of prompts, made as verl's agent loop makes them."""
        before, _, after = QUESTION.partition("<image>")
        content = [
            *([{"type": "text", "text": before}] if before else []),
            {"type": "image"},
            {"type": "text", "text": after},
        ]
        text = self._processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        inputs = self._processor(
            text=[text] * len(pictures), images=[picture.draw() for picture in pictures], return_tensors="pt"
        )
        del inputs["attention_mask"]
        return dict(inputs)

    def accuracy(self, *, unseen: bool) -> float:
        import torch

        count = self.spec.num_checked
        pictures = self._val_set if unseen else self.rng.sample(list(self._train_set), count)
        inputs = self.asked(pictures)
        answers = [answer_ids(self.tokenizer, picture.answer) for picture in pictures]
        self.model.eval()
        with torch.no_grad():
            output = self.model.generate(
                **inputs,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=max(map(len, answers)),
            )
        self.model.train()
        written = output[:, inputs["input_ids"].shape[1] :].tolist()
        right: int = sum(ids[: len(answer)] == answer for ids, answer in zip(written, answers, strict=True))
        return right / len(pictures)
