# SPDX-License-Identifier: Apache-2.0
"""ROLL's keys of data, rewards, validation, engines and other pipelines."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.config.paths import nested
from recipe.async_pipeline.tools.translate.roll_workers import WORKERS
from recipe.async_pipeline.tools.translate.rules import translate

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL, VALIDATION = "actor_rollout_ref.model", f"{ROLLOUT}.val_kwargs"


@pytest.mark.parametrize(
    ("key", "value", "overrides"),
    [
        ("validation.generating_args.top_p", 0.6, {f"{VALIDATION}.top_p": 0.6}),
        (
            "validation.generating_args.temperature",
            0.6,
            {f"{VALIDATION}.do_sample": True, f"{VALIDATION}.temperature": 0.6},
        ),
        (
            "validation.generating_args.temperature",
            0,
            {f"{VALIDATION}.do_sample": False, f"{VALIDATION}.temperature": 0},
        ),
        ("actor_train.model_args.lora_rank", 8, {f"{MODEL}.lora_rank": 8}),
        (
            "actor_train.model_args.lora_target",
            "q_proj, v_proj",
            {f"{MODEL}.target_modules": ["q_proj", "v_proj"]},
        ),
        ("actor_train.model_args.lora_target", "all-linear", {f"{MODEL}.target_modules": "all-linear"}),
        ("actor_train.use_dynamic_batching_in_train", False, {f"{ACTOR}.use_dynamic_bsz": False}),
        ("actor_infer.strategy_args.strategy_config.enforce_eager", True, {f"{ROLLOUT}.enforce_eager": True}),
    ],
)
def test_what_is_set(key: str, value: Any, overrides: dict[str, Any]) -> None:
    found = translate(nested({key: value}), WORKERS)
    assert found.overrides == overrides and found.keys[0].outcome.kind == "set"


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("hydra.run.dir", ".", "nothing to do"),
        ("rewards.math.worker_cls", "m.C", "by hand"),
        ("actor_train.data_args.file_name", ["a.jsonl"], "by hand"),
        ("actor_train.model_args.model_type", None, "nothing to do"),
        ("actor_train.model_args.model_type", "trl", "differs"),
        ("actor_train.model_args.freeze_module_prefix", "vision_model", "unsupported"),
        ("sft_train.training_args.learning_rate", 1e-5, "unsupported"),
        ("teacher.device_mapping", "list(range(0,8))", "unsupported"),
        ("warp", 9, "unknown"),
        ("actor_train.warp", 9, "unknown"),
    ],
)
def test_what_is_not_set_is_explained(key: str, value: Any, kind: str) -> None:
    found = translate(nested({key: value}), WORKERS)
    assert [one.outcome.kind for one in found.keys] == [kind] and found.keys[0].outcome.text


def test_dynamic_batches_need_their_tokens() -> None:
    switch = "actor_train.use_dynamic_batching_in_train"
    alone = translate(nested({switch: True}), WORKERS)
    assert alone.keys[0].outcome.kind == "by hand"
    limit = "actor_train.max_tokens_per_microbatch_in_train"
    both = translate(nested({switch: True, limit: 4096}), WORKERS)
    assert both.overrides == {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 4096}
