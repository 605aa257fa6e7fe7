# SPDX-License-Identifier: Apache-2.0
"""rLLM's own keys become knobs; verl's stay as they are."""

from __future__ import annotations

from recipe.async_pipeline.config.paths import OWN
from recipe.async_pipeline.tools.translate.rllm import translate_rllm


def test_its_keys_and_verls() -> None:
    found = translate_rllm(
        {
            "rllm": {
                "agent": {"max_steps": 12, "trajectory_timeout": 300, "engine_args": {"a": 1}},
                "gateway": {"port": 9090},
                "rejection_sample": {"enable": True},
            },
            "async_training": {"staleness_threshold": 0.5, "trigger_parameter_sync_step": 2},
            "actor_rollout_ref": {"rollout": {"n": 4}},
            "fancy": 1,
        }
    )
    assert found.overrides == {
        "+async_pipeline": True,
        f"+{OWN}.agentic.max_turns": 12,
        f"+{OWN}.agentic.episode_timeout_s": 300.0,
        "algorithm.filter_groups.enable": True,
        "+async_training.staleness_threshold": 0.5,
        "+async_training.trigger_parameter_sync_step": 2,
        "actor_rollout_ref.rollout.n": 4,
    }
    assert found.unknown == ["fancy"]
    by_hand = [one.key for one in found.keys if one.outcome.kind == "by hand"]
    assert by_hand == ["rllm.agent.engine_args.a", "rllm.gateway.port"]


def test_its_lake_is_this_packages() -> None:
    lake = {"name": "frozenlake", "env_args": {"size": 8, "p": 0.7, "is_slippery": False, "max_steps": 5}}
    found = translate_rllm({"rllm": {"env": lake}})
    assert found.overrides == {
        "+async_pipeline": True,
        f"+{OWN}.agentic.environment": "frozen_lake",
        f"+{OWN}.agentic.environment_kwargs.size": 8,
        f"+{OWN}.agentic.environment_kwargs.frozen": 0.7,
        f"+{OWN}.agentic.environment_kwargs.slippery": False,
    }
    assert found.keys[-1].outcome.kind == "by hand"
    other = translate_rllm({"rllm": {"env": {"name": "mine:C", "env_args": {"size": 8}}}})
    assert other.overrides == {"+async_pipeline": True, f"+{OWN}.agentic.environment": "mine:C"}
