# SPDX-License-Identifier: Apache-2.0
"""The figures of a plan and its text."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from recipe.async_pipeline.config.knobs.schema import AsyncPipelineConfig
from recipe.async_pipeline.config.placement import Placement, Pool, placement_of
from recipe.async_pipeline.tools.explain.run_plan import Plan, as_json, describe_plan, drawing, plan_of

pytestmark = pytest.mark.real_engine


def config(model: Path, **rollout: Any) -> dict[str, Any]:
    return {
        "data": {"train_batch_size": 16},
        "trainer": {"nnodes": 1, "n_gpus_per_node": 2},
        "actor_rollout_ref": {
            "model": {"path": str(model)},
            "actor": {"ppo_mini_batch_size": 8, "strategy": "fsdp2"},
            "rollout": {
                "name": "vllm",
                "n": 8,
                "nnodes": 2,
                "n_gpus_per_node": 4,
                "tensor_model_parallel_size": 2,
                "max_num_seqs": 32,
                "data_parallel_size": 1,
                "agent": {"num_workers": 8},
                "dtype": "bfloat16",
                **rollout,
            },
        },
    }


def planned(config: dict[str, Any], knobs: AsyncPipelineConfig) -> Plan:
    roles = ("train", "logp", "ref_logp", "generate")
    return plan_of(config, knobs, placement_of(config, None, roles), "trainer")


def text_of(config: dict[str, Any], changes: dict[str, Any] | None = None) -> str:
    return "\n".join(describe_plan(planned(config, knobs(changes))))


def knobs(changes: dict[str, Any] | None = None) -> AsyncPipelineConfig:
    return AsyncPipelineConfig.of({"strategy": "fully_async", "staleness.max_lag": 2, **(changes or {})})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_file(
        {"a": torch.zeros(1000, 500), "scalar": torch.zeros(())},
        tmp_path / "model-00001-of-00002.safetensors",
    )
    save_file({"b": torch.zeros(499_999)}, tmp_path / "model-00002-of-00002.safetensors")
    return tmp_path


def test_numbers(model: Path) -> None:
    plan = planned(config(model), knobs({"staleness.oldest_share": 0.25}))
    assert (plan.placement.devices, plan.replicas) == (10, 4)
    assert (plan.groups_at_once, plan.responses_at_once, plan.engine_slots) == (36, 288, 128)
    assert planned(config(model), knobs({"staleness.depth": 1})).groups_at_once == 32
    assert (plan.mini_batches_per_step, plan.responses_per_mini_batch_and_rank) == (2, 32)
    assert (plan.parameters, plan.arena_bytes, plan.spare_bytes) == (10**6, 4 * 10**6, 0)


def test_a_standby_copy_costs_its_share_of_the_weights_on_each_device(model: Path) -> None:
    assert (
        planned(config(model, dtype="float32"), knobs({"weight_sync.load_staging": "device"})).spare_bytes
        == 2 * 10**6
    )
    fp8 = config(model, quantization="fp8")
    on_devices = knobs({"weight_sync.load_staging": "device"})
    assert planned(fp8, on_devices).spare_bytes == 10**6, "a byte per parameter, on each rank"


def test_a_lag_that_follows_the_effective_sample_size_is_named(model: Path) -> None:
    assert "less while a step's effective sample size is below 70% of its size" in text_of(
        config(model), {"staleness.ess_floor": 0.7}
    )
    assert "effective" not in text_of(config(model))


def test_a_share_of_less_than_one_group_is_reported(model: Path) -> None:
    text = text_of(config(model), {"staleness.oldest_share": 0.01})
    assert "but none of a step's 16 groups has lag 2, because oldest_share is less than one group" in text


def test_a_plan_in_words(model: Path) -> None:
    text = text_of(
        config(model),
        {"staleness.oldest_share": 0.25, "staleness.straggler": "drop", "weight_sync.every": 2},
    )
    for part in (
        "fully_async: each step trains groups in the order they finish",
        "at most 2: step s starts from version s-1 and trains responses of version s-3 or newer",
        "at most 4 of a step's 16 groups have lag 2",
        "holds up a step is given up",
        "updated every 2 steps; requests in flight during an update: keep",
        "staged in host memory; an engine copies them between two of its steps\n",
        "old log-probs   step s uses version s-1",
        "devices         device    0        9",
        "ref_logp  ##",
        "generate    ########",
        "4 replicas of 2 devices",
        "16 prompts x 8 responses = 128 samples in 2 mini-batches; 32 per mini-batch and training rank",
        "at most 36 groups = 288 responses, for 128 engine slots; the others wait, up to 64 open requests "
        "on a replica in its queue, more in the workers",
        "host memory     4.0 MB",
    ):
        assert part in text
    assert "device memory" not in text


LAYERS = {"embed_tokens.weight": (500, 100), "q_proj.weight": (300, 100), "norm.weight": (100,)}


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    save_file({name: torch.zeros(shape) for name, shape in LAYERS.items()}, tmp_path / "model.safetensors")
    return tmp_path


def test_the_engine_and_its_devices_are_named(model: Path) -> None:
    text = text_of(config(model, name="sglang"))
    assert "\ntraining        FSDP2, weights sharded over 2 devices\n" in text
    assert "\nengine          SGLang, tensor parallelism over 2 devices\n" in text
    text = text_of(config(model, tensor_model_parallel_size=1))
    assert "\nengine          vLLM, one device for each replica\n" in text
    text = text_of(config(model, tensor_model_parallel_size=8))
    assert "\nengine          vLLM, tensor parallelism over 8 devices of 2 nodes\n" in text
    installed = dataclasses.replace(planned(config(model), knobs()), engine_version="0.28.0")
    assert "\nengine          vLLM 0.28.0, tensor" in "\n".join(describe_plan(installed))
    assert "adapters" not in text


def test_adapters_that_are_published_alone_take_little_memory(layers: Path) -> None:
    with_adapters = config(layers)
    with_adapters["actor_rollout_ref"]["model"] |= {"lora_rank": 5, "target_modules": "all-linear"}
    plan = planned(with_adapters, knobs({"weight_sync.load_staging": "device"}))
    assert (plan.parameters, plan.published_parameters) == (80_100, 5 * (300 + 100))
    assert (plan.arena_bytes, plan.spare_bytes) == (2 * 2 * 2000, 0), "engines of text stage no adapters"
    text = "\n".join(describe_plan(plan))
    assert (
        "adapters        LoRA of rank 5, published alone; the engine reads their base from the model's"
        in text
    )
    assert "staged in host memory" in text
    assert "host memory     8.0 kB for two copies of the adapters on the trainer's node" in text


def test_adapters_of_experts_have_no_known_size(tmp_path: Path) -> None:
    save_file({"mlp.experts.0.up_proj.weight": torch.zeros(8, 4)}, tmp_path / "model.safetensors")
    of_experts = config(tmp_path)
    of_experts["actor_rollout_ref"]["model"] |= {"lora_rank": 5, "target_modules": "all-linear"}
    line = "host memory     (unknown: adapters of a mixture of experts are not counted) for two copies"
    assert line in text_of(of_experts)


def test_merged_adapters_are_published_as_whole_weights(layers: Path) -> None:
    merged = config(layers)
    merged["actor_rollout_ref"]["model"] |= {"lora_rank": 5, "lora": {"merge": True}}
    plan = planned(merged, knobs())
    assert plan.arena_bytes == 2 * 2 * 80_100
    text = "\n".join(describe_plan(plan))
    assert "adapters        LoRA of rank 5, merged, and whole weights are published\n" in text
    assert "for two copies of the weights" in text
    assert {"engine": "vllm", "adapter_rank": 5, "adapters_alone": False}.items() <= as_json(plan).items()


def test_episodes_are_described(model: Path) -> None:
    with_lake = planned(config(model), knobs({"agentic.environment": "frozen_lake", "agentic.max_turns": 8}))
    text = "\n".join(describe_plan(with_lake))
    assert (
        "episodes        environment frozen_lake(), isolation process\n                at most 8 turns"
        in text
    )
    assert as_json(with_lake)["episodes"] == with_lake.episodes != []
    assert "episodes" not in text_of(config(model))


def test_weights_on_devices_and_as_differences(model: Path) -> None:
    text = text_of(config(model), {"weight_sync.load_staging": "device", "weight_sync.delta": True})
    assert "staged on the devices during generation" in text
    assert "; other hosts get differences where they are smaller\n" in text


def test_defaults_are_not_printed(model: Path) -> None:
    text = text_of(config(model, max_num_seqs=1000), {"strategy": "one_step_off", "staleness.max_lag": 1})
    assert "in the order they were drawn" in text
    assert "updated every step" in text
    for part in ("of a step has lag", "given up", "queues"):
        assert part not in text


def test_a_model_on_another_machine_has_no_size(tmp_path: Path) -> None:
    text = text_of(config(tmp_path / "nowhere"), {"weight_sync.load_staging": "device"})
    assert text.count("(unknown: the model is not on this machine)") == 2


def test_json_has_every_number(model: Path) -> None:
    data = json.loads(json.dumps(as_json(planned(config(model), knobs()))))
    assert data["groups_at_once"] == 48
    assert {"strategy", "max_lag", "order", "engine", "training", "loss", "validation"} < data.keys()
    assert not {"config", "knobs"} & data.keys()
    assert data["placement"][1] == {"name": "generate", "roles": ["generate"], "per_node": [4, 4]}


def test_a_reward_model_has_additional_devices(model: Path) -> None:
    without = planned(config(model), knobs())
    assert without.reward_model_devices == 0 and "reward model" not in text_of(config(model))
    scored = config(model) | {"reward": {"reward_model": {"enable": True, "nnodes": 2, "n_gpus_per_node": 4}}}
    assert "and 8 more for the reward model, which scores during generation\n" in text_of(scored)


@pytest.mark.parametrize(
    ("freq", "first", "how", "line"),
    [
        (-1, False, "parallel", "never"),
        (5, False, "parallel", "every 5 steps; in parallel with training"),
        (1, True, "pause", "before the first step and after every step; prompts for training wait meanwhile"),
        (None, None, "parallel", "before the first step; in parallel with training"),
    ],
)
def test_the_plan_has_validation_and_custom_stages(
    model: Path, freq: int | None, first: bool | None, how: str, line: str
) -> None:
    verl = config(model)
    verl["trainer"] |= {"test_freq": freq, "val_before_train": first}
    stage = "my_module:Audit@reward->train"
    lines = describe_plan(planned(verl, knobs({"validation": how, "custom_stages": [stage]})))
    assert f"validation      {line}" in lines
    assert f"custom stages   {stage}" in lines
    assert not any(text.startswith("custom stages") for text in describe_plan(planned(verl, knobs())))


def test_redundant_responses_are_in_flight_and_named(model: Path) -> None:
    plain, plan = (planned(config(model), knobs({"agentic.redundancy": n})) for n in (0, 2))
    size = plan.responses_per_group
    assert plan.responses_at_once == plain.responses_at_once // size * (size + 2)
    line = f"redundancy      {size + 2} responses are begun for each group; the first {size} to finish"
    assert any(one.startswith(line) for one in describe_plan(plan))
    assert not any(one.startswith("redundancy") for one in describe_plan(plain))


def test_the_sample_store_is_planned(model: Path) -> None:
    backend = {"storage_backend": "SimpleStorage", "SimpleStorage": {"total_storage_size": 100_000}}
    whole = config(model) | {"transfer_queue": {"backend": backend}}
    whole["data"] |= {"max_prompt_length": 512, "max_response_length": 512}
    plan = planned(whole, knobs())
    assert as_json(plan)["store"]["rows"] == plan.store.rows == (2 + 1 + 2) * 16 * 8
    (line,) = [line for line in describe_plan(plan) if line.startswith("sample store")]
    assert line == (
        "sample store    at most 640 rows of 100000; 65.5 MB of host memory if all have their full length"
    )


def test_the_drawing_has_a_mark_for_each_device() -> None:
    pools = (
        Pool("a", ("train", "logp"), (2,)),
        Pool("b", ("ref_logp",), (1,)),
        Pool("c", ("generate",), (1,)),
    )
    assert drawing(Placement(pools)) == [
        "device    0  3",
        "train     ##",
        "logp      ##",
        "ref_logp    #",
        "generate     #",
    ]


@given(st.integers(1, 500), st.integers(1, 5000))
def test_the_drawing_fits_a_line(train: int, generate: int) -> None:
    pools = (Pool("a", ("train", "logp"), (train,)), Pool("b", ("generate",), (generate,)))
    assert all(len(line) < 120 for line in drawing(Placement(pools)))
