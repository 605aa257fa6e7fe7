#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Show within minutes what of this package works on this machine, and write outputs/verify/gpu_report.html.
#
#   bash run_scripts/verify_gpu.sh [--gpus N] [--model PATH] [--only A,B] [--out DIR]
#   bash run_scripts/verify_gpu.sh --device cpu     the same steps without a GPU, on the locked CPU stack
#
# Steps whose part is missing are not run, and the report says why. Settings:
#   ASYNC_PIPELINE_PYTHON   the interpreter (default: .venv's, otherwise python3)
set -euo pipefail

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
  sed -n '3,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
  exit
fi

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
PYTHON="${ASYNC_PIPELINE_PYTHON:-}"
if [ -z "$PYTHON" ]; then
  PYTHON="$ROOT/.venv/bin/python"
  [ -x "$PYTHON" ] || PYTHON="$(command -v python3)"
fi
for argument in "$@"; do
  # shellcheck source=run_scripts/cpu_env.sh
  [ "$argument" != cpu ] || source run_scripts/cpu_env.sh
done
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m recipe.async_pipeline verify-gpu "$@"
