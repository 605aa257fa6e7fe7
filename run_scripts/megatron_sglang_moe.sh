#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A mixture of experts on 8 GPUs: Megatron on four (tensor 1, pipeline 1, expert 4), two SGLang replicas of two, 128
# prompts a step.
#
#   bash run_scripts/megatron_sglang_moe.sh data.train_files=... data.val_files=... [hydra overrides]
#   bash run_scripts/megatron_sglang_moe.sh --explain ...     says what that would be, and starts nothing
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" \
  model_engine=megatron \
  actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B \
  actor_rollout_ref.actor.megatron.expert_model_parallel_size=4 \
  actor_rollout_ref.actor.megatron.param_offload=True \
  actor_rollout_ref.actor.megatron.optimizer_offload=True \
  actor_rollout_ref.rollout.name=sglang \
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  "$@"
