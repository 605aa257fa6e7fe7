# SPDX-License-Identifier: Apache-2.0
"""Create the parts of the trainer with their dependencies."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ...observe.agent_output import FOLDER, AgentOutputFolder
from ..agent_loop.manager import PushAgentLoopManager
from ..diffusers_rules import draws_images
from ..rollout.elasticity import Elasticity
from ..rollout.server_manager import room_by_node
from .checkpointing import Checkpointing
from .generation import PARTITION, Generation
from .kept_pictures import KeptPictures
from .log_probs import LogProbs
from .ray_metrics import RayGauges
from .step_report import StepReport
from .terminal import say

if TYPE_CHECKING:
    from .async_trainer import AsyncPipelineTrainer


def generation(trainer: AsyncPipelineTrainer, manager: PushAgentLoopManager) -> Generation:
    """Return the part that generates groups through the agent loops of `manager`."""
    return Generation(
        manager=manager,
        prompts=trainer.prompts,
        calls=trainer.calls,
        stages=trainer.stages,
        meters=trainer.meters,
        bad_data=trainer.bad_data,
        knobs=trainer.knobs,
        temperature=trainer.config.actor_rollout_ref.rollout.temperature,
        filter_metric=trainer._resolve_filter_groups_metric(),
        reward_workers=lambda: trainer.reward_loop_manager.reward_loop_workers,
        served=lambda: trainer.publisher.served,
        note=lambda event, **fields: trainer._note("generate", event, **fields),
        keep_output=trainer.observers.guard(
            "the output of agents",
            AgentOutputFolder(trainer.folder.path).add,
            lost=f"without further files in {FOLDER}/",
        ),
    )


def log_probs(trainer: AsyncPipelineTrainer) -> LogProbs:
    """Return the part that computes log-probs. Blocks until the workers of its pools have started."""
    startup = trainer.startup
    return LogProbs(
        config=trainer.config,
        placement=trainer.placement,
        schedule=trainer.schedule,
        stages=trainer.stages,
        calls=trainer.calls,
        publisher=trainer.publisher,
        pools=lambda: trainer.resource_pool_manager.resource_pool_dict,
        old_group=startup.group_of("logp"),
        reference_group=startup.group_of("ref_logp") or getattr(trainer, "ref_policy_wg", None),
        folder=trainer.runtime.run_dir / "reference",
        note=trainer._note,
    )


def step_report(trainer: AsyncPipelineTrainer) -> StepReport:
    """Return the part that finishes steps. The trackers of the run must be open."""
    return StepReport(
        schedule=trainer.schedule,
        calls=trainer.calls,
        stages=trainer.stages,
        publisher=trainer.publisher,
        meters=trainer.meters,
        bad_data=trainer.bad_data,
        accounts=trainer.accounts,
        observers=trainer.observers,
        recorder=trainer.recorder,
        gauges=RayGauges(trainer.config.trainer.experiment_name),
        logger=trainer.logger,
        steps_per_epoch=trainer.steps_per_epoch,
        rollout_data_dir=trainer.config.trainer.get("rollout_data_dir"),
        pictures=_pictures(trainer),
    )


def _pictures(trainer: AsyncPipelineTrainer) -> KeptPictures | None:
    """Return what keeps pictures of each step, or None if the policy draws none or none are kept."""
    count = trainer.knobs.diffusion.kept_pictures
    return KeptPictures(trainer.folder.path, count) if count and draws_images(trainer.config) else None


def devices_of_a_replica(trainer: AsyncPipelineTrainer) -> int:
    """Return the number of devices of one rollout replica."""
    return int(trainer.config.actor_rollout_ref.rollout.tensor_model_parallel_size)


def elasticity(trainer: AsyncPipelineTrainer) -> Elasticity:
    """Return the part that adds and removes replicas during the run."""
    devices = devices_of_a_replica(trainer)
    node = int(trainer.config.actor_rollout_ref.rollout.n_gpus_per_node)
    return Elasticity(
        trainer.rollout_pool,
        trainer.folder.path,
        trainer.knobs.fleet,
        say,
        trainer.calls,
        nodes=partial(room_by_node, min(devices, node)),
        nodes_of_a_replica=-(-devices // node),
    )


def checkpointing(trainer: AsyncPipelineTrainer, manager: PushAgentLoopManager) -> Checkpointing:
    """Return the part that writes checkpoints."""

    def on_save(step: int, folder: str) -> None:
        trainer.checkpoint_callback.on_save(
            trainer=trainer.stages.at(step), global_step=step, checkpoint_dir=folder, async_save=False
        )

    critic: Any | None = trainer.critic_wg if trainer.use_critic else None
    return Checkpointing(
        run=trainer.runtime.run,
        identity=trainer.runtime.identity,
        config=trainer.config.trainer,
        schedule=trainer.schedule,
        calls=trainer.calls,
        stages=trainer.stages,
        actor_group=trainer.actor_rollout_wg,
        critic_group=critic,
        copies=trainer.log_probs.copies,
        prompts=trainer.prompts,
        manager=manager,
        bad_data=trainer.bad_data,
        recorder=trainer.recorder,
        ledger=trainer.folder.ledger,
        partition=PARTITION,
        rejects=trainer.generation.rejects,
        on_save=on_save,
        stall_s=trainer.knobs.faults.checkpoint_stall_s,
    )
