#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build the sdist, build the wheel from it, install the wheel into an empty environment and run it from there.
#
#   bash run_scripts/wheel.sh [PYTHON]    PYTHON: with setuptools and our requirements (default: .venv's)
#
# Nothing is downloaded: the environment sees PYTHON's packages, but neither the checkout nor an editable install
# of it. Set OUT to keep the two files.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${1:-$ROOT/.venv/bin/python}"
VERL_TREE="$ROOT/.cache/verl/verl-$(sed -n 's/^version: //p' "$ROOT/patches/PIN")"
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

"$PYTHON" -m venv --without-pip "$WORK/venv"
"$PYTHON" -m pip -q --python "$WORK/venv/bin/python" install --no-deps --no-index "$WORK"/dist/*.whl
# The path files in PYTHON's site-packages are not read from here, so its editable installs stay invisible.
SITE="$("$WORK/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
"$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$SITE/locked.pth"
[ ! -d "$VERL_TREE" ] || echo "$VERL_TREE" >>"$SITE/locked.pth"

cd "$WORK"
"$WORK/venv/bin/python" - "$WORK" "$ROOT" <<'CHECK'
import sys
from pathlib import Path

import recipe.async_pipeline as package
from recipe.async_pipeline.patching import series

work, root = map(Path, sys.argv[1:])
assert Path(package.__file__).is_relative_to(work), f"{package.__file__} is not the wheel's"
folder = Path(series.patches_dir())
assert folder.is_relative_to(work), f"the patches come from {folder}, not from the wheel"
names = {path.name for path in folder.iterdir()}
missing = {path.name for path in (root / "patches").iterdir()} - names
assert not missing, f"the wheel lacks patches/: {sorted(missing)}"
CHECK
VERSION="$("$WORK/venv/bin/async-pipeline" --version)"
echo "$VERSION"
grep -qF "${VERSION##* }" <<<"$(ls dist)" || { echo "wheel.sh: dist/ has $(ls dist), --version says $VERSION" >&2; exit 1; }
"$WORK/venv/bin/async-pipeline" doctor
[ -z "${OUT:-}" ] || cp dist/* "$OUT"
