#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A tiny model learns addition by asynchronous RL on the real stack, on two CPU cores.
#
#   bash run_scripts/smoke_cpu.sh [hydra overrides]
#   bash run_scripts/smoke_cpu.sh async_strategy=n_step_ahead trainer.total_training_steps=10
#   bash run_scripts/smoke_cpu.sh --explain [hydra overrides]     says what that would be, and starts nothing
#
# Sets everything up first (once). Results: outputs/smoke/latest/{summary.json,metrics.jsonl,events.jsonl,run.log}
set -euo pipefail

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
  sed -n '3,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
  exit
fi

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
bash run_scripts/setup.sh
# shellcheck source=run_scripts/cpu_env.sh
source run_scripts/cpu_env.sh
PYTHON="$ROOT/.venv/bin/python"

ASYNC_PIPELINE_TASK="${ASYNC_PIPELINE_TASK:-$("$PYTHON" -m recipe.async_pipeline task make)}"
ASYNC_PIPELINE_RUN="${ASYNC_PIPELINE_RUN:-$(date +%Y%m%d-%H%M%S)}"
export ASYNC_PIPELINE_TASK ASYNC_PIPELINE_RUN
CONFIG=(--config-path "$ROOT/configs" --config-name smoke_cpu)
if [ "${1:-}" = --explain ]; then
  exec "$PYTHON" -m recipe.async_pipeline explain "${CONFIG[@]}" "${@:2}"
fi
exec "$PYTHON" -m recipe.async_pipeline watch -- "$PYTHON" -m verl.trainer.main_ppo \
  "${CONFIG[@]}" +async_pipeline=True "$@"
