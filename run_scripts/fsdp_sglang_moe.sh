#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A mixture of experts on 8 GPUs: FSDP2 on four, one SGLang replica of four.
#
#   bash run_scripts/fsdp_sglang_moe.sh data.train_files=... data.val_files=... [hydra overrides]
#   bash run_scripts/fsdp_sglang_moe.sh --explain ...     says what that would be, and starts nothing
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" \
  actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.ref.strategy=fsdp2 \
  actor_rollout_ref.actor.fsdp_config.param_offload=True \
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
  actor_rollout_ref.rollout.name=sglang \
  actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
  "$@"
