#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Show within minutes what of this package works on this machine, and write outputs/verify/gpu_report.html.
#
#   bash run_scripts/verify_gpu.sh [--gpus N] [--model PATH] [--only A,B] [--out DIR]
#   bash run_scripts/verify_gpu.sh --device cpu     the same steps without a GPU, on the locked CPU stack
#
# The steps, in this order: environment, copies, delivery, engine, ladder, job, qwen3, experts, megatron and
# weight-updates. `async-pipeline verify-gpu --help` says what each shows, needs and may take. Steps whose part is
# missing are not run, and the report says why. Settings:
#   ASYNC_PIPELINE_PYTHON   the interpreter (default: .venv-gpu's, otherwise .venv's, otherwise python3; with
#                           --device cpu, .venv's goes first)
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=run_scripts/common.sh
source "$ROOT/run_scripts/common.sh"
if help_wanted "$@"; then
  print_header "${BASH_SOURCE[0]}"
  exit
fi

cd "$ROOT"
DEVICE=""
for argument in "$@"; do
  case "$argument" in cpu | --device=cpu) DEVICE=cpu ;; esac
done
PYTHON="$(find_interpreter "$ROOT" "$DEVICE")"
# shellcheck source=run_scripts/cpu_env.sh
[ -z "$DEVICE" ] || source run_scripts/cpu_env.sh
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m recipe.async_pipeline verify-gpu "$@"
