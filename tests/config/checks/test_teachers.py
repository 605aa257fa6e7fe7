# SPDX-License-Identifier: Apache-2.0
"""What a distillation with several teachers must say; `refusals.txt` has the cases with one."""

from __future__ import annotations

import re
from typing import Any

import pytest

from recipe.async_pipeline.config.checks.teachers import (
    LOSSES,
    VERLS_TENSOR_SIZE,
    check_teachers,
    servers_of,
    teachers_of,
)
from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.installed.verl import find_verl_root


def config(**teachers: dict[str, Any]) -> dict[str, Any]:
    """Return a config with these teachers, and verl's entry of a single one."""
    inference = {"name": "vllm", "tensor_model_parallel_size": 2}
    each = {
        name: {"model_path": "m", "num_replicas": 1, "inference": inference} | one
        for name, one in {"teacher_model": {}, **teachers}.items()
    }
    loss = {"loss_mode": "k3", "policy_loss_mode": "vanilla", "use_policy_gradient": False}
    return {
        "data": {"max_prompt_length": 8, "max_response_length": 4},
        "distillation": {
            "enabled": True,
            "nnodes": 1,
            "n_gpus_per_node": 4,
            "teacher_key": "data_source",
            "distillation_loss": loss,
            "teacher_models": each,
        },
    }


def test_verls_entry_of_a_single_teacher_is_left_out_if_there_are_others() -> None:
    assert list(teachers_of(config())) == ["teacher_model"]
    assert list(teachers_of(config(a={"key": "x"}, b={"key": "y"}))) == ["a", "b"]
    off = config()
    off["distillation"]["enabled"] = False
    assert not teachers_of(off)
    check_teachers(off)


@pytest.mark.parametrize(
    ("teachers", "words"),
    [
        (
            {"a": {"key": "x"}, "b": {}},
            "distillation.teacher_models.b.key must name the value of the data's data_source that this "
            "teacher is for, and no other has, got None; set it",
        ),
        (
            {"a": {"key": "x"}, "b": {"key": "x"}},
            "distillation.teacher_models.a.key must name .*got 'x'; set it\n.*teacher_models.b.key must name",
        ),
        (
            {"a": {"key": "x"}, "b": {"key": "y", "inference": {}}},
            "distillation.teacher_models.b.inference.name must be vllm or sglang, got None; set it",
        ),
        (
            {"a": {"key": "x"}, "b": {"key": "y", "num_replicas": 2}},
            "must be the 6 devices of all replicas of teachers .a 1 x 2, b 2 x 2., got 4; change it, or",
        ),
    ],
)
def test_several_teachers_share_the_devices_and_the_data(teachers: dict[str, Any], words: str) -> None:
    check_teachers(config(a={"key": "x"}, b={"key": "y"}))
    with pytest.raises(ConfigError) as refused:
        check_teachers(config(**teachers))
    assert re.search(words, "\n".join(refused.value.problems), re.DOTALL)


def test_teachers_that_other_servers_serve_take_no_devices() -> None:
    there = "https://teachers:8000/v1"
    one, two = {"key": "x", "model_path": there}, {"key": "y", "model_path": there}
    served = config(a={**one, "num_replicas": 0}, b={**two, "num_replicas": 0})
    with pytest.raises(ConfigError, match="distillation.nnodes must be 0 with teachers that other servers"):
        check_teachers(served)
    served["distillation"]["nnodes"] = 0
    check_teachers(served)
    assert servers_of(served) == {"a": there, "b": there}
    served["distillation"]["teacher_models"]["b"]["model_path"] = "folder"
    with pytest.raises(ConfigError, match="all by other servers, got 1 by this run and 1 by others; serve b"):
        check_teachers(served)


def test_the_losses_and_the_defaults_of_a_further_teacher_are_verls() -> None:
    verl = find_verl_root() / "verl"
    settings = (verl / "workers" / "config" / "rollout.py").read_text("utf-8")
    assert f"tensor_model_parallel_size: int = {VERLS_TENSOR_SIZE}\n" in settings
    assert 'load_format: str = "dummy"\n' in settings, "a further teacher needs no correction any more"
    source = (verl / "trainer" / "distillation" / "losses.py").read_text("utf-8")
    lists = re.findall(r"names=(\[[^]]*\])", source)
    assert sorted(name for one in lists for name in re.findall(r'"(\w+)"', one)) == sorted(LOSSES)
