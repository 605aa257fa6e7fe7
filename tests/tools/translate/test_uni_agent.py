# SPDX-License-Identifier: Apache-2.0
"""uni-agent's runners become agents of this package; its manager is replaced."""

from __future__ import annotations

from recipe.async_pipeline.config.paths import OWN
from recipe.async_pipeline.tools.translate.uni_agent import translate_uni_agent


def test_its_keys_and_verls() -> None:
    framework = {
        "agent_runners": {"swe": {"runner_fqn": "m.run", "max_concurrent_sessions": 32}},
        "gateway_count": 2,
    }
    rollout = {
        "custom": {"agent_framework": framework},
        "agent": {"agent_loop_manager_class": "uni_agent.Manager"},
        "n": 4,
    }
    found = translate_uni_agent({"actor_rollout_ref": {"rollout": rollout}})
    assert found.overrides == {
        "+async_pipeline": True,
        f"+{OWN}.agentic.concurrency": 32,
        "actor_rollout_ref.rollout.n": 4,
    }
    kinds = {one.key.rpartition(".")[2]: one.outcome.kind for one in found.keys}
    assert kinds == {
        "runner_fqn": "by hand",
        "max_concurrent_sessions": "set",
        "gateway_count": "by hand",
        "agent_loop_manager_class": "nothing to do",
        "n": "set",
    }


def test_verls_asynchronous_trainer_is_this_packages() -> None:
    v1 = {
        "trainer_mode": "separate_async",
        "separate_async": {"parameter_sync_step": 4, "num_warmup_batches": 4},
        "colocate_async": {"num_warmup_batches": 1},
    }
    found = translate_uni_agent({"trainer": {"use_v1": True, "v1": v1, "nnodes": 1}})
    assert found.overrides == {
        "+async_pipeline": True,
        "+trigger_parameter_sync_step": 4,
        "trainer.nnodes": 1,
    }
    assert found.unknown == found.unsupported == []
    colocated = translate_uni_agent({"trainer": {"v1": {**v1, "trainer_mode": "colocate_async"}}})
    assert colocated.overrides == {"+async_pipeline": True}
