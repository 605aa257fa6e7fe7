# SPDX-License-Identifier: Apache-2.0
"""The tokens of a model, from its folder."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from recipe.async_pipeline.lab.tasks.tokenizer import make_tokenizer

pytestmark = pytest.mark.real_engine
TOKENIZER = make_tokenizer()
EOS = int(TOKENIZER.eos_token_id)


def config_of(**model: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create({"actor_rollout_ref": {"model": model}})


@pytest.mark.parametrize(
    ("ends", "expected"), [(None, {EOS}), (EOS, {EOS}), (11, {EOS, 11}), ([EOS, 7, 9], {EOS, 7, 9})]
)
def test_engines_stop_at_all_ends_of_the_generation_config(
    module: ModuleType, tmp_path: Path, ends: Any, expected: set[int]
) -> None:
    from transformers import GenerationConfig, LlamaConfig

    size = len(TOKENIZER) + 5
    LlamaConfig(vocab_size=size).save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=ends).save_pretrained(tmp_path)
    found = module.tokens_of(config_of(path=str(tmp_path)), TOKENIZER)
    assert found == (size, expected), "the embedding may be larger than the tokenizer"
    assert module.turn_ends(found, {"stop_token_ids": [3]}) == expected | {3}
    assert module.turn_ends(found, {"stop_token_ids": None}) == expected


def test_a_folder_without_a_generation_config(module: ModuleType, tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(vocab_size=99, eos_token_id=[5, 6]).save_pretrained(tmp_path)
    found = module.tokens_of(config_of(path="other", hf_config_path=str(tmp_path)), TOKENIZER)
    assert found == (99, {EOS, 5, 6})


def test_a_model_that_transformers_does_not_know(module: ModuleType, tmp_path: Path) -> None:
    from transformers import GenerationConfig

    (tmp_path / "config.json").write_text('{"model_type": "of_tomorrow", "vocab_size": 7}')
    GenerationConfig(eos_token_id=[8]).save_pretrained(tmp_path)
    found = module.tokens_of(config_of(path=str(tmp_path)), TOKENIZER)
    assert found == (len(TOKENIZER), {EOS, 8})


def test_without_a_model_the_tokenizer_counts(module: ModuleType) -> None:
    assert module.tokens_of(config_of(), TOKENIZER) == (len(TOKENIZER), {EOS})
