#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Train by asynchronous RL with configs/train.yaml; the scripts named after engines add their differences.
#
#   bash run_scripts/train.sh [--explain] data.train_files=... data.val_files=... [hydra overrides]
#
# With --explain, print what the run would be and start nothing. Settings:
#   ASYNC_PIPELINE_PYTHON   the interpreter (default: .venv-gpu's, otherwise .venv's, otherwise python3)
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=run_scripts/common.sh
source "$ROOT/run_scripts/common.sh"
if help_wanted "$@"; then
  print_header "${BASH_SOURCE[0]}"
  exit
fi
PYTHON="$(find_interpreter "$ROOT")"
CONFIG=(--config-path "$ROOT/configs" --config-name train)

EXPLAIN=""
OVERRIDES=()
for argument in "$@"; do
  if [ "$argument" = --explain ]; then EXPLAIN=yes; else OVERRIDES+=("$argument"); fi
done

if [ -n "$EXPLAIN" ]; then
  exec "$PYTHON" -m recipe.async_pipeline explain "${CONFIG[@]}" "${OVERRIDES[@]}"
fi
exec "$PYTHON" -m recipe.async_pipeline watch -- "$PYTHON" -m verl.trainer.main_ppo \
  "${CONFIG[@]}" +async_pipeline=True "${OVERRIDES[@]}"
