#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build the sdist, build the wheel from it, install the wheel into an empty environment and run it from there.
#
#   bash run_scripts/wheel.sh [PYTHON]    PYTHON: with setuptools and our requirements (default: .venv's)
#
# Nothing is downloaded: the environment sees PYTHON's packages, but neither the checkout nor an editable install
# of it. Settings:
#   OUT        keep the two files in this folder
#   INTO       keep the environment, as this folder
#   VERL_TREE  the verl that it sees (default: the fetched one, which is patched)
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=run_scripts/common.sh
source "$ROOT/run_scripts/common.sh"
if help_wanted "$@"; then
  print_header "${BASH_SOURCE[0]}"
  exit
fi
case "${1:-}" in
  -*)
    echo "wheel.sh: the argument is an interpreter, and there are no options but --help, got $1" >&2
    exit 2
    ;;
esac

PYTHON="${1:-$ROOT/.venv/bin/python}"
VERL_TREE="${VERL_TREE:-$ROOT/.cache/verl/verl-$(sed -n 's/^version: //p' "$ROOT/patches/PIN")}"
WORK="$(mktemp -d)"
trap 'rm -rf "$WORK"' EXIT
unset PYTHONPATH

# A copy of the tracked files: a build in the checkout would leave build/ and *.egg-info there.
mkdir "$WORK/source" "$WORK/dist"
(cd "$ROOT" && git ls-files -z | xargs -0 cp --parents -t "$WORK/source")
(cd "$WORK/source" && "$PYTHON" -c "
import sys
from setuptools.build_meta import build_sdist
build_sdist(sys.argv[1])
" "$WORK/dist" >"$WORK/log" 2>&1) || { cat "$WORK/log" >&2; exit 1; }
"$PYTHON" -m pip wheel -q --no-deps --no-build-isolation --no-index -w "$WORK/dist" "$WORK"/dist/*.tar.gz

VENV="${INTO:-$WORK/venv}"
"$PYTHON" -m venv --without-pip "$VENV"
"$PYTHON" -m pip -q --python "$VENV/bin/python" install --no-deps --no-index "$WORK"/dist/*.whl
# The path files in PYTHON's site-packages are not read from here, so its editable installs stay invisible.
SITE="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
[ ! -d "$VERL_TREE" ] || echo "$VERL_TREE" >"$SITE/locked.pth"
PACKAGES="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
echo "$PACKAGES" >>"$SITE/locked.pth"
# This one installs nothing; torchvision needs it.
[ ! -f "$PACKAGES/cpu_torchvision.pth" ] || cat "$PACKAGES/cpu_torchvision.pth" >>"$SITE/locked.pth"

cd "$WORK"
"$VENV/bin/python" - "$VENV" "$ROOT" <<'CHECK'
import sys
from pathlib import Path

import recipe.async_pipeline as package
from recipe.async_pipeline.installed.verl import patches_dir

venv, root = map(Path, sys.argv[1:])
assert Path(package.__file__).is_relative_to(venv), f"{package.__file__} is not the wheel's"
folder = Path(patches_dir())
assert folder.is_relative_to(venv), f"the patches come from {folder}, not from the wheel"
names = {path.name for path in folder.iterdir()}
missing = {path.name for path in (root / "patches").iterdir()} - names
assert not missing, f"the wheel lacks patches/: {sorted(missing)}"
CHECK
VERSION="$("$VENV/bin/async-pipeline" --version)"
echo "$VERSION"
grep -qF "${VERSION##* }" <<<"$(ls dist)" || { echo "wheel.sh: dist/ has $(ls dist), --version says $VERSION" >&2; exit 1; }

# What needs no run.
"$VENV/bin/async-pipeline" doctor
"$VENV/bin/async-pipeline" plan --profile training_bound --devices 2
if [ -d "$VERL_TREE" ]; then
  ASYNC_PIPELINE_TASK="$WORK/task" VERL_PLATFORM="${VERL_PLATFORM:-cpu}" "$VENV/bin/async-pipeline" explain \
    --config-path "$ROOT/configs" --config-name smoke_cpu trainer.v1.trainer_mode=async_pipeline
else
  echo "wheel.sh: explain needs a verl, and $VERL_TREE does not exist: not run"
fi
# A run in virtual time, for `report`; only its costs come from the tests.
mkdir "$WORK/invented"
cp -r "$WORK/source/tests" "$WORK/invented"
PYTHONPATH="$WORK/invented" "$VENV/bin/python" -c "
import sys
from pathlib import Path
from tests.observe.run_folder import RecordedTrainer, write_run
write_run(Path(sys.argv[1]), RecordedTrainer(max_lag=1, steps=6))
" "$WORK/run"
"$VENV/bin/async-pipeline" report "$WORK/run"
[ -s "$WORK/run/report.html" ] || { echo "wheel.sh: report wrote no page" >&2; exit 1; }
[ -z "${OUT:-}" ] || cp dist/* "$OUT"
