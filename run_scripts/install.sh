#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Install a stack for GPUs: verl's extras at the pinned version, the patches, and this package.
#
#   bash run_scripts/install_TRAINER_ENGINE.sh [--dry-run | --resolve]
#
# --dry-run prints the commands. --resolve asks the package index whether the versions fit together, and installs
# nothing; it leaves out the packages that verl takes from other places (gpu.overrides.txt). Settings:
#   VENV        the virtual environment (default: .venv-gpu in the checkout, which the other scripts prefer; for
#               another one, name its interpreter to them in ASYNC_PIPELINE_PYTHON)
#   PYTHON      the version of Python (default: 3.12, the one that verl's wheels are built for)
#   VERL_DIR    a git clone of verl at the pinned tag, instead of the published source
# Requires uv. With a clone, verl's uv.lock decides about every version. Without it, uv resolves verl's extras; FSDP
# with vLLM gets the versions that the tests run (gpu.tested.txt).
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=run_scripts/common.sh
source "$ROOT/run_scripts/common.sh"
if help_wanted "$@"; then
  print_header "${BASH_SOURCE[0]}"
  exit
fi

VENV="${VENV:-$ROOT/.venv-gpu}"
VERSION="$(sed -n 's/^version: //p' "$ROOT/patches/PIN")"
TREE="${VERL_DIR:-$ROOT/.cache/verl/verl-$VERSION}"
OVERRIDES="$ROOT/run_scripts/gpu.overrides.txt"

die() {
  printf 'install: %s\n' "$*" >&2
  exit 2
}

TRAINER="${1:-}" ENGINE="${2:-}" MODE="${3:-}"
[ "$#" -le 3 ] || die "one option at most, got ${*:3}"
case "$TRAINER $ENGINE" in
  "fsdp vllm" | "fsdp sglang" | "megatron vllm" | "megatron sglang") ;;
  *) die "run one of run_scripts/install_{fsdp,megatron}_{vllm,sglang}.sh" ;;
esac
case "$MODE" in
  "" | --dry-run | --resolve) ;;
  *) die "the options are --dry-run and --resolve, got $MODE" ;;
esac

say() { printf 'install: %s\n' "$*" >&2; }

# version_in FILE NAME: print the version of NAME, or of its CPU build, that a file requires.
version_in() { sed -n "s/^[ \"]*$2\(-cpu\)\{0,1\}==\([0-9.]*\).*/\2/p" "$1" | head -n 1; }
# versions_in FILE: print its versions of the engine and of torch.
versions_in() { printf '%s %s, torch %s' "$ENGINE" "$(version_in "$1" "$ENGINE")" "$(version_in "$1" torch)"; }

run() {
  if [ "$MODE" = --dry-run ]; then
    printf '%q ' "$@"
    printf '\n'
  else
    "$@"
  fi
}

[ "$MODE" = --dry-run ] || command -v uv >/dev/null || die "no uv found; install it, for example with pip"
cd "$ROOT"

PATCH=("$VENV/bin/python" -m recipe.async_pipeline patch)
run uv venv --allow-existing --python "${PYTHON:-3.12}" "$VENV"
# `patch fetch` downloads with pip, which builds the metadata of verl's source with setuptools.
run uv pip install --python "$VENV/bin/python" pip setuptools
if [ -n "${VERL_DIR:-}" ]; then
  run "${PATCH[@]}" fetch --verl-dir "$TREE"
else
  run "${PATCH[@]}" fetch
fi

TESTS="the tests run $(versions_in "$ROOT/run_scripts/cpu.in.txt")"
SYNC=(env UV_PROJECT_ENVIRONMENT="$VENV" uv sync --project "$TREE" --extra "$TRAINER" --extra "$ENGINE")
if [ -f "$TREE/uv.lock" ]; then
  SYNC+=(--frozen)
  say "the versions of verl's uv.lock; $TESTS"
elif [ "$TRAINER $ENGINE" = "fsdp vllm" ]; then
  OVERRIDES="$ROOT/run_scripts/gpu.tested.txt"
  SYNC=(uv pip install --python "$VENV/bin/python" --no-sources --override "$OVERRIDES" -e "${TREE}[fsdp,vllm]")
  say "$(versions_in "$OVERRIDES"), as the tests, without flash-attn (docs/gpus.md)"
elif [ -f "$TREE/pyproject.toml" ]; then
  # They need wheels that are built for verl's torch: SGLang's kernels; for Megatron apex and transformer-engine.
  say "verl's $(versions_in "$TREE/pyproject.toml"); $TESTS (docs/gpus.md)"
fi

if [ "$MODE" = --resolve ]; then
  exec uv pip compile "$TREE/pyproject.toml" --extra "$TRAINER" --extra "$ENGINE" --no-sources \
    --override "$OVERRIDES" --python "$VENV/bin/python" --python-version 3.12 --python-platform x86_64-manylinux_2_34 --no-annotate
fi

run "${PATCH[@]}" apply --verl-dir "$TREE"
run "${SYNC[@]}"
run uv pip install --python "$VENV/bin/python" -e "${ROOT}[agentic]"
run "$VENV/bin/async-pipeline" doctor
