# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# To be sourced: what verl, vLLM and Ray must be told on a machine without accelerator. Values already set stay.

# verl finds no accelerator and would fall back to CUDA: name the platform that our plug-in registers.
export VERL_PLATFORM="${VERL_PLATFORM:-cpu}"
# verl's FSDP engines are registered for cuda and npu only; the cuda one runs on the CPU as it is.
export VERL_ENGINE_DEVICE="${VERL_ENGINE_DEVICE:-cuda}"
# GiB of KV cache a replica; vLLM's default is sized for a whole server.
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}"
# vLLM would bind its threads to cores of its own, and take them from the trainer.
export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-nobind}"
# Trainer, replica and helpers share a few cores: a thread pool a core in each of them only makes them wait.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Model and data are local files: look nothing up, so that a run needs no network.
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
# The tokenizers' own threads dead-lock when their process forks.
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
# No usage statistics to the makers of Ray and vLLM.
export RAY_USAGE_STATS_ENABLED="${RAY_USAGE_STATS_ENABLED:-0}"
export VLLM_NO_USAGE_STATS="${VLLM_NO_USAGE_STATS:-1}"
