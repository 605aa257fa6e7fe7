#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets up what is missing, then runs the tests: the quick ones first, the end-to-end ones after.
#
#   bash run_scripts/test.sh                    all but the slowest
#   bash run_scripts/test.sh -m nightly         those: long jobs that prove what the shorter ones rest on
#   bash run_scripts/test.sh tests/core -k ...  pytest's own arguments: one run, with just these
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
bash run_scripts/setup.sh
# shellcheck source=run_scripts/cpu_env.sh
source run_scripts/cpu_env.sh

PYTHON="$ROOT/.venv/bin/python"
if [ "$#" -gt 0 ]; then
  exec "$PYTHON" -m pytest "$@"
fi

bash run_scripts/trace_processor.sh || true  # without it, and without Chromium, two tests are skipped

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
"$PYTHON" -m pytest -m "not e2e and not real_engine and not nightly"
"$PYTHON" -m pytest -m "real_engine and not e2e and not nightly"
"$PYTHON" -m pytest --durations=12 -m "e2e and not nightly"
