# SPDX-License-Identifier: Apache-2.0
"""The arms as one literal table: the trainer, its devices and its overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ....config.keys.overrides import hydra_value
from ....errors import ConfigError

_ROLLOUT = "actor_rollout_ref.rollout"
_VLLM = f"{_ROLLOUT}.engine_kwargs.vllm"
_CHECKPOINT_ENGINE = "recipe.async_pipeline.verl_bridge.weights.checkpoint_engine"
_WORKER = "recipe.async_pipeline.verl_bridge.rollout.vllm.worker.PipelineWorkerExtension"
_JOB = "recipe.async_pipeline.lab.bench.jobs.job"
_FULLY_ASYNC_JOB = "recipe.async_pipeline.lab.bench.jobs.fully_async_job"
IN_PROCESS_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The executor that our own servers choose on CPUs; the bridge names the same one."""
ENGINES = ("vllm", "sglang")
SGLANG_BACKEND = "recipe.async_pipeline.lab.bench.jobs.weight_updates.sglang_backend"
"""The checkpoint engine of verl's workers with SGLang."""
DEVICES = 2
"""Devices of every arm, with one thread each; one arm has a third device for its reference policy."""

# verl's trainers need these settings to run on a CPU: no process between the engine core and its only worker.
# The pipeline sets them itself.
_STOCK: dict[str, Any] = {
    f"{_VLLM}.worker_extension_cls": _WORKER,
    f"{_VLLM}.distributed_executor_backend": IN_PROCESS_EXECUTOR,
}
# Both devices train, and both generate.
_SHARED: dict[str, Any] = {"trainer.n_gpus_per_node": DEVICES, f"{_ROLLOUT}.nnodes": 0}


class Arm(NamedTuple):
    """One trainer.

    verl's asynchronous trainers have as many batches in flight as this package's strategies at the same lag.
    """

    uses_pipeline: bool
    """Whether the arm runs a strategy of this package."""
    shared_devices: bool
    """Whether training and generation take turns on all devices instead of having one device each."""
    batches_in_flight: int
    """Most batches between their first prompt and their optimizer step."""
    bounded_lag: bool
    """Whether responses are at most batches_in_flight - 1 versions old; else fast groups overtake slow."""
    overrides: dict[str, Any]
    entry: str = _JOB
    """Module that starts the job."""

    @property
    def runs_sglang(self) -> bool:
        """Whether the arm can have SGLang for its engine: engines that share devices with training do not."""
        return not self.shared_devices and self.entry == _JOB

    def with_engine(self, engine: str) -> dict[str, Any]:
        """Return the overrides with one of `ENGINES`."""
        if engine == ENGINES[0]:
            return self.overrides
        backend = f"{_ROLLOUT}.checkpoint_engine.custom_backend_module"
        replaced = {backend: SGLANG_BACKEND} if backend in self.overrides else {}
        vllm = f"{_VLLM}."
        kept = {key: value for key, value in self.overrides.items() if not key.startswith(vllm)}
        return kept | replaced | {f"{_ROLLOUT}.name": engine}


def _pipeline_arm(strategy: str, max_lag: int, depth: int | None = None) -> Arm:
    overrides: dict[str, Any] = {"async_pipeline": True, "async_strategy": strategy}
    if strategy in ("n_step_ahead", "fully_async"):
        overrides["trainer.v1.async_pipeline.staleness.max_lag"] = max_lag
    if depth is not None:
        overrides["trainer.v1.async_pipeline.staleness.depth"] = depth
    ahead = max_lag if depth is None else depth
    return Arm(True, False, ahead + 1, ahead == max_lag, overrides)


_SEPARATE = _STOCK | {
    "trainer.v1.trainer_mode": "separate_async",
    "trainer.v1.separate_async.num_warmup_batches": 3,
    "trainer.v1.separate_async.parameter_sync_step": 1,
    "actor_rollout_ref.hybrid_engine": False,
    # verl's transports require accelerators; dual_buffer runs through verl's blocking manager.
    f"{_ROLLOUT}.checkpoint_engine.backend": "dual_buffer",
    f"{_ROLLOUT}.checkpoint_engine.custom_backend_module": _CHECKPOINT_ENGINE,
    f"{_ROLLOUT}.checkpoint_engine.engine_kwargs.dual_buffer.rollout_dtype": "float32",
}
_COLOCATE = (
    _STOCK
    | _SHARED
    | {"trainer.v1.trainer_mode": "colocate_async", "trainer.v1.colocate_async.num_warmup_batches": 3}
)
# verl counts the step that trains: a span of 4 is a lag of 3. It then waits for responses near the bound.
_LAG_3 = {
    "trainer.v1.sampler.max_off_policy_threshold": 4,
    "trainer.v1.sampler.max_off_policy_strategy": "wait",
}

# `experimental/fully_async_policy` has its own entry point and configuration. Its samples in flight and in
# the queue add up to four batches; responses continue after the interruption by a weight update.
_FULLY_ASYNC = _STOCK | {
    f"{_ROLLOUT}.checkpoint_engine.backend": "dual_buffer",
    f"{_ROLLOUT}.checkpoint_engine.custom_backend_module": _CHECKPOINT_ENGINE,
    f"{_ROLLOUT}.checkpoint_engine.engine_kwargs.dual_buffer.rollout_dtype": "float32",
    "actor_rollout_ref.hybrid_engine": False,
    # Without it, verl uses its single-turn agent loop and ignores the default.
    f"{_ROLLOUT}.multi_turn.enable": True,
    "data.train_batch_size": 0,
    "data.gen_batch_size": 1,
    "rollout.nnodes": 1,
    "rollout.n_gpus_per_node": 1,
    "async_training": {
        "staleness_threshold": 3.0,
        "trigger_parameter_sync_step": 1,
        "require_batches": 1,
        "partial_rollout": True,
        "use_trainer_do_validate": False,
        "use_dynamic_resource_scheduling": False,
        "dynamic_schedule_policy": "default",
        "dynamic_schedule_deactivate_ratio": 0.3,
        "dynamic_schedule_enable_rebalance": True,
        "concurrent_samples_per_replica": 32,
    },
}

_SEPARATE_REFERENCE: dict[str, Any] = {
    "trainer.v1.async_pipeline.pools": {
        "train": {"roles": ["train", "logp"], "devices": 1},
        "reference": {"roles": ["ref_logp"], "devices": 1},
        "generate": {"roles": ["generate"], "devices": 1},
    },
    # All devices that the pools distribute: these two and the rollout's one.
    "trainer.n_gpus_per_node": DEVICES,
    "ray_kwargs.ray_init.num_gpus": DEVICES + 1,
}

ARMS: dict[str, Arm] = {
    "verl_sync": Arm(False, True, 1, True, _STOCK | _SHARED | {"trainer.v1.trainer_mode": "sync"}),
    "verl_colocate_async": Arm(False, True, 4, False, _COLOCATE),
    "verl_separate_async": Arm(False, False, 4, False, _SEPARATE),
    "verl_separate_async_lag3": Arm(False, False, 4, True, _SEPARATE | _LAG_3),
    "verl_fully_async": Arm(False, False, 4, False, _FULLY_ASYNC, _FULLY_ASYNC_JOB),
    "on_policy": _pipeline_arm("on_policy", 0),
    "one_step_off": _pipeline_arm("one_step_off", 1),
    "n_step_ahead": _pipeline_arm("n_step_ahead", 3),
    # As many groups in flight as in the arms with four batches; slow ones may become as old as verl's.
    "fully_async": _pipeline_arm("fully_async", 6, depth=3),
    # The reference policy on a third logical device, for workloads in which it waits for other machines.
    "one_step_off_ref_apart": _pipeline_arm("one_step_off", 1)._replace(
        overrides=_pipeline_arm("one_step_off", 1).overrides | _SEPARATE_REFERENCE
    ),
    # Scores after a batch is generated, as with a reward model on shared devices; for workloads with judges.
    "on_policy_rewards_late": _pipeline_arm("on_policy", 0)._replace(
        overrides=_pipeline_arm("on_policy", 0).overrides
        | {"trainer.v1.async_pipeline.reward.while_generating": False}
    ),
    # The largest lag that was measured with verl's asynchronous trainers, which have no bound.
    "n_step_ahead_lag6": _pipeline_arm("n_step_ahead", 6),
}

SPECIAL_ARMS = ("n_step_ahead_lag6", "one_step_off_ref_apart", "on_policy_rewards_late")
"""Arms for special questions, which run only if named."""
DEFAULT_ARMS = tuple(name for name in ARMS if name not in SPECIAL_ARMS)


def parse_arms(text: str) -> list[str]:
    """Parse `A,B,...`, in the order of their turns. Raises ConfigError if one is unknown or repeated."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in ARMS]
    if unknown or not names or len(set(names)) < len(names):
        raise ConfigError(f"--arms must name each arm once, of {', '.join(ARMS)}; got {text!r}")
    return names


def arms_of_engine(names: Sequence[str] | None, engine: str) -> list[str]:
    """Return the arms to run: the named ones, by default all that the engine can run.

    Raises ConfigError if the engine cannot run a named one.
    """
    able = [name for name, arm in ARMS.items() if engine == ENGINES[0] or arm.runs_sglang]
    if names is None:
        return [name for name in DEFAULT_ARMS if name in able]
    for name in names:
        if name not in able:
            raise ConfigError(
                f"--engine {engine} does not run the arm {name}, whose engine shares devices with training "
                f"or that starts in another way; choose from {', '.join(able)}"
            )
    return list(names)


def hydra_overrides(values: Mapping[str, Any]) -> list[str]:
    """Return `++key=value` for each value; it sets existing and new keys alike."""
    return [f"++{key}={hydra_value(value)}" for key, value in values.items()]
