#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make the virtual environment of a program that plays episodes, and print its interpreter. Nothing of the run is in it.
#
#   bash run_scripts/agent_venv.sh examples/openai_agent.txt
#
# It is made once for each content of the file, in .cache/agents. PYTHON is the interpreter (default: that of .venv).
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=run_scripts/common.sh
source "$ROOT/run_scripts/common.sh"
if help_wanted "$@"; then
  print_header "${BASH_SOURCE[0]}"
  exit
fi

if [ "$#" != 1 ] || [ ! -f "$1" ]; then
  echo "agent_venv.sh: the argument must be a file of requirements, got '${1:-}'" >&2
  exit 2
fi

REQUIREMENTS="$(realpath "$1")"
PYTHON="${PYTHON:-$ROOT/.venv/bin/python}"
NAME="$(basename "$1" .txt)-$(sha256sum <"$REQUIREMENTS" | cut -c1-12)"
VENV="$ROOT/.cache/agents/$NAME"

if [ ! -e "$VENV/ready" ]; then
  rm -rf "$VENV"
  "$PYTHON" -m venv "$VENV" >&2
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -r "$REQUIREMENTS" >&2
  touch "$VENV/ready"
fi
echo "$VENV/bin/python"
