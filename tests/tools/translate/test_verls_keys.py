# SPDX-License-Identifier: Apache-2.0
"""verl's own keys stay as they are, unless this package has another one."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.config.paths import OWN, nested
from recipe.async_pipeline.tools.translate.rules import TranslatedFile, translate
from recipe.async_pipeline.tools.translate.verls_keys import VERLS, with_agent, with_plus

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("key", "value", "kind", "overrides"),
    [
        (f"{ROLLOUT}.n", 4, "set", {f"{ROLLOUT}.n": 4}),
        ("model_engine", "megatron", "set", {"model_engine": "megatron"}),
        ("trainer.v1.trainer_mode", "separate_async", "nothing to do", {}),
        ("trainer.device", "npu", "differs", {}),
        ("trainer.device", "cuda", "nothing to do", {}),
        ("actor_rollout_ref.actor.megatron.grad_offload", True, "nothing to do", {}),
        (f"{ROLLOUT}.checkpoint_engine.backend", "nccl", "nothing to do", {}),
        (
            f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
            4096,
            "set",
            {f"+{OWN}.weight_sync.gather_bucket_size_mb": 4096},
        ),
        ("data.gen_batch_size", 1, "nothing to do", {}),
        ("fancy", 1, "unknown", {}),
    ],
)
def test_keys(key: str, value: Any, kind: str, overrides: dict[str, Any]) -> None:
    found = translate(nested({key: value}), VERLS)
    assert found.overrides == overrides
    assert [one.outcome.kind for one in found.keys] == [kind]


def test_settings_of_episodes_need_an_agent() -> None:
    turns, environment = f"+{OWN}.agentic.max_turns", f"+{OWN}.agentic.environment"
    assert with_agent(TranslatedFile((), {"trainer.nnodes": 1})).missing == ()
    assert with_agent(TranslatedFile((), {turns: 3, environment: "m:C"})).missing == ()
    (missing,) = with_agent(TranslatedFile((), {turns: 3})).missing
    assert missing.startswith(environment)


def test_keys_that_verl_lacks_are_added() -> None:
    found = translate(
        {"algorithm": {"x": 1}, "data": {"y": 2, "fancy": 4}, "model_engine": "megatron"},
        VERLS,
        also={"+z": 3},
    )
    spelled = with_plus(found, [{"algorithm": {"x": None}}, {"algorithm": {"x": 1}, "data": {"y": 1}}])
    added = {"++data.y": 2, "++data.fancy": 4}
    assert spelled.overrides == {"+z": 3, "algorithm.x": 1, **added, "model_engine": "megatron"}
    outcomes = [one.outcome for one in spelled.keys]
    assert outcomes[1].overrides == {"++data.y": 2}
    assert ["no such key" in one.text for one in outcomes] == [False, False, True, False], "one of them has y"
    assert with_plus(found, []).overrides == found.overrides
