# SPDX-License-Identifier: Apache-2.0
"""An unsupported config is an error of one line before Ray starts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipe.async_pipeline.config.checks.verl_options import RULES
from recipe.async_pipeline.config.knobs.schema import knob_paths
from recipe.async_pipeline.config.paths import OWN
from recipe.async_pipeline.errors import AsyncPipelineError, ConfigError
from tests.conftest import Load
from tests.refusals import Refused, cases_of
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
    for node, size in ((8, 4), (8, 16), (1, 2)):
        launch.checked(smoke(nodes | {f"{ROLLOUT}.n_gpus_per_node": node, tp: size}))


def test_a_micro_batch_that_does_not_divide_a_batch_is_fitted(launch: ModuleType, smoke: Smoke) -> None:
    micro = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    logp = f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"
    batch = {"data.train_batch_size": 6, "actor_rollout_ref.actor.ppo_mini_batch_size": 6}
    config = smoke({**batch, f"{ROLLOUT}.n": 5, micro: 16, logp: 30})
    found = launch.checked(config)
    assert found.translation.verl[micro] == 15
    assert any(note.startswith(f"{micro} is set to 15: 16 does not ") for note in found.translation.notes)
    assert OmegaConf.select(config, micro) == 16


def test_the_sample_store_gets_room_for_a_large_batch(launch: ModuleType, smoke: Smoke) -> None:
    size = "transfer_queue.backend.SimpleStorage.total_storage_size"
    batch = {"data.train_batch_size": 4096, "actor_rollout_ref.actor.ppo_mini_batch_size": 4096}
    large = launch.checked(smoke({**batch, f"{ROLLOUT}.n": 16})).translation
    assert large.verl[size] > 100_000
    assert any(note.startswith(f"{size} is set to {large.verl[size]}: ") for note in large.notes)
    assert size not in launch.checked(smoke({})).translation.verl


def test_the_sample_store_gets_room_for_a_large_validation(
    launch: ModuleType, smoke: Smoke, tmp_path: Path
) -> None:
    """It takes all rows at once, as many as `val_max_samples` leaves."""
    size = "transfer_queue.backend.SimpleStorage.total_storage_size"
    (tmp_path / "val.jsonl").write_text('{"prompt": [], "data_source": "a", "reward_model": {}}\n' * 9_000)
    files = [str(tmp_path / "val.jsonl"), str(tmp_path / "task" / "val.parquet")]
    validates = {"trainer.val_before_train": True, f"{ROLLOUT}.val_kwargs.n": 19, "data.val_files": files}
    found = launch.checked(smoke(validates)).translation
    assert any("and 180020 in validation" in note for note in found.notes)
    assert found.verl[size] > 180_020
    assert size not in launch.checked(smoke({**validates, "data.val_max_samples": 100})).translation.verl
    assert (
        size not in launch.checked(smoke({**validates, "trainer.val_before_train": False})).translation.verl
    )


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
    found = launch.checked(smoke(elsewhere), absent=[])
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


MICRO_OF_FOUR = {
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 32,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 32,
}


@pytest.mark.parametrize("path", [f"{ROLLOUT}.n_gpus_per_node", "trainer.nnodes", "trainer.n_gpus_per_node"])
def test_a_cluster_may_bring_its_devices(launch: ModuleType, smoke: Smoke, path: str) -> None:
    launch.checked(smoke({path: 4, "ray_kwargs.ray_init.num_gpus": None, **MICRO_OF_FOUR}))


def test_tensor_parallelism_needs_devices(launch: ModuleType, smoke: Smoke) -> None:
    two = {f"{ROLLOUT}.tensor_model_parallel_size": 2}
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


def test_a_reward_model_has_its_own_devices(launch: ModuleType, smoke: Smoke) -> None:
    launch.checked(smoke(JUDGE))
    found = launch.checked(smoke(JUDGE | {f"{MODEL}.enable_resource_pool": False}))
    assert found.translation.verl[f"{MODEL}.enable_resource_pool"] is True


def test_a_reward_function_is_guarded_within_the_configured_manager(launch: ModuleType, smoke: Smoke) -> None:
    config = smoke({f"{OWN}.reward.timeout_s": 5, "reward.reward_manager.name": "dapo"})
    launch.prepare(config)
    manager = config.reward.reward_manager
    assert (manager.source, manager.name) == ("importlib", "GuardedRewardManager")
    assert manager.module.path == "pkg://recipe.async_pipeline.verl_bridge.reward.manager"
    assert config.trainer.v1.async_pipeline_runtime.reward_manager.name == "dapo"


@cases_of("run")
def test_a_run_is_refused(launch: ModuleType, smoke: Smoke, case: Refused) -> None:
    case.replay(lambda changes: launch.checked(smoke(changes)))


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


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({f"{OWN}.max_lagg": 1}, "nearest knobs: staleness.max_lag, "),
        ({"data.train_files": "${oc.env:NO_SUCH_VARIABLE}"}, "data.train_files cannot be resolved"),
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
    launch.checked(smoke({f"{LOSS}.loss_mode": "mine", "actor_rollout_ref.model.external_lib": "tests"}))


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
    checks = load("recipe.async_pipeline.config.checks.environment_arguments")
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"='CartPole-v1' requires gymnasium; pip install"):
        launch.checked(smoke({ENVIRONMENT: "CartPole-v1"}))
