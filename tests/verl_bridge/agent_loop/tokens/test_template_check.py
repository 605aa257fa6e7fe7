# SPDX-License-Identifier: Apache-2.0
"""Turns that differ from the chat template are announced when a run of episodes starts."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.fakes.model_families import FAMILIES, tokenizer_of

pytestmark = pytest.mark.real_engine


def said(module: ModuleType, folder: Path, family: str, model_type: str, agent_loop: str) -> list[str]:
    tokenizer_of(FAMILIES[family]).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    from transformers import AutoTokenizer

    config = {"actor_rollout_ref": {"rollout": {"agent": {"default_agent_loop": agent_loop}}}}
    lines: list[str] = []
    module.warn(config, AutoTokenizer.from_pretrained(folder), lines.append)
    return lines


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_verl_knows_is_no_finding(module: ModuleType, tmp_path: Path, family: str) -> None:
    assert said(module, tmp_path, family, family, "environment") == []


def test_a_lost_separator_is_named(module: ModuleType, tmp_path: Path) -> None:
    (line,) = said(module, tmp_path, "qwen2", "of_no_family", "tool_agent")
    assert "template writes '<|im_end|>\\n<|im_start|>user\\n3<|im_end|>\\n<|im_start|>assistant\\n'" in line
    assert "ContinuousTokenBuilder for model type of_no_family appends '<|im_end|><|im_start|>user" in line


@pytest.mark.parametrize("agent_loop", ["single_turn_agent", "diffusion"])
def test_single_turns_are_not_compared(module: ModuleType, tmp_path: Path, agent_loop: str) -> None:
    assert said(module, tmp_path, "qwen2", "of_no_family", agent_loop) == []


def test_a_template_that_refuses_is_left_to_the_episodes(
    module: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer: Any = tokenizer_of(FAMILIES["qwen2"])
    tokenizer.chat_template = "{{ raise_exception('no users') }}"
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}', encoding="utf-8")
    tokenizer.name_or_path = str(tmp_path)
    config = {"actor_rollout_ref": {"rollout": {"agent": {"default_agent_loop": "environment"}}}}
    module.warn(config, tokenizer, pytest.fail)
    assert "no users" in caplog.text
