#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Unpack the Python of other versions of the engines, for the nightly tests that compare them.
#
#   bash run_scripts/engine_trees.sh                            all versions of the tests
#   bash run_scripts/engine_trees.sh vllm-0.24.0 sglang-0.5.18  the named ones
#
# Each goes to .cache/engines/ENGINE-VERSION, or to the folder that ASYNC_PIPELINE_ENGINE_TREES names. A tree that is
# there is left alone. The wheels are deleted again; compiled libraries are not unpacked.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=run_scripts/common.sh
source "$ROOT/run_scripts/common.sh"
if help_wanted "$@"; then
  print_header "${BASH_SOURCE[0]}"
  exit
fi
TREES="${ASYNC_PIPELINE_ENGINE_TREES:-$ROOT/.cache/engines}"
PYTHON="${ASYNC_PIPELINE_TEST_PYTHON:-$ROOT/.venv/bin/python}"
[ "$#" -gt 0 ] || set -- vllm-0.24.0 vllm-0.32.0 vllm-0.33.0 sglang-0.5.18 sglang-0.5.23

for tree in "$@"; do
  engine="${tree%-*}" version="${tree##*-}"
  [ -d "$TREES/$tree/$engine" ] && continue
  part="$(mktemp -d "${TMPDIR:-/tmp}/engine-tree.XXXXXX")"
  trap 'rm -rf "$part"' EXIT
  "$PYTHON" -m pip download -q --no-deps --only-binary :all: --platform manylinux_2_34_x86_64 \
    --platform manylinux_2_28_x86_64 -d "$part" "$engine==$version"
  mkdir -p "$TREES"
  "$PYTHON" - "$part" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

folder = Path(sys.argv[1])
(wheel,) = folder.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(folder / "tree", [n for n in archive.namelist() if not n.endswith(".so")])
PYTHON
  mv "$part/tree" "$TREES/$tree"
  rm -rf "$part"
  echo "$tree: $(du -sh "$TREES/$tree" | cut -f1)"
done
