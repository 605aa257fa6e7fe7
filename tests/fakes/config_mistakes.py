# SPDX-License-Identifier: Apache-2.0
"""Options of verl with a value that the pipeline does not support."""

from __future__ import annotations

from typing import Any

ROLLOUT = "actor_rollout_ref.rollout"


MISTAKES: list[tuple[str, Any]] = [
    ("trainer.v1.trainer_mode", "separate_async"),
    (f"{ROLLOUT}.checkpoint_engine.backend", "nccl"),
    (f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", 7),
    (f"{ROLLOUT}.agent.agent_loop_manager_class", "mine.Manager"),
    (f"{ROLLOUT}.n", 0),
    ("data.train_batch_size", 0),
    ("actor_rollout_ref.actor.ppo_mini_batch_size", 0),
    (f"{ROLLOUT}.max_num_seqs", None),
    (f"{ROLLOUT}.tensor_model_parallel_size", None),
    ("critic.ppo_mini_batch_size", 0),
    ("trainer.critic_warmup", "x"),
    ("actor_rollout_ref.model.lora_rank", float("nan")),
    ("actor_rollout_ref.model.lora.rank", -1),
    ("ray_kwargs.ray_init.num_gpus", 1.5),
    ("reward.num_workers", 0),
    ("trainer.total_training_steps", -3),
    ("trainer.use_v1", False),
    (f"{ROLLOUT}.name", "trtllm"),
    (f"{ROLLOUT}.mode", "sync"),
    (f"{ROLLOUT}.data_parallel_size", 2),
    (f"{ROLLOUT}.pipeline_model_parallel_size", 2),
    (f"{ROLLOUT}.quantization", "torchao"),
    ("actor_rollout_ref.actor.qat.enable", True),
    ("actor_rollout_ref.actor.fsdp_config.qat.enable", True),
    (f"{ROLLOUT}.qat.enable", True),
    ("actor_rollout_ref.model.mtp.enable", True),
    (f"{ROLLOUT}.mtp.enable", True),
    (f"{ROLLOUT}.enable_rollout_routing_replay", True),
    (f"{ROLLOUT}.moe_load_balance_metrics_interval", 10),
    (f"{ROLLOUT}.dtype", "float8_e4m3fn"),
    (f"{ROLLOUT}.disaggregation.enabled", True),
    ("actor_rollout_ref.actor.strategy", "veomni"),
    ("trainer.val_only", True),
    ("distillation.enabled", True),
    ("skip.rollout_tq.enable", True),
]
