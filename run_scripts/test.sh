#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Install what is missing, then run the checks in stages and print the time of each.
#
#   bash run_scripts/test.sh                     lint, unit and engine, next to e2e
#   bash run_scripts/test.sh --quick             lint, and the unit tests without the slow ones
#   bash run_scripts/test.sh --unit --engine     the named tiers, in this order
#   bash run_scripts/test.sh tests/core -k ...   pytest's own arguments: one run with just these
#
#   --checks   ruff, mypy, codespell and shellcheck
#   --lint     the same, and the wheel: built, installed and run
#   --unit     tests that load neither torch's engines nor verl; without the stack, the ones that import it are
#              skipped
#   --engine   tests that load verl or vLLM in the test process (marker real_engine)
#   --e2e      whole jobs on the real stack (marker e2e)
#   --nightly  the slowest whole jobs (marker nightly); in no default tier
#   --nightly-part
#              a tenth of them: the tests that have waited longest (tests/nightly.tsv, which it updates)
#
# Settings:
#   ASYNC_PIPELINE_NIGHTLY_PART  `commit` instead of `oldest`: another tenth with each commit that leaves the table
#                                as it is
#   ASYNC_PIPELINE_TEST_PYTHON   an interpreter to test with, instead of .venv; skips setup.sh
#   ASYNC_PIPELINE_TEST_LIMIT_S  seconds after which a whole job counts as a hang (default: 1500)
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"

QUICK="not e2e and not real_engine and not nightly and not slow"
UNIT="not e2e and not real_engine and not nightly"
ENGINE="real_engine and not e2e and not nightly"
E2E="e2e and not nightly"

usage() { sed -n '3,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }

# stage NAME COMMAND...: run the command, print the name and the seconds that it took.
stage() {
  local name="$1" started=$SECONDS status=0
  shift
  printf '\n== %s\n' "$name"
  "$@" || status=$?
  printf '== %s: %s, %s s\n' "$name" "$([ "$status" -eq 0 ] && echo passed || echo FAILED)" "$((SECONDS - started))"
  return "$status"
}

pytest() { "$PYTHON" -m pytest "$@"; }

lint() {
  stage "ruff check" "$PYTHON" -m ruff check .
  stage "ruff format" "$PYTHON" -m ruff format --check .
  stage "codespell" "$BIN/codespell"
  stage "shellcheck" "$BIN/shellcheck" .ci/run run_scripts/*.sh
  stage "mypy" "$PYTHON" -m mypy
}

TIERS=()
while [ "$#" -gt 0 ]; do
  case "$1" in
    --help | -h)
      usage
      exit
      ;;
    --quick | --checks | --lint | --unit | --engine | --e2e | --nightly | --nightly-part) TIERS+=("${1#--}") ;;
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
  bash run_scripts/setup.sh
fi
PYTHON="$(command -v "$PYTHON")"
BIN="$(dirname "$PYTHON")"
# shellcheck source=run_scripts/cpu_env.sh
source run_scripts/cpu_env.sh
# Without byte code, pytest rewrites every test file and Python compiles this package in each process: 7 s a start.
unset PYTHONDONTWRITEBYTECODE

if [ "$#" -gt 0 ]; then
  exec "$PYTHON" -m pytest "$@"
fi

# side_by_side COMMAND... -- TIERS...: run the command, and the tiers next to it, whose output is shown at the end. With
# a separate folder for Ray, neither side finds the clusters of the other. `set -m` gives the tiers a process group;
# without it, bash would start them with SIGINT ignored, which children inherit.
side_by_side() {
  local folder status=0 command=()
  while [ "$1" != -- ]; do
    command+=("$1")
    shift
  done
  shift
  folder="$(mktemp -d)"
  export ASYNC_PIPELINE_TEST_PYTHON="$PYTHON"
  set -m
  RAY_TMPDIR="$folder" bash run_scripts/test.sh "$@" >"$folder/log" 2>&1 &
  OTHERS=$!
  set +m
  trap 'kill -- "-$OTHERS" 2>/dev/null || true' EXIT
  "${command[@]}" || status=$?
  wait "$OTHERS" || status=$?
  cat "$folder/log"
  rm -rf "$folder"
  return "$status"
}

# The first three tiers use one core, and the jobs of e2e keep more than one busy only while they start.
[ "${#TIERS[@]}" -gt 0 ] || side_by_side bash run_scripts/test.sh --e2e -- --lint --unit --engine

for tier in "${TIERS[@]}"; do
  case "$tier" in
    quick) side_by_side stage "unit, without the slow" pytest -q -m "$QUICK" -- --checks ;;
    checks) lint ;;
    lint)
      lint
      stage "wheel" bash run_scripts/wheel.sh "$PYTHON"
      ;;
    unit)
      # Without it, and without Chromium, two tests are skipped.
      bash run_scripts/trace_processor.sh || true
      stage "unit" pytest -m "$UNIT"
      ;;
    engine) stage "engine" pytest -m "$ENGINE" ;;
    e2e) stage "e2e" pytest --durations=12 -m "$E2E" ;;
    nightly) stage "nightly" pytest --durations=12 -m nightly ;;
    nightly-part)
      stage "part of nightly" pytest -m nightly --nightly-part "${ASYNC_PIPELINE_NIGHTLY_PART:-oldest}"
      ;;
  esac
done
printf '\nall passed, %s s\n' "$SECONDS"
