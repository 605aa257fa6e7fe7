# SPDX-License-Identifier: Apache-2.0
"""SGLang's arguments on a CPU can be replaced, and its cache fits what may be open."""

from __future__ import annotations

import os

import pytest

from recipe.async_pipeline.verl_bridge.rollout.sglang.arguments import (
    CPU_ARGUMENTS,
    DUE_FIRST,
    all_cores,
    cpu_arguments,
    run_arguments,
)


def test_what_is_configured_counts() -> None:
    made = cpu_arguments({"attention_backend": "intel_amx", "page_size": 4}, requests=8, tokens=64)
    assert made == {
        **CPU_ARGUMENTS,
        "attention_backend": "intel_amx",
        "page_size": 4,
        "max_total_tokens": 512,
    }
    assert cpu_arguments({"max_total_tokens": 9}, 8, 64)["max_total_tokens"] == 9


def test_a_run_has_room_for_one_adapter_besides_none() -> None:
    given = {"page_size": 4}
    assert run_arguments(given, 8, 64, on_cpu=False) == {"max_loras_per_batch": 2, **DUE_FIRST, **given}
    other = {"schedule_policy": "lpm"}
    assert run_arguments(other, 8, 64, on_cpu=False) == {"max_loras_per_batch": 2} | other
    assert run_arguments({"max_loras_per_batch": 9}, 8, 64, on_cpu=True) == {
        **CPU_ARGUMENTS,
        **DUE_FIRST,
        "max_loras_per_batch": 9,
        "max_total_tokens": 512,
    }


def test_all_ranks_share_the_cores_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {9, 2, 3})
    assert all_cores(1) == "2,3,9"
    assert all_cores(2) == "2,3,9|2,3,9", "as many parts as ranks, or SGLang does not start"
