#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Install what is missing, then run the tests in tiers and print the time of each.
#
#   bash run_scripts/test.sh                     all default tiers, in three lanes side by side
#   bash run_scripts/test.sh --quick             style, checks, and the unit tests without the slow ones
#   bash run_scripts/test.sh --unit --engine     the named tiers, in this order
#   bash run_scripts/test.sh tests/core -k ...   pytest's own arguments: one run with just these
#
#   --style    ruff's rules of style, its formatter, codespell, shellcheck, and tests of how code and pages read
#              (marker style); without a tier, they are shown first and do not decide
#   --checks   ruff's rules about errors, and mypy
#   --lint     both, and the wheel: built, installed and run
#   --unit     tests that load neither torch's engines nor verl; without the stack, the ones that import it are
#              skipped
#   --engine   tests that load verl or vLLM in the test process (marker real_engine)
#   --e2e      whole jobs on the real stack (marker e2e)
#   --nightly  the slowest whole jobs (marker nightly); in no default tier
#   --nightly-part
#              a tenth of them: the tests that changed, then the ones that have waited longest
#              (tests/nightly.tsv, which it updates)
#
# A failed test runs once again, alone, if nothing else has failed: what passes then is listed as FLAKY. To end a run
# ends all of its processes, and prints the stacks of the tests that were running.
#
# Settings:
#   ASYNC_PIPELINE_TEST_PYTHON   an interpreter to test with, instead of .venv; skips setup.sh
#   ASYNC_PIPELINE_TEST_LIMIT_S  seconds after which a whole job counts as a hang (default: 1500)
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"

usage() { sed -n '3,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }

TIERS=()
while [ "$#" -gt 0 ]; do
  case "$1" in
    --help | -h)
      usage
      exit
      ;;
    --quick | --style | --checks | --lint | --unit | --engine | --e2e | --nightly | --nightly-part)
      TIERS+=("${1#--}")
      ;;
    *) break ;;
  esac
  shift
done
if [ "$#" -gt 0 ] && [ "${#TIERS[@]}" -gt 0 ]; then
  echo "test.sh: give tiers or pytest's arguments, not both: ${TIERS[*]} and $*" >&2
  exit 2
fi

PYTHON="${ASYNC_PIPELINE_TEST_PYTHON:-}"
if [ -z "$PYTHON" ]; then
  PYTHON="$ROOT/.venv/bin/python"
  # In a separate process group, which ends with this script.
  set -m
  bash run_scripts/setup.sh &
  SETUP=$!
  set +m
  trap 'kill -- "-$SETUP" 2>/dev/null; exit 143' INT TERM HUP
  wait "$SETUP"
  trap - INT TERM HUP
fi
PYTHON="$(command -v "$PYTHON")"
# shellcheck source=run_scripts/cpu_env.sh
source run_scripts/cpu_env.sh
# Without byte code, pytest rewrites every test file and Python compiles this package in each process: 7 s a start.
unset PYTHONDONTWRITEBYTECODE

if [ "$#" -gt 0 ]; then
  exec "$PYTHON" -m pytest "$@"
fi
exec "$PYTHON" -m tests.lanes "${TIERS[@]}"
