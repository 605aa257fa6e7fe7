# SPDX-License-Identifier: Apache-2.0
"""verl's V1 PPOTrainer with what verl calls of this package; `fit` hands over to `PipelineRun`."""

from __future__ import annotations

import math
from concurrent.futures import wait
from typing import Any, ClassVar

from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import LLMServerClient

from ...config.checks.teachers import servers_of
from ...core.schedule import Schedule
from ...installed.verl import find_verl_root, require_known
from ...observe.causes import causes
from .. import replaced
from ..agent_loop.tokens.prompt_tokens import warn_of_turns
from ..process.after_import import require_loaded
from ..store.sample_store import count_cores_once
from ..weights import checkpoint_engine as _checkpoint_engine  # noqa: F401 - registers `dual_buffer`
from .batches.data_rows import ValidationBuffer, keep_readable
from .batches.prompt_source import PromptSource, require_a_batch
from .pipeline_run import PipelineRun
from .reporting.sample_metrics import file_writer, numbers_or_text
from .reporting.terminal import say

DUMP_S = 60.0
"""Seconds for the last files of generations at the end of a run."""


class VerlTrainer(PPOTrainer):
    """What the trainers of all strategies share; `registration` has them."""

    _enable_hybrid_replicas = False
    """Read by verl: no rollout engine on the training devices."""
    schedule_class: ClassVar[type[Schedule] | None] = None
    """The schedule of the strategy that this trainer is, or None for the one that the config names."""
    run_class: ClassVar[type[PipelineRun]] = PipelineRun
    """The run of a custom trainer class."""

    use_teacher_policy: bool
    """Whether the run distills."""
    trainer_mode: str
    """verl's name for the strategy; several of its methods check whether it is `sync`."""

    def __init__(self, config: DictConfig) -> None:
        """Raises PatchedVerlRequired if verl in this process lacks the plugin or is not the pinned one."""
        require_loaded()
        require_known(find_verl_root())
        replaced.apply("trainer")
        count_cores_once()
        super().__init__(config)
        self.pipeline = self.run_class(self, self.schedule_class)

    # verl's start-up: verl calls these methods in this order.

    def _init_dataloader(self) -> None:
        """Draw whole batches, as verl's sync trainer does, to see the same prompts in the same order.

        Raises ConfigError if there are too few prompts for one batch.
        """
        mode, self.trainer_mode = self.trainer_mode, "sync"
        try:
            super()._init_dataloader()
        finally:
            self.trainer_mode = mode
        require_a_batch(len(self.train_dataset), self.config.data)
        keep_readable(self.train_dataset, training=True)
        keep_readable(self.val_dataset, training=False)
        self.pipeline.prompts = PromptSource(self._next_train_batch, self.train_dataloader)
        warn_of_turns(self.config, self.tokenizer, say)

    def _init_resource_pool_mgr(self) -> None:
        if elsewhere := bool(servers_of(self.config)):
            self.config.distillation.enabled = False  # else verl requires devices
        super()._init_resource_pool_mgr()
        if elsewhere:
            self.config.distillation.enabled = True
        self.pipeline.startup.place_workers(self.role_worker_mapping, self.resource_pool_manager)

    def _load_checkpoint(self) -> None:
        self.pipeline.restore()

    def _setup(self) -> None:
        """Start training workers and rollout servers concurrently: they do not depend on each other."""
        with causes():
            say("starting training workers and rollout servers")
            if elsewhere := bool(servers_of(self.config)):
                self.use_teacher_policy = False  # else verl starts replicas
            super()._setup()
            if elsewhere:
                self.use_teacher_policy = True
                self.distillation_config = omega_conf_to_dataclass(self.config.distillation)
            say("training workers are up")
            self.pipeline.connect()

    # Methods that verl calls.

    def _build_replay_buffer(self) -> ValidationBuffer:
        return ValidationBuffer()

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Return a multiple that is also divisible by the number of devices of each other pool."""
        pools = map(self.pipeline.placement.own_pool_of, ("logp", "ref_logp", "critic"))
        others = [pool.devices for pool in pools if pool is not None]
        return math.lcm(super()._get_required_batch_multiple(dp_size), *others)

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        return self.pipeline.log_probs.compute_reference(batch)

    def get_teacher_client(self) -> dict[str, Any] | None:
        return self.pipeline.teachers.clients(self.config)

    def get_llm_client(self) -> LLMServerClient:
        return self.pipeline.startup.servers.get_client()

    def _val_metrics_update(
        self,
        data_sources: list[Any],
        sample_uids: list[Any],
        reward_extra_infos_dict: dict[str, list[Any]],
        *more: Any,
        **named: Any,
    ) -> dict[str, float]:
        columns = numbers_or_text(reward_extra_infos_dict)
        found: dict[str, float] = super()._val_metrics_update(
            data_sources, sample_uids, columns, *more, **named
        )
        return found

    def _dump_generations(
        self,
        inputs: list[str],
        outputs: list[str],
        gts: list[Any],
        scores: list[float],
        reward_extra_infos_dict: dict[str, list[Any]],
        dump_path: str,
    ) -> None:
        """Write a file of generations in a thread, as verl does. It is an observer: no error is raised."""
        started_unix = self.pipeline.runtime.started_unix
        write = file_writer(self.pipeline.observers, self._write_generations, dump_path, started_unix)
        # The list of the trainer itself, which its views share.
        self._dump_futures[:] = [one for one in self._dump_futures if not one.done()]
        self._dump_futures.append(
            self._dump_executor.submit(
                write, inputs, outputs, gts, scores, reward_extra_infos_dict, self.global_steps
            )
        )

    def on_step_end(self) -> None:
        """Do nothing: verl's serial loop is not used."""

    def on_sample_end(self) -> None:
        """Do nothing: verl's serial loop is not used."""

    def _get_n_gpus_for_throughput(self) -> int:
        return sum(self.pipeline.pools().values())

    def fit(self, agent_loop_manager: Any) -> None:
        """Train until the last step. Raises the first error of any stage, after writing the summary."""
        self.pipeline.run(agent_loop_manager)
        # verl's own end of this would wait for a disk that hangs.
        wait(self._dump_futures, timeout=DUMP_S)
        self._dump_executor.shutdown(wait=False, cancel_futures=True)
