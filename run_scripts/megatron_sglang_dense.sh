#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A dense model on 8 GPUs: Megatron on four (tensor 2 x data 2), two SGLang replicas of two.
#
#   bash run_scripts/megatron_sglang_dense.sh data.train_files=... data.val_files=... [hydra overrides]
#   bash run_scripts/megatron_sglang_dense.sh --explain ...     says what that would be, and starts nothing
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" \
  model_engine=megatron \
  actor_rollout_ref.model.path=Qwen/Qwen3-8B \
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
  actor_rollout_ref.rollout.name=sglang \
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  "$@"
