#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A mixture of experts on 8 GPUs: Megatron on four (expert 4 x data 4), one vLLM replica of four.
#
#   bash run_scripts/megatron_vllm_moe.sh data.train_files=... data.val_files=... [hydra overrides]
#   bash run_scripts/megatron_vllm_moe.sh --explain ...     says what that would be, and starts nothing
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" \
  model_engine=megatron \
  actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B \
  actor_rollout_ref.actor.megatron.expert_model_parallel_size=4 \
  actor_rollout_ref.actor.megatron.param_offload=True \
  actor_rollout_ref.actor.megatron.optimizer_offload=True \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
  "$@"
