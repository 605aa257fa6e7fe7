# SPDX-License-Identifier: Apache-2.0
"""An unsupported config is an error of one line before Ray starts."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipe.async_pipeline.config.paths import OWN
from recipe.async_pipeline.config.schema import knob_paths
from recipe.async_pipeline.config.verl_options import RULES
from recipe.async_pipeline.errors import AsyncPipelineError, ConfigError
from tests.conftest import Load
from tests.verl_bridge.conftest import Smoke, refused

pytestmark = pytest.mark.real_engine

ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
LOSS = "actor_rollout_ref.actor.policy_loss"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_replica_is_within_a_node_or_takes_whole_ones(
    launch: ModuleType, smoke: Smoke, engine: str
) -> None:
    nodes = {f"{ROLLOUT}.name": engine, f"{ROLLOUT}.nnodes": 2, "ray_kwargs.ray_init.num_gpus": None}
    tp = f"{ROLLOUT}.tensor_model_parallel_size"
    with pytest.raises(ConfigError, match="a multiple of the 8 rollout devices of a node if .* got 12"):
        launch.checked(smoke(nodes | {f"{ROLLOUT}.n_gpus_per_node": 8, tp: 12}))
    for node, size in ((8, 4), (8, 16), (1, 2)):
        launch.checked(smoke(nodes | {f"{ROLLOUT}.n_gpus_per_node": node, tp: size}))


def test_a_micro_batch_that_does_not_divide_a_batch_is_fitted(launch: ModuleType, smoke: Smoke) -> None:
    """And one that would become much smaller is refused."""
    micro = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    logp = f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"
    batch = {"data.train_batch_size": 6, "actor_rollout_ref.actor.ppo_mini_batch_size": 6}
    config = smoke({**batch, f"{ROLLOUT}.n": 5, micro: 16, logp: 30})
    found = launch.checked(config)
    assert found.translation.verl[micro] == 15
    assert any(note.startswith(f"{micro} is set to 15: 16 does not ") for note in found.translation.notes)
    assert OmegaConf.select(config, micro) == 16
    with pytest.raises(ConfigError, match="ppo_micro_batch_size_per_gpu must divide the 31 .* set it to 1$"):
        launch.checked(
            smoke(
                {
                    "data.train_batch_size": 31,
                    f"{ROLLOUT}.n": 1,
                    micro: 8,
                    logp: 31,
                    "actor_rollout_ref.actor.ppo_mini_batch_size": 31,
                }
            )
        )


def test_the_sample_store_gets_room_for_a_large_batch(launch: ModuleType, smoke: Smoke) -> None:
    size = "transfer_queue.backend.SimpleStorage.total_storage_size"
    batch = {"data.train_batch_size": 4096, "actor_rollout_ref.actor.ppo_mini_batch_size": 4096}
    large = launch.checked(smoke({**batch, f"{ROLLOUT}.n": 16})).translation
    assert large.verl[size] > 100_000
    assert any(note.startswith(f"{size} is set to {large.verl[size]}: ") for note in large.notes)
    assert size not in launch.checked(smoke({})).translation.verl


def test_the_rank_of_a_saved_adapter_is_taken_from_its_files(
    launch: ModuleType, smoke: Smoke, tmp_path: Path
) -> None:
    rank = "actor_rollout_ref.model.lora_rank"
    adapter = {
        "actor_rollout_ref.model.lora_adapter_path": str(tmp_path),
        f"{ROLLOUT}.load_format": "auto",
    }
    with pytest.raises(ConfigError, match=rf"^{rank} must be >= 1 with .*lora_adapter_path.*, got 0; set it"):
        launch.checked(smoke(adapter))
    (tmp_path / "adapter_config.json").write_text('{"r": 16}')
    assert launch.checked(smoke(adapter)).translation.verl[rank] == 16
    elsewhere = {**adapter, "actor_rollout_ref.model.lora_adapter_path": str(tmp_path / "none")}
    found = launch.checked(smoke(elsewhere), planning=True)
    assert any("lora_adapter_path" in line for line in found.unchecked)
    assert found.translation.verl[rank] == 32


def test_a_key_that_nothing_reads_is_named(launch: ModuleType, smoke: Smoke) -> None:
    notes = launch.checked(smoke({"trainer.balance_batch": False})).translation.notes
    (note,) = (note for note in notes if "has no effect" in note)
    assert note.startswith("trainer.balance_batch has no effect in a pipeline run: ")


def test_a_device_on_which_this_package_never_ran_is_named(launch: ModuleType, smoke: Smoke) -> None:
    line = "trainer.device=npu, on which this package was never run"
    assert line in launch.checked(smoke({"trainer.device": "npu"})).unchecked
    assert not any(
        "trainer.device" in one for one in launch.checked(smoke({"trainer.device": "cuda"})).unchecked
    )


def test_what_verl_itself_refuses_is_one_line(launch: ModuleType, smoke: Smoke) -> None:
    unknown = {"actor_rollout_ref.actor.checkpoint.zzz": 1}
    with pytest.raises(ConfigError, match="^verl refuses this config: .*keyword argument 'zzz'.*$"):
        launch.checked(smoke(unknown))


MICRO_OF_FOUR = {
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 32,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 32,
}


def test_a_run_cannot_have_fewer_replicas_than_it_starts_with(launch: ModuleType, smoke: Smoke) -> None:
    overrides = {f"{ROLLOUT}.n_gpus_per_node": 3, "ray_kwargs.ray_init.num_gpus": 4}
    knob = "trainer.v1.async_pipeline.fleet.max_replicas"
    with pytest.raises(
        ConfigError, match=r"max_replicas must be 0 or at least the 3 replicas .*, got 2; raise"
    ):
        launch.checked(smoke({**overrides, knob: 2}))


@pytest.mark.parametrize("path", [f"{ROLLOUT}.n_gpus_per_node", "trainer.nnodes", "trainer.n_gpus_per_node"])
def test_ray_must_have_the_devices(launch: ModuleType, smoke: Smoke, path: str) -> None:
    wanted = (
        r"ray_kwargs\.ray_init\.num_gpus must be at least 5, the devices of the run \(train \d, generate \d\)"
    )
    with pytest.raises(ConfigError, match=f"{wanted}, got 2; set it to 5"):
        launch.checked(smoke({path: 4}))
    launch.checked(smoke({path: 4, "ray_kwargs.ray_init.num_gpus": None, **MICRO_OF_FOUR}))


def test_tensor_parallelism_names_all_settings_in_one_message(launch: ModuleType, smoke: Smoke) -> None:
    two = {f"{ROLLOUT}.tensor_model_parallel_size": 2}
    with pytest.raises(ConfigError, match=r"2 devices with .*n_gpus_per_node.*ray_init\.num_gpus=3$"):
        launch.checked(smoke(two))
    launch.checked(smoke({**two, f"{ROLLOUT}.n_gpus_per_node": 2, "ray_kwargs.ray_init.num_gpus": 3}))


MODEL = "reward.reward_model"


JUDGE: dict[str, Any] = {
    f"{MODEL}.enable": True,
    f"{MODEL}.enable_resource_pool": True,
    f"{MODEL}.nnodes": 1,
    f"{MODEL}.n_gpus_per_node": 2,
    f"{MODEL}.rollout.free_cache_engine": False,
    "ray_kwargs.ray_init.num_gpus": 4,
}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({f"{MODEL}.nnodes": 0}, f"{MODEL}.nnodes must be >= 1, got 0"),
        ({f"{MODEL}.n_gpus_per_node": None}, f"{MODEL}.n_gpus_per_node must be >= 1, got None"),
        ({f"{MODEL}.rollout.free_cache_engine": True}, "free_cache_engine must be False, got True"),
        (
            {f"{MODEL}.rollout.tensor_model_parallel_size": 3},
            "tensor_model_parallel_size must divide its 2 devices, got 3",
        ),
        (
            {"ray_kwargs.ray_init.num_gpus": 3},
            r"at least 4, the devices of the run \(train 1, generate 1, reward model 2\), got 3",
        ),
    ],
)
def test_a_reward_model_has_its_own_devices(
    launch: ModuleType, smoke: Smoke, changes: dict[str, Any], error: str
) -> None:
    launch.checked(smoke(JUDGE))
    found = launch.checked(smoke(JUDGE | {f"{MODEL}.enable_resource_pool": False}))
    assert found.translation.verl[f"{MODEL}.enable_resource_pool"] is True
    with pytest.raises(ConfigError, match=error):
        launch.checked(smoke(JUDGE | changes))


@pytest.mark.parametrize(
    ("path", "value"), [(f"{ROLLOUT}.nnodes", 0), (f"{ROLLOUT}.n_gpus_per_node", None), ("trainer.nnodes", 0)]
)
def test_training_and_rollout_need_devices(launch: ModuleType, smoke: Smoke, path: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{path} must be >= 1, got {value}"):
        launch.checked(smoke({path: value}))


def test_a_reward_function_is_guarded_within_the_configured_manager(launch: ModuleType, smoke: Smoke) -> None:
    config = smoke({f"{OWN}.reward.timeout_s": 5, "reward.reward_manager.name": "dapo"})
    launch.prepare(config)
    manager = config.reward.reward_manager
    assert (manager.source, manager.name) == ("importlib", "GuardedRewardManager")
    assert manager.module.path == "pkg://recipe.async_pipeline.verl_bridge.reward.manager"
    assert config.trainer.v1.async_pipeline_runtime.reward_manager.name == "dapo"


def test_all_problems_are_named_at_once_and_each_key_once(launch: ModuleType, smoke: Smoke) -> None:
    wrong = {
        "trainer.val_only": True,
        "actor_rollout_ref.rollout.pipeline_model_parallel_size": 2,
        "trainer.save_freq": "often",
        "actor_rollout_ref.rollout.n": 0,
    }
    with pytest.raises(ConfigError) as caught:
        launch.checked(smoke(wrong))
    named = [problem.partition(" ")[0] for problem in caught.value.problems]
    assert set(named) == set(wrong) and len(named) == len(wrong)
    lines = str(caught.value).splitlines()
    assert lines[0] == "4 problems:" and [line[:5] for line in lines[1:]] == [f"  {n}. " for n in range(1, 5)]


def test_an_unreadable_knob_stops_the_other_checks(launch: ModuleType, smoke: Smoke) -> None:
    with pytest.raises(ConfigError) as caught:
        launch.checked(smoke({f"{OWN}.strategy": "fast", "trainer.val_only": True}))
    (problem,) = caught.value.problems
    assert "must be one of on_policy" in problem


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (
            {f"{CORRECTION}.rollout_is": "token", f"{ROLLOUT}.calculate_log_probs": False},
            "calculate_log_probs must be True with .*rollout_is, got False; set it",
        ),
        (
            {
                f"{CORRECTION}.rollout_is": "token",
                f"{CORRECTION}.bypass_mode": True,
                f"{ROLLOUT}.calculate_log_probs": True,
                f"{LOSS}.loss_mode": "tis",
            },
            "rollout_is must be null if old .*got 'token'; set it to null, or .*loss_mode=vanilla, with",
        ),
        (
            {"reward.custom_reward_function.path": "/no/such/reward.py"},
            "must be an existing Python file or pkg://MODULE, got '/no/such/reward.py'.*correct it",
        ),
        (
            {f"{OWN}.reward.timeout_s": 5, "reward.custom_reward_function.path": None},
            "timeout_s requires a custom reward function, got ",
        ),
        (
            {f"{OWN}.reward.timeout_s": 5, "reward.custom_reward_function.name": "nothing"},
            "cannot be loaded .* correct path and name",
        ),
        ({f"{OWN}.reward.batch": 4}, r"reward.batch=4 requires .*reward.timeout_s; set it"),
        ({f"{OWN}.reward.timeout_s": 0}, "reward.timeout_s must be > 0"),
    ],
)
def test_invalid_limits_are_refused(
    launch: ModuleType, smoke: Smoke, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], part: str
) -> None:
    assert re.search(part, refused(launch, smoke(changes), capsys))


POOLS_OF_THREE = {
    "t": {"roles": ["train"], "devices": 2},
    "l": {"roles": ["logp"], "devices": 3},
    "g": {"roles": ["generate"], "devices": 3},
}


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"trainer.critic_warmup": 2}, "critic_warmup must be 0 without a critic, got 2"),
        (
            {"algorithm.adv_estimator": "gae", "critic.strategy": "megatron"},
            "critic.strategy=megatron requires verl's config of Megatron",
        ),
        (
            {f"{OWN}.training.old_logp": "logp_pool"},
            "requires a pool for logp, which shares the training devices",
        ),
        (
            {"quarters": True, f"{OWN}.training.old_logp": "logp_pool", "async_strategy": "on_policy"},
            "requires .*max_lag > 0, got 0",
        ),
        (
            {"quarters": True, f"{OWN}.training.old_logp": "trainer", f"{OWN}.weight_sync.every": 2},
            "requires .*weight_sync.every=1, got 2",
        ),
        (
            {"quarters": True, f"{OWN}.training.old_logp": "rollout", f"{CORRECTION}.rollout_is": None},
            "this run has no logp",
        ),
        (
            {"quarters": True, "actor_rollout_ref.actor.strategy": "fsdp"},
            "must be fsdp2 or megatron if logp loads",
        ),
        (
            {f"{OWN}.training.ref_refresh_every": 4, "actor_rollout_ref.actor.strategy": "fsdp"},
            "must be fsdp2 or megatron if ref_logp loads",
        ),
        (
            {
                f"{OWN}.training.ref_refresh_every": 4,
                "actor_rollout_ref.model.lora_rank": 8,
                f"{ROLLOUT}.load_format": "auto",
            },
            "ref_refresh_every must be 0 with LoRA unless ref_logp has its own pool, got 4; .*leave it out",
        ),
        ({f"{OWN}.training.ref_refresh_every": 4, "use_ref": False}, "must be 0 without a reference policy"),
        (
            {f"{OWN}.training.old_logp": "rollout", f"{ROLLOUT}.calculate_log_probs": False},
            "calculate_log_probs must be True",
        ),
    ],
)
def test_an_invalid_layout_is_refused(
    launch: ModuleType, smoke: Smoke, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], part: str
) -> None:
    changes = dict(changes)
    if changes.pop("quarters", False):
        changes |= {"trainer.use_nodes_ratios": [0.25] * 4, "trainer.n_gpus_per_node": 3}
    with_ref = changes.pop("use_ref", True)
    config = smoke(
        {"actor_rollout_ref.actor.use_kl_loss": with_ref, "ray_kwargs.ray_init.num_gpus": None, **changes}
    )
    assert re.search(part, refused(launch, config, capsys))


@pytest.mark.parametrize("merge", [True, False])
def test_adapters_go_with_a_reference_and_pools(launch: ModuleType, smoke: Smoke, merge: bool) -> None:
    adapters = {
        "actor_rollout_ref.model.lora_rank": 8,
        "actor_rollout_ref.model.lora.merge": merge,
        f"{ROLLOUT}.load_format": "auto",
        "actor_rollout_ref.actor.use_kl_loss": True,
    }
    launch.checked(smoke(adapters))
    quarters = {
        "trainer.use_nodes_ratios": [0.25] * 4,
        "trainer.n_gpus_per_node": 3,
        "ray_kwargs.ray_init.num_gpus": None,
        f"{OWN}.training.ref_refresh_every": 4,
    }
    launch.checked(smoke(adapters | quarters))


def test_a_custom_stage_must_fit(
    launch: ModuleType, smoke: Smoke, capsys: pytest.CaptureFixture[str]
) -> None:
    role = "recipe.async_pipeline.stages.batches:RewardStateMachine@reward->train"
    line = refused(launch, smoke({f"{OWN}.custom_stages": [role]}), capsys)
    assert f"{OWN}.custom_stages: " in line and "is in the pipeline already" in line


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({f"{OWN}.max_lagg": 1}, "nearest knobs: staleness.max_lag, "),
        ({"trainer.max_lag": 1}, "it belongs at"),
        ({"async_pipeline": "yes"}, "must be True or False"),
        ({f"{ROLLOUT}.name": "trtllm"}, "other engines are not supported yet"),
        ({"data.train_files": "${oc.env:NO_SUCH_VARIABLE}"}, "data.train_files cannot be resolved"),
        ({f"{OWN}.agentic.agent": "${oc.env:NO_SUCH_VARIABLE}"}, "agentic.agent cannot be resolved"),
    ],
)
def test_an_error_has_one_line(
    launch: ModuleType, smoke: Smoke, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], part: str
) -> None:
    assert part in refused(launch, smoke(changes), capsys)
    assert not Path("outputs").exists()


def test_a_knob_may_refer_to_the_environment_and_to_other_keys(
    launch: ModuleType, smoke: Smoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON_OF_THE_AGENT", sys.executable)
    Path("agent.py").write_text("")
    changes = {
        f"{OWN}.agentic.agent": "${oc.env:PYTHON_OF_THE_AGENT} agent.py",
        f"{OWN}.agentic.max_turns": "${actor_rollout_ref.rollout.n}",
    }
    found = launch.checked(smoke(changes))
    agentic = found.translation.config.agentic
    assert agentic.agent == f"{sys.executable} agent.py"
    assert agentic.max_turns == smoke({}).actor_rollout_ref.rollout.n


READ = [
    *(row.path for row in RULES),
    *(f"{OWN}.{name}" for name in knob_paths()),
    *(
        f"{ROLLOUT}.{name}"
        for name in (
            "tensor_model_parallel_size",
            "nnodes",
            "n_gpus_per_node",
            "load_format",
            "calculate_log_probs",
            "dtype",
        )
    ),
    *(
        f"trainer.{name}"
        for name in (
            "nnodes",
            "n_gpus_per_node",
            "critic_warmup",
            "logger",
            "project_name",
            "experiment_name",
        )
    ),
    *(f"critic.{name}" for name in ("strategy", "ppo_mini_batch_size", "enable")),
    *(f"actor_rollout_ref.model.{name}" for name in ("lora_rank", "lora.rank", "lora.merge")),
    *(f"actor_rollout_ref.actor.{name}" for name in ("use_kl_loss", "policy_loss", "policy_loss.loss_mode")),
    *(
        f"actor_rollout_ref.actor.{name}"
        for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode")
    ),
    *(
        f"actor_rollout_ref.actor.policy_loss.{name}"
        for name in ("tis_upper_bound", "dro_beta", "clip_cov_ratio", "nonsense")
    ),
    *(
        f"algorithm.{name}"
        for name in ("adv_estimator", "filter_groups.enable", "filter_groups.metric", "use_kl_in_reward")
    ),
    *(
        f"algorithm.rollout_correction{name}"
        for name in (
            "",
            ".bypass_mode",
            ".rollout_is",
            ".rollout_is_threshold",
            ".rollout_rs",
            ".rollout_rs_threshold",
            ".loss_type",
        )
    ),
    *(f"transfer_queue{name}" for name in ("", ".backend", ".backend.SimpleStorage")),
    *(f"data.{name}" for name in ("train_batch_size", "max_prompt_length", "train_files")),
    *(
        f"reward.{name}"
        for name in ("custom_reward_function.path", "custom_reward_function.name", "reward_manager")
    ),
    *(f"ray_kwargs.ray_init.{name}" for name in ("num_gpus", "num_cpus")),
    "async_strategy",
    "trainer.use_nodes_ratios",
]
"""Keys that are read before Ray starts."""


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 5),
    st.floats(-2, 8),
    st.sampled_from(
        [
            10**30,
            float("nan"),
            float("inf"),
            "",
            "x",
            "gae",
            "fsdp",
            "a/b",
            "pkg://os",
            "m:C",
            "${nowhere}",
            [],
            [1],
            {},
            {"a": 1},
        ]
    ),
)


@settings(
    max_examples=40,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(changes=st.dictionaries(st.sampled_from(READ), ODD, min_size=1, max_size=3))
def test_any_values_are_accepted_or_refused_on_one_line(
    launch: ModuleType, smoke: Smoke, changes: dict[str, Any]
) -> None:
    try:
        config = smoke(changes)
    except (OmegaConfBaseException, ValueError):  # not even a config
        assume(False)
    try:
        launch.checked(config)
    except AsyncPipelineError as error:
        assert not any("\n" in str(problem) for problem in error.args)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({f"{LOSS}.loss_mode": "nonsense"}, r"loss_mode must be one of .*, tis, topr, .*got 'nonsense'"),
        (
            {f"{CORRECTION}.rollout_is_threshold": "abc"},
            "rollout_is=token with rollout_is_threshold, got 'abc', .*Invalid rollout_is_threshold 'abc'; "
            "e.g. 2.0",
        ),
        ({f"{CORRECTION}.rollout_is_threshold": -1}, "got -1, .*must be positive"),
        ({f"{CORRECTION}.rollout_is_threshold": None}, "got None, fails on "),
        ({f"{CORRECTION}.rollout_is_threshold": "0.1_0.9"}, "got '0.1_0.9', .*for a band that contains 1"),
        (
            {f"{CORRECTION}.rollout_rs": "token_k9"},
            "Invalid rollout_rs option|rollout_rs_threshold must be provided",
        ),
        (
            {f"{CORRECTION}.rollout_rs": "token_k1", f"{CORRECTION}.rollout_rs_threshold": "5_1"},
            "lower <= upper",
        ),
    ],
)
def test_a_loss_or_correction_that_workers_would_refuse(
    launch: ModuleType, smoke: Smoke, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], part: str
) -> None:
    assert re.search(part, refused(launch, smoke(changes), capsys))


def test_a_threshold_without_a_finite_weight_is_refused(launch: ModuleType, smoke: Smoke) -> None:
    with pytest.raises(ConfigError, match="rollout_is_threshold, got nan, .*no finite weight"):
        launch.checked(smoke({f"{CORRECTION}.rollout_is_threshold": float("nan")}))


@pytest.mark.parametrize("name", ["gspo", "policy_gradient", "topr", "cispo"])
def test_losses_of_verl_and_this_package_are_known(launch: ModuleType, smoke: Smoke, name: str) -> None:
    launch.checked(
        smoke(
            {
                f"{LOSS}.loss_mode": name,
                f"{CORRECTION}.rollout_rs": "seq_mean_k1",
                f"{CORRECTION}.rollout_rs_threshold": "0.5_2.0",
            }
        )
    )


def test_a_loss_that_an_external_library_may_add_is_accepted(launch: ModuleType, smoke: Smoke) -> None:
    launch.checked(smoke({f"{LOSS}.loss_mode": "mine", "actor_rollout_ref.model.external_lib": "my_losses"}))


def test_an_estimator_that_verl_does_not_have_is_refused(launch: ModuleType, smoke: Smoke) -> None:
    with pytest.raises(ConfigError, match=r"got 'grppo' \(did you mean 'grpo'\?\); correct it"):
        launch.checked(smoke({"algorithm.adv_estimator": "grppo"}))


def test_uncorrected_staleness_is_reported(
    launch: ModuleType, smoke: Smoke, capsys: pytest.CaptureFixture[str]
) -> None:
    launch.prepare(smoke({f"{CORRECTION}.rollout_is": None}))
    assert (
        "correction for staleness: none, though responses may have lag 1; "
        "set algorithm.rollout_correction.rollout_is=token to correct for it" in capsys.readouterr().out
    )
    launch.prepare(smoke({"async_strategy": "on_policy", f"{CORRECTION}.rollout_is": None}))
    launch.prepare(smoke({}))
    assert "correction" not in capsys.readouterr().out


ENVIRONMENT = f"{OWN}.agentic.environment"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {ENVIRONMENT: "frozen_lake", f"{ENVIRONMENT}_kwargs": {"sizze": 5}},
            r"environment_kwargs.sizze must be an argument of frozen_lake, got 5 \(did you mean 'size'\?\)",
        ),
        (
            {ENVIRONMENT: "frozen_lake", f"{OWN}.reward.while_generating": False},
            "reward.while_generating must be True with .*agentic.environment, .* got False; set it",
        ),
        (
            {ENVIRONMENT: "frozen_lake", f"{OWN}.agentic.turn_rewards": True},
            "adv_estimator must read rewards by token with .*turn_rewards, .*, got .grpo.; use gae or ",
        ),
        (
            {f"{OWN}.agentic.agent": "no_such_program x"},
            "agentic.agent must be module:function, external or a command",
        ),
        (
            {f"{OWN}.agentic.agent": "json:dump", f"{OWN}.reward.while_generating": False},
            "reward.while_generating must be True with .*agentic.agent, .* got False; set it",
        ),
    ],
)
def test_an_environment_that_cannot_be_played_is_refused(
    launch: ModuleType, smoke: Smoke, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        launch.checked(smoke(changes))


def test_an_environment_selects_its_agent_loop(launch: ModuleType, smoke: Smoke) -> None:
    found = launch.checked(smoke({ENVIRONMENT: "tests.fakes.environments:Counting"}))
    assert found.translation.verl[f"{ROLLOUT}.agent.default_agent_loop"] == "environment"


def test_rewards_of_turns_with_an_estimator_that_reads_them(launch: ModuleType, smoke: Smoke) -> None:
    changes = {f"{OWN}.agentic.turn_rewards": True, "algorithm.adv_estimator": "reinforce_plus_plus"}
    found = launch.checked(smoke({ENVIRONMENT: "frozen_lake", **changes}))
    assert found.translation.config.agentic.turn_rewards is True


def test_an_agent_selects_its_agent_loop_and_its_program_is_found_from_any_folder(
    launch: ModuleType, smoke: Smoke
) -> None:
    Path("agent.py").write_text("")
    config = smoke({f"{OWN}.agentic.agent": f"{sys.executable} agent.py"})
    launch.prepare(config)
    assert OmegaConf.select(config, f"{ROLLOUT}.agent.default_agent_loop") == "agent_session"
    assert OmegaConf.select(config, f"{OWN}.agentic.agent").endswith(f" {Path('agent.py').absolute()}")


def test_an_environment_of_gymnasium_requires_it(
    launch: ModuleType, smoke: Smoke, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = load("recipe.async_pipeline.config.environment_arguments")
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"='CartPole-v1' requires gymnasium; pip install"):
        launch.checked(smoke({ENVIRONMENT: "CartPole-v1"}))
