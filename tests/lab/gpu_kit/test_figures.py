# SPDX-License-Identifier: Apache-2.0
"""The figures of each step, from what the steps write."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.lab.gpu_kit import figures
from recipe.async_pipeline.lab.gpu_kit.steps import Figures


def values(found: Figures) -> dict[str, Any]:
    return {one.name: one.value for one in found}


def test_two_findings_with_one_subject_are_two_figures() -> None:
    rows = [
        {"subject": "port", "verdict": "ok", "detail": "6379 is free", "remedy": ""},
        {"subject": "port", "verdict": "warn", "detail": "8265 is in use", "remedy": "run `ray stop`"},
    ]
    found = figures.of_environment(rows)
    assert [(one.name, one.value, one.meaning) for one in found] == [
        ("port", "ok: 6379 is free", ""),
        ("port", "warn: 8265 is in use", "run `ray stop`"),
    ]


@pytest.mark.parametrize("device", ["a GPU", "cpu"])
def test_copies_are_compared_with_a_plain_copy_in_the_same_direction(device: str) -> None:
    row = {
        "gather_gb_s": {"median": 20.0},
        "stage_gb_s": {"median": 40.0},
        "commit_s": {"median": 0.00212345},
    }
    limits = {"to_host_gb_s": 40.0, "to_device_gb_s": 50.0}
    found = figures.of_copies({"device": device, "limits": limits, "sizes": {"1": row}})
    shown = values(found)
    assert shown["gather / device to host"] == 0.5 and shown["stage / host to device"] == 0.8
    assert shown["commit, ms"] == pytest.approx(2.12345), "not rounded"
    assert any("above 1" in one.meaning for one in found) is (device == "cpu")
    assert all(one.meaning for one in found if isinstance(one.value, float))


def test_every_figure_of_the_delivery_is_defined() -> None:
    written = dict.fromkeys(figures.DELIVERED, 1)
    assert [one.name for one in figures.of_delivery(written)] == list(written)
    assert all(one.meaning for one in figures.of_delivery(written))


def test_a_job_shows_what_its_summary_has() -> None:
    assert values(figures.of_job({"steps": 20, "other": 1})) == {"steps": 20}


def test_the_ladder_shows_its_tolerance_and_differences() -> None:
    found = figures.of_ladder({"tolerance": 1e-5, "differences": {"actor/pg_loss": 7.4e-8}})
    assert values(found) == {"tolerance": 1e-5, "actor/pg_loss": 7.4e-8}


def test_weight_updates_show_the_stalls_of_each_way() -> None:
    ways = {
        "dual_buffer": {"trainer_stall_s": {"median": 0.001}, "publication_s": {"median": 0.2}},
        "verls": {"trainer_stall_s": {"median": 0.5}},
        "ratio": 500.0,
    }
    assert values(figures.of_weight_updates({"replicas": {"1": ways}})) == {
        "dual_buffer, trainer_stall ms": 1.0,
        "dual_buffer, publication ms": 200.0,
        "verls, trainer_stall ms": 500.0,
    }


def test_the_engine_shows_its_path_with_each_model() -> None:
    of_model = {
        "model runner": "V2 (a.Class)",
        "attention": "FLASH_ATTN",
        "load_s": 0.1,
        "wrong": ["one", "two"],
    }
    found = figures.of_engine({"engine": "vllm", "ranks": 2, "models": {"qwen3": of_model, "experts": {}}})
    assert values(found) == {
        "engine": "vllm",
        "ranks": 2,
        "qwen3, model runner": "V2 (a.Class)",
        "qwen3, attention": "FLASH_ATTN",
        "qwen3, load_s": 0.1,
        "qwen3, wrong": 2,
    }
    assert all(one.meaning for one in found[1:])
