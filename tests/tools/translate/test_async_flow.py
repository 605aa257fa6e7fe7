# SPDX-License-Identifier: Apache-2.0
"""AsyncFlow's staleness and its devices of each stage."""

from __future__ import annotations

from typing import Any

from recipe.async_pipeline.config.paths import OWN
from recipe.async_pipeline.tools.translate.async_flow import translate_async_flow

ROLLOUT = "actor_rollout_ref.rollout"


def document(kl: bool = True, train: int = 4, **more: Any) -> dict[str, Any]:
    role = {"nnodes": 1, "n_gpus_per_node": 2}
    return {
        "actor_rollout_ref": {"actor": {"use_kl_loss": kl}},
        "trainer": {"nnodes": 1, "n_gpus_per_node": 8},
        "async_resources": {
            "actor_fwd": role,
            "ref_fwd": role,
            "actor_train": role | {"n_gpus_per_node": train},
            "advantage": {"num_cpus": 4},
        },
        **more,
    }


def test_each_stage_has_its_devices() -> None:
    found = translate_async_flow(document())
    pools = found.overrides[f"+{OWN}.pools"]
    assert {name: pool["devices"] for name, pool in pools.items()} == {
        "train": 4,
        "logp": 2,
        "ref_logp": 2,
        "generate": 8,
    }
    assert (found.overrides["trainer.nnodes"], found.overrides["trainer.n_gpus_per_node"]) == (1, 8)
    assert found.overrides[f"{ROLLOUT}.nnodes"] == 1 and found.overrides[f"{ROLLOUT}.n_gpus_per_node"] == 8
    assert found.unknown == found.unsupported == []


def test_a_run_without_a_kl_term_has_no_reference() -> None:
    found = translate_async_flow(document(kl=False))
    assert list(found.overrides[f"+{OWN}.pools"]) == ["train", "logp", "generate"]
    assert found.overrides["trainer.n_gpus_per_node"] == 6


def test_log_probs_apart_need_fsdp2() -> None:
    found = translate_async_flow({"actor_rollout_ref": {"actor": {"strategy": "fsdp"}}})
    paths = [f"actor_rollout_ref.{worker}.strategy" for worker in ("actor", "ref")]
    assert [found.overrides[path] for path in paths] == ["fsdp2", "fsdp2"]


def test_devices_that_fill_no_nodes_are_named() -> None:
    found = translate_async_flow(document(train=5))
    text = next(one.outcome.text for one in found.keys if one.key in found.unsupported)
    assert "must fill 2 nodes evenly, got 9 devices" in text
    assert translate_async_flow(document(train=-1)).unsupported


def test_staleness_and_requests_in_flight() -> None:
    section = {"staleness": 2, "wait_for_inflight_requests": False, "experience_topic": "e"}
    found = translate_async_flow({"async_flow": section})
    assert found.overrides == {
        "+async_pipeline": True,
        f"+{OWN}.staleness.max_lag": 2,
        f"+{OWN}.weight_sync.in_flight_policy": "keep",
    }
    assert found.unknown == []


def test_a_part_of_a_batch_is_no_staleness() -> None:
    found = translate_async_flow(document(async_flow={"staleness": 2.5}))
    assert f"+{OWN}.staleness.max_lag" not in found.overrides
    (said,) = (one.outcome for one in found.keys if one.key == "async_flow.staleness")
    assert said.kind == "by hand" and "whole number" in said.text
