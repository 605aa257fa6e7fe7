#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Qwen3-8B by GRPO on 8 GPUs: FSDP2 on four, two vLLM replicas of two.
#
#   bash run_qwen3_8b_fsdp_vllm.sh data.train_files=... data.val_files=... [hydra overrides]
#
# Setting: ASYNC_PIPELINE_PYTHON, the interpreter (default: python3)
set -euo pipefail

exec "${ASYNC_PIPELINE_PYTHON:-python3}" -m verl.trainer.main_ppo \
  trainer.v1.trainer_mode=async_pipeline \
  +async_strategy=one_step_off \
  algorithm.adv_estimator=grpo \
  algorithm.rollout_correction.rollout_is=token \
  algorithm.rollout_correction.rollout_is_threshold=2.0 \
  data.train_batch_size=128 \
  data.max_prompt_length=1024 \
  data.max_response_length=2048 \
  actor_rollout_ref.model.path=Qwen/Qwen3-8B \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.ref.strategy=fsdp2 \
  actor_rollout_ref.actor.ppo_mini_batch_size=128 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  actor_rollout_ref.rollout.calculate_log_probs=True \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.nnodes=1 \
  actor_rollout_ref.rollout.n_gpus_per_node=4 \
  trainer.nnodes=1 \
  trainer.n_gpus_per_node=4 \
  "$@"
