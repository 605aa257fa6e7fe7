# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline explain` on the shipped smoke configuration, with the checks that a run makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipe.async_pipeline.cli.main import main
from tests import REPOSITORY
from tests.conftest import Load

pytestmark = pytest.mark.real_engine

SMOKE = ["explain", "--config-path", str(REPOSITORY / "configs"), "--config-name", "smoke_cpu"]


@pytest.fixture(autouse=True)
def stack(load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load("recipe.async_pipeline.verl_bridge.launch")
    monkeypatch.setenv("ASYNC_PIPELINE_TASK", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def test_the_plan_is_printed_as_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*SMOKE, "+async_pipeline=True", "async_generation_ratio=1.5"]) == 2
    assert "write +async_generation_ratio=... to add it" in capsys.readouterr().err
    assert main([*SMOKE, "+async_pipeline=True", "+async_generation_ratio=1.5"]) == 0
    out = capsys.readouterr().out
    assert "async_generation_ratio=1.5 -> staleness.max_lag=2, staleness.oldest_share=0.5" in out
    assert "strategy        n_step_ahead" in out
    assert "at most 40 groups = 320 responses" in out
    assert (
        "loss            vanilla (pg_variant ppo): "
        "ratio of the current policy to version s-1; one update per step" in out
    )
    assert (
        "correction      weight of a token: "
        "ratio of version s-1 to the versions that generated it, at most 2.0" in out
    )
    assert list(tmp_path.iterdir()) == [], "explain creates no files"
    assert main([*SMOKE, "+async_generation_ratio=1.5", "data.train_batch_size=20"]) == 0, (
        "asking is switch enough"
    )
    assert (
        "160 samples in 2 mini-batches; 128 per mini-batch and training rank; the last is padded with 96 "
        "empty samples" in capsys.readouterr().out
    )


def test_the_readmes_command_on_verls_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    more = [
        "+async_strategy=one_step_off",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=4",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=4",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "algorithm.adv_estimator=grpo",
    ]
    assert main(["explain", "+async_pipeline=True", *more]) == 2
    error = capsys.readouterr().err
    assert (
        "rollout.log_prob_micro_batch_size_per_gpu must be >= 1, got None; set it to a divisor of 256"
        in error
    )
    more.append("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8")
    assert main(["explain", "+async_pipeline=True", *more]) == 0
    assert "one_step_off" in capsys.readouterr().out
    layout = [
        "+trainer.use_nodes_ratios=[0.5,0.5,0.5,0.5]",
        "trainer.n_gpus_per_node=8",
        "actor_rollout_ref.rollout.nnodes=0",
    ]
    assert main(["explain", "+async_pipeline=True", *more[1:3], *more[6:], *layout]) == 0
    assert "generate      ####" in capsys.readouterr().out


def test_the_layout_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    layout = [
        "+trainer.use_nodes_ratios=[0.25,0.25,0.25,0.25]",
        "trainer.n_gpus_per_node=7",
        "ray_kwargs.ray_init.num_gpus=8",
    ]
    assert main([*SMOKE, "+async_pipeline=True", "actor_rollout_ref.actor.use_kl_loss=true", *layout]) == 0
    out = capsys.readouterr().out
    assert "-> pools train 0.25, logp 0.25, ref_logp 0.25, generate 0.25" in out
    for line in (
        "device    0      7",
        "train     ##\n",
        "logp        ##\n",
        "ref_logp      ##\n",
        "generate        ##\n",
    ):
        assert f"  {line}" in out
    assert "version s-2" in out


def test_the_plan_is_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["async_strategy=fully_async", "+require_batches=2"]
    assert main([*SMOKE, "--json", "+async_pipeline=True", *more]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["groups_per_step"], plan["mini_batches_per_step"]) == (32, 2)
    assert (plan["strategy"], plan["max_lag"]) == ("fully_async", 3)
    assert plan["notes"] == [
        "async_strategy=fully_async -> strategy=fully_async",
        "require_batches=2 -> data.train_batch_size of 2 x actor_rollout_ref.actor.ppo_mini_batch_size",
        "data.train_batch_size is set to 32",
    ]


def test_changed_defaults_of_verl_are_notes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    share = "actor_rollout_ref.rollout.gpu_memory_utilization"
    experts = tmp_path / "model" / "config.json"
    experts.parent.mkdir()
    experts.write_text('{"num_experts": 8}', encoding="utf-8")
    for written, expected in (
        ([], ["actor_rollout_ref.rollout.engine_kwargs.vllm.moe_backend=triton", f"{share}=0.85"]),
        ([f"{share}=0.5"], ["actor_rollout_ref.rollout.engine_kwargs.vllm.moe_backend=triton"]),
    ):
        assert main([*SMOKE, "--json", "trainer.device=cuda", *written]) == 0
        notes = json.loads(capsys.readouterr().out)["notes"]
        assert [note.partition(":")[0].partition(" instead")[0] for note in notes] == expected


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["+async_pipeline=False"], "the pipeline is switched off; remove the override"),
        (
            ["data.train_batch_size=15"],
            "ppo_mini_batch_size must be at most data.train_batch_size=15, got 16; set it to 15",
        ),
        (["+async_pipeline=True", "trainer.val_only=True"], "trainer.val_only must be False"),
        (
            ["+async_pipeline=True", "trainer.v1.async_pipeline.weight_sync.every=5"],
            "weight_sync.every must be at most 2",
        ),
        (["async_strategy=os:path"], "strategy: strategy os:path must be a class, got module; name a class"),
        (
            ["async_strategy=recipe.async_pipeline:RoleStateMachine"],
            "must subclass recipe.async_pipeline.strategies.Schedule, got a class without a schedule",
        ),
        (
            ["+data.train_batch_size=8"],
            "+data.train_batch_size must not have a +, because this config has the",
        ),
        (
            ["trainer.v1.async_pipeline.custom_stages=[a:B@reward->train]"],
            "[a:B@reward->train] cannot be parsed; put values with special characters into double quotes",
        ),
        (["=3"], "Config group override must be a string or a list. Got int"),
        (["+async_pipeline=True", "nothing=1"], "nothing is not a key of this config"),
        (
            ["+async_pipeline=True", "trainer.v1.async_pipeline.max_lagg=2"],
            "nearest knobs: staleness.max_lag, ",
        ),
    ],
)
def test_settings_that_a_run_would_refuse_are_refused(
    overrides: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMOKE, *overrides]) == 2
    assert complaint in capsys.readouterr().err


def test_a_missing_config_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--config-path", "nowhere", "+async_pipeline=True"]) == 2
    assert "--config-path must be a directory" in capsys.readouterr().err
