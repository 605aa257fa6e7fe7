#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Install what training with Megatron and generation with vLLM need on GPUs. Not verified on a GPU.
#
#   bash run_scripts/install_megatron_vllm.sh [--dry-run | --resolve]
exec bash "$(dirname "${BASH_SOURCE[0]}")/install.sh" megatron vllm "$@"
