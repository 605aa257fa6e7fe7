# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Source this file: settings of verl, vLLM and Ray for a machine without accelerator. Values already set stay.

# verl finds no accelerator and would fall back to CUDA: name the platform that our plug-in registers.
export VERL_PLATFORM="${VERL_PLATFORM:-cpu}"
# verl's FSDP engines are registered for cuda and npu only; the cuda one runs on the CPU as it is.
export VERL_ENGINE_DEVICE="${VERL_ENGINE_DEVICE:-cuda}"
# GiB of KV cache a replica; vLLM's default is sized for a whole server.
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}"
# Otherwise vLLM binds its threads to exclusive cores and takes these from the trainer.
export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-nobind}"
# Trainer, replica and helpers share a few cores: one thread each avoids oversubscription.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Copies of weights: write blocks of 2 MiB and more past the caches, instead of reading the target first.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.cpu.x86_non_temporal_threshold=0x200000}"
# Model and data are local files, so a run needs no network.
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
# The threads of the tokenizers library deadlock when the process forks.
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
# Send no usage statistics.
export RAY_USAGE_STATS_ENABLED="${RAY_USAGE_STATS_ENABLED:-0}"
export VLLM_NO_USAGE_STATS="${VLLM_NO_USAGE_STATS:-1}"
# vLLM's V2 model runner needs Triton's kernels. Triton has no compiler for the CPU, so they are interpreted.
if [ "${VLLM_USE_V2_MODEL_RUNNER:-0}" = 1 ]; then
  export TRITON_INTERPRET="${TRITON_INTERPRET:-1}"
  PYTHONPATH="$(cd "$(dirname "${BASH_SOURCE[0]}")/interpreted_triton" && pwd)${PYTHONPATH:+:$PYTHONPATH}"
  export PYTHONPATH
fi
