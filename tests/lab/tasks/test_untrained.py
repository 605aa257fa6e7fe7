# SPDX-License-Identifier: Apache-2.0
"""The models that engines are checked with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipe.async_pipeline.lab.tasks.untrained import UNTRAINED, main


@pytest.mark.real_engine
def test_a_model_of_each_kind_is_written_with_its_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert main([str(tmp_path), *UNTRAINED]) == 0
    described = {name: json.loads((tmp_path / name / "config.json").read_text("utf-8")) for name in UNTRAINED}
    assert {name: one["architectures"][0] for name, one in described.items()} == {
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "experts": "Qwen3MoeForCausalLM",
    }
    for name, one in described.items():
        assert not one["tie_word_embeddings"], "the checks of engines set the head alone"
        assert one["hidden_size"] == 64 * one["num_attention_heads"]
        assert (tmp_path / name / "tokenizer.json").exists()
