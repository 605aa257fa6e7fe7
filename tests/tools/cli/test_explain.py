# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline explain` on the shipped smoke configuration, with the checks that a run makes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.async_pipeline.cli.main import main
from recipe.async_pipeline.config.paths import OWN
from recipe.async_pipeline.installed.engines import EngineTree
from recipe.async_pipeline.lab.tasks.tokenizer import make_tokenizer
from recipe.async_pipeline.verl_bridge.launch import engine_contract
from tests import REPOSITORY
from tests.conftest import Load
from tests.fakes.engine_differences import GONE, compare_as

pytestmark = pytest.mark.real_engine

SMOKE = ["explain", "--config-path", str(REPOSITORY / "configs"), "--config-name", "smoke_cpu"]


@pytest.fixture(autouse=True)
def stack(load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load("recipe.async_pipeline.verl_bridge.launch.prepare")
    monkeypatch.setenv("ASYNC_PIPELINE_TASK", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def test_the_plan_is_printed_as_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*SMOKE, "+async_pipeline=True", "async_generation_ratio=1.5"]) == 2
    assert "write +async_generation_ratio=..." in capsys.readouterr().err
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
    checked = [note for note in plan["notes"] if not note.startswith("not checked: ")]
    assert checked == [
        "async_strategy=fully_async -> strategy=fully_async",
        "require_batches=2 -> data.train_batch_size of 2 x actor_rollout_ref.actor.ppo_mini_batch_size",
        "data.train_batch_size is set to 32",
    ]


def test_a_key_whose_condition_is_not_met_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    library = "actor_rollout_ref.model.external_lib=json"  # its estimators may read the key
    note = "algorithm.gamma has no effect without algorithm.adv_estimator=gae or "
    clip, micro, threshold = (
        "actor_rollout_ref.actor.clip_ratio",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "algorithm.rollout_correction.rollout_is_threshold",
    )
    for given, begins in (
        ([f"{clip}=0.3"], f"{clip} has no effect without {clip}_low=null or clip_ratio_high=null"),
        ([f"{micro}=1", "actor_rollout_ref.actor.use_dynamic_bsz=True"], f"{micro} has no effect without "),
        (
            [f"{threshold}=3", "algorithm.rollout_correction.rollout_is=null"],
            f"{threshold} has no effect without algorithm.rollout_correction.rollout_is",
        ),
    ):
        assert main([*SMOKE, "--json", *given]) == 0
        assert any(one.startswith(begins) for one in json.loads(capsys.readouterr().out)["notes"]), given
    for more, noted in (([], True), (["algorithm.adv_estimator=gae"], False), ([library], False)):
        assert main([*SMOKE, "--json", "algorithm.gamma=0.9", *more]) == 0
        assert any(one.startswith(note) for one in json.loads(capsys.readouterr().out)["notes"]) == noted


def test_changed_defaults_of_verl_are_notes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    share = "actor_rollout_ref.rollout.gpu_memory_utilization"
    experts = tmp_path / "model" / "config.json"
    make_tokenizer().save_pretrained(experts.parent)
    experts.write_text('{"num_experts": 8}', encoding="utf-8")
    for written, expected in (
        ([], ["actor_rollout_ref.rollout.engine_kwargs.vllm.moe_backend=triton", f"{share}=0.85"]),
        ([f"{share}=0.5"], ["actor_rollout_ref.rollout.engine_kwargs.vllm.moe_backend=triton"]),
    ):
        assert main([*SMOKE, "--json", "trainer.device=cuda", *written]) == 0
        notes = json.loads(capsys.readouterr().out)["notes"]
        found = [note.partition(":")[0].partition(" instead")[0] for note in notes]
        assert [note for note in found if note != "not checked"] == expected


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["+async_pipeline=False"], "the pipeline is switched off; remove the override"),
        (
            ["data.train_batch_size=15"],
            "ppo_mini_batch_size must be at most data.train_batch_size=15, got 16; set it to 8",
        ),
        (
            ["async_strategy=recipe.async_pipeline:RoleStateMachine"],
            "must subclass recipe.async_pipeline.strategies.Schedule, got a class without a schedule",
        ),
        (
            ["+trainer.v1.async_pipeline.engine_check=warn"],
            "engine_check must not have a +, because this config has the key",
        ),
        (
            ["trainer.v1.async_pipeline.custom_stages=[a:B@reward->train]"],
            "custom_stages=[a:B@reward->train] cannot be parsed (token recognition error at: '>'); put",
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


def test_a_command_line_of_older_verl_is_planned_with_notes(capsys: pytest.CaptureFixture[str]) -> None:
    older = [
        "custom_reward_function.path=elsewhere/reward.py",
        "trainer.v1.sampler.max_off_policy_threshold=3",
        "actor_rollout_ref.actor.megatron.grad_offload=True",
    ]
    assert main([*SMOKE, *older]) == 0
    out = capsys.readouterr().out
    assert "custom_reward_function.path=elsewhere/reward.py -> reward.custom_reward_function.path=" in out
    assert "not checked: reward.custom_reward_function.path=elsewhere/reward.py, which is not on" in out
    assert "-> trainer.v1.async_pipeline.staleness.max_lag=2: a response of N versions has a lag of" in out
    assert "ignored: actor_rollout_ref.actor.megatron.grad_offload=True, because gradients move" in out


@pytest.mark.parametrize(
    ("sampling", "name"),
    [(["actor_rollout_ref.rollout.top_p=0.9"], "top_p"), (["actor_rollout_ref.rollout.top_k=20"], "top_k")],
)
def test_truncated_sampling_is_refused_where_its_log_probs_count(
    capsys: pytest.CaptureFixture[str], sampling: list[str], name: str
) -> None:
    exact = ["async_strategy=on_policy", "algorithm.rollout_correction.rollout_is=null"]
    assert main([*SMOKE, *exact, *sampling]) == 0
    for counts in (
        ["async_strategy=one_step_off"],
        [*exact, "algorithm.rollout_correction.rollout_rs=token_k1"],
    ):
        assert main([*SMOKE, *counts, *sampling]) == 2
        assert f"actor_rollout_ref.rollout.{name} must be" in capsys.readouterr().err


def test_all_problems_are_listed_in_one_call(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["data.nothing=1", "trainer.total_training_stesp=2", "trainer.val_only=True"]
    wrong += ["actor_rollout_ref.model.lora.rank=8"]
    others = ["data.train_files=elsewhere.parquet", "reward_model.reward_manager=dapo"]
    assert main([*SMOKE, *wrong, "data.seed=1", *others]) == 2
    before, colon, problems = capsys.readouterr().err.partition(" problems:")
    *notes, first = (before + colon).splitlines()
    listed = problems.splitlines()[1:]
    assert notes[0] == "reward_model.reward_manager=dapo -> reward.reward_manager.name=dapo"
    assert any(note.startswith("not checked: ") and "elsewhere.parquet" in note for note in notes)
    assert first == "async-pipeline explain: 4 problems:"
    assert listed[0].startswith("  1. data.nothing is not a key of this config")
    assert "did you mean 'total_training_steps'?" in listed[1]
    assert listed[2].startswith("  3. trainer.val_only must be False")
    assert listed[3].startswith("  4. actor_rollout_ref.model.lora.rank must be 0 or")


@pytest.mark.parametrize("wrong", ["data.nothing=1", "trainer.val_only=True"])
def test_warnings_about_the_machine_come_after_the_problems(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setenv("TMPDIR", "/tmp/" + "x" * 95)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    assert main([*SMOKE, wrong]) == 2
    problem, warning = capsys.readouterr().err.partition("async-pipeline explain: ")[2].splitlines()
    assert problem.startswith(wrong.partition("=")[0])
    assert warning.startswith("WARNING: on this machine TMPDIR must have at most 39 bytes, got 100: ")


def test_verls_own_trainer_is_not_planned_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMOKE, "trainer.v1.trainer_mode=separate_async"]) == 0
    assert capsys.readouterr().out.startswith(
        "+async_pipeline=True is assumed; without it, verl's separate_async runs\n"
    )


def test_problems_of_other_entry_points_and_of_old_keys_are_listed_with_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    section = ["rollout.nnodes=1", "rollout.n_gpus_per_node=4", "+rollout.fancy=1", "+async_training.old=2"]
    section += ["async_training.use_dynamic_resource_scheduling=True", "data.train_batch_size=0"]
    old = ["reward_model.reward_manager=dapo", "reward.reward_manager.name=naive"]
    assert main(of_verl(*section, *old, "trainer.val_only=True", "data.nothing=1")) == 2
    listed = capsys.readouterr().err.partition("6 problems:\n")[2].splitlines()
    starts = ["data.nothing is", "async_training.use_dynamic_resource_scheduling must", "rollout.fancy is"]
    starts += ["async_training.old is", "reward_model.reward_manager is an old", "trainer.val_only must"]
    for number, (line, start) in enumerate(zip(listed, starts, strict=True), 1):
        assert line.startswith(f"  {number}. {start}")


def test_a_key_without_a_value_is_no_unknown_key(capsys: pytest.CaptureFixture[str]) -> None:
    """verl's configuration leaves the engine's name to the user."""
    assert main(["explain", "actor_rollout_ref.rollout.name=vllm", "data.nothing=1"]) == 2
    assert "rollout.name" not in capsys.readouterr().err


def test_an_engine_that_a_run_would_refuse_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = EngineTree(name="vllm", folder=Path("nowhere"), version="0.99.0")
    monkeypatch.setattr(engine_contract, "installed", lambda: [other])
    compare_as(monkeypatch, [GONE])
    assert main([*SMOKE, "actor_rollout_ref.rollout.name=vllm"]) == 2
    assert "got 0.99.0: vllm.v1.request:Request.num_output_tokens is missing" in capsys.readouterr().err
    warn = f"{OWN}.engine_check=warn"
    assert main([*SMOKE, "actor_rollout_ref.rollout.name=vllm", warn]) == 0
    assert "vllm 0.99.0: vllm.v1.request:Request.num_output_tokens is missing" in capsys.readouterr().out


def test_a_missing_config_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--config-path", "nowhere", "+async_pipeline=True"]) == 2
    assert "--config-path must be a directory" in capsys.readouterr().err


def of_verl(*more: str) -> list[str]:
    """Return a command line for a configuration of verl."""
    return [
        "explain",
        "data.train_files=train.parquet",
        "data.val_files=val.parquet",
        "actor_rollout_ref.model.path=model",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "algorithm.adv_estimator=grpo",
        "trainer.n_gpus_per_node=4",
        *more,
    ]


def test_command_lines_of_verls_other_entry_points(capsys: pytest.CaptureFixture[str]) -> None:
    pool = ["rollout.nnodes=1", "rollout.n_gpus_per_node=4"]
    more = [
        "data.train_batch_size=0",
        "rollout.total_rollout_steps=640",
        "async_training.staleness_threshold=0.5",
    ]
    assert main(of_verl(*pool, *more)) == 0
    out = capsys.readouterr().out
    assert (
        "python -m verl.experimental.fully_async_policy.fully_async_main, and add +async_pipeline=True" in out
    )
    assert "rollout.total_rollout_steps=640 -> trainer.total_training_steps=20" in out
    assert "strategy        fully_async" in out and "step            32 prompts" in out

    assert main(of_verl(*pool, "data.train_batch_size=64")) == 0
    out = capsys.readouterr().out
    assert "python -m verl.experimental.one_step_off_policy.main_ppo" in out
    assert "strategy        one_step_off" in out

    pool = [f"actor_rollout_ref.{key}" for key in pool]
    more = ["data.train_batch_size=64", "data.gen_batch_size=192"]
    more += ["+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True", "--config-name=dapo_trainer"]
    more += ["reward_model.reward_manager=naive"]
    assert main(of_verl(*pool, *more)) == 0
    out = capsys.readouterr().out
    assert "python -m recipe.dapo.main_dapo" in out and "data.gen_batch_size=192 -> left out" in out
    assert "reward_model.reward_manager=naive -> reward.reward_manager.name=naive" in out


def test_what_a_command_line_lacks_is_named_with_a_remedy_that_helps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = ["data.train_batch_size=64", "actor_rollout_ref.rollout.nnodes=1"]
    others = ["model_engine=nowhere", "actor_rollout_ref.actor.nowhere.size=2", "trainer.val_only=True"]
    assert main(of_verl(*more, *others, "actor@actor_rollout_ref.actor=nowhere_actor")) == 2
    error = capsys.readouterr().err
    assert "4 problems" in error and "3. actor_rollout_ref.actor.nowhere.size is not a key" in error
    assert "4. trainer.val_only must be False" in error
    assert "model_engine must be one of dp, megatron, " in error and "actor must be one of actor, " in error
    assert main(of_verl(*more, "--config-name=nowhere")) == 2
    assert "nowhere is not one of verl's configurations; give its folder" in capsys.readouterr().err
    # A word without a dot may choose a file, and another key that resembles one is set.
    more += ["data.max_prompt_length=64", "data.max_obs_length=8", "max_turns=2", "trainer.val_only=True"]
    more += ["actor_rollout_ref.rollout.agent.activate_agent=1", "hydra.run.dir=."]
    assert main(of_verl(*more)) == 2
    error = capsys.readouterr().err
    assert (
        "agent.activate_agent is not a key of this config, nor of its section's class; leave it out" in error
    )
    assert "4 problems" in error and "1. max_turns is not a key of this config; leave it out" in error
    assert "2. data.max_obs_length is not a key of this config, and no code of verl reads it" in error


def test_a_folder_of_the_user_is_taken_if_it_has_the_configuration(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = "defaults:\n  - ppo_trainer\n  - _self_\nrollout:\n  nnodes: 1\n  n_gpus_per_node: 2\n"
    (tmp_path / "mine.yaml").write_text(text)
    command = of_verl("rollout.n_gpus_per_node=4", "data.train_batch_size=64")
    assert main([*command, "--config-path", str(tmp_path), "--config-name", "mine"]) == 0
    assert "rollout.n_gpus_per_node=4 -> actor_rollout_ref" in capsys.readouterr().out
    # As in a script: relative to verl's entry point.
    assert main([*command, "--config-path=config", "--config-name=one_step_off_ppo_trainer.yaml"]) == 0


def test_scripts_for_fully_async_main_are_taken_with_keys_that_its_configuration_lacks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["explain", "--config-name", "fully_async_ppo_trainer", "actor_rollout_ref.rollout.name=vllm"]
    words = ["rollout.total_epochs=10", "rollout.test_freq=5", "async_training.use_rollout_log_probs=True"]
    sizes = ["rollout.total_rollout_steps=51200", "actor_rollout_ref.actor.use_dynamic_bsz=True"]
    assert main([*command, *words, *sizes]) == 0
    output = capsys.readouterr().out
    assert "ignored: trainer.total_epochs is the number of epochs" in output


def test_a_relative_folder_begins_at_verls_entry_point(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"nnodes": 1, "n_gpus_per_node": 2}
    devices = [f"actor_rollout_ref.rollout.{name}={size}" for name, size in sizes.items()]
    assert main([*of_verl(*devices), "-cp", "config", "-cn", "ppo_trainer"]) == 0
    assert "training        " in capsys.readouterr().out


def test_a_plan_imports_neither_verl_nor_torch() -> None:
    """They take seconds. The model is on another machine."""
    words = [
        "explain",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.model.lora_rank=8",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=8",
    ]
    code = (
        "import sys; from recipe.async_pipeline.cli.main import main; "
        f"assert main({words!r}) == 0; "
        "print(*sorted({'verl', 'torch', 'ray', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=REPOSITORY
    )
    assert "strategy        one_step_off" in done.stdout
    assert done.stdout.splitlines()[-1] == ""
