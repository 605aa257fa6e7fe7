#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make everything current that is derived from other files: run it after a merge, and look at `git diff`.
#
#   bash run_scripts/fix.sh
#
#   lint      what ruff can fix, such as the order of imports
#   format    ruff's formatter
#   knobs     configs/async_pipeline.yaml and docs/configuration.md, from the classes of the configuration
#   contract  patches/contract.json, engines.json and state.json, from the code, verl, the installed engines and patches
#   keys      patches/keys.tsv, from the code and verl
#   copies    contrib/verl_recipe/async_pipeline/REQUIRED_VERL.txt, from the package's
#   docs      tables of docs/agents.md and counts of README.md, from the code
#   nightly   tests/nightly.tsv, of which a merge may keep two rows for a test
#
# The other steps run if one fails; the status is 1, and the last line names it. ASYNC_PIPELINE_PYTHON is the
# interpreter (default: that of .venv).
set -uo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=run_scripts/common.sh
source "$ROOT/run_scripts/common.sh"
if help_wanted "$@"; then
  print_header "${BASH_SOURCE[0]}"
  exit
fi
if [ "$#" -gt 0 ]; then
  echo "fix.sh: there are no options but --help, got $*" >&2
  exit 2
fi
cd "$ROOT" || exit 2
PYTHON="$(find_interpreter "$ROOT" cpu)" || exit 2
# shellcheck source=run_scripts/cpu_env.sh
source "$ROOT/run_scripts/cpu_env.sh"

FAILED=()
# step NAME COMMAND...: run the command, and note its name if it fails.
step() {
  local name="$1"
  shift
  printf '== %s\n' "$name"
  "$@" || FAILED+=("$name")
}

step lint "$PYTHON" -m ruff check --fix --quiet .
step format "$PYTHON" -m ruff format .
step knobs "$PYTHON" -m recipe.async_pipeline.tools.explain.reference
step contract "$PYTHON" -m recipe.async_pipeline.tools.contract.record
step keys "$PYTHON" -m recipe.async_pipeline.tools.verl_keys.verdicts
step copies cp recipe/async_pipeline/REQUIRED_VERL.txt contrib/verl_recipe/async_pipeline/
step docs "$PYTHON" -m tests.derived_docs
step nightly "$PYTHON" -m tests.nightly
git --no-pager diff --stat

if [ "${#FAILED[@]}" -gt 0 ]; then
  echo "failed: ${FAILED[*]}" >&2
  exit 1
fi
