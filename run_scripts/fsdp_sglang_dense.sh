#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A dense model on 8 GPUs: FSDP2 on four, two SGLang replicas of two.
#
#   bash run_scripts/fsdp_sglang_dense.sh data.train_files=... data.val_files=... [hydra overrides]
#   bash run_scripts/fsdp_sglang_dense.sh --explain ...     says what that would be, and starts nothing
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" \
  actor_rollout_ref.model.path=Qwen/Qwen3-8B \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.ref.strategy=fsdp2 \
  actor_rollout_ref.rollout.name=sglang \
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  "$@"
