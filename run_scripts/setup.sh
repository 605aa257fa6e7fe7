#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set up a CPU machine: .venv with the locked stack, verl fetched and patched, both importable.
#
#   bash run_scripts/setup.sh
#   bash run_scripts/setup.sh --engine vllm-0.32   .cache/venvs/vllm-0.32 instead of .venv: the same stack with another
#                                                  release of an engine (run_scripts/engines/)
#
# A step is skipped if its inputs have not changed, so a second run takes a second or two. Settings:
#   PYTHON                      the interpreter (default: python3.11, the one that the lock was resolved for)
#   VERL_DIR                    a git clone of verl at the pinned tag, instead of the published source
#   ASYNC_PIPELINE_TORCH_INDEX  a package index with torch's CPU build, where pip's own settings offer none
#   ASYNC_PIPELINE_INSTALLER    uv (default) or pip
# pip's settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, pip.conf) are honoured by both.
set -euo pipefail

# Without links: a folder that is reached by a link is the same folder.
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# shellcheck source=run_scripts/common.sh
source "$ROOT/run_scripts/common.sh"
if help_wanted "$@"; then
  print_header "${BASH_SOURCE[0]}"
  exit
fi
ENGINES="$ROOT/run_scripts/engines"
ENGINE=""
if [ "${1:-}" = --engine ]; then
  ENGINE="${2:-}"
  if [ "$#" -ne 2 ] || [ ! -f "$ENGINES/$ENGINE.txt" ]; then
    echo "setup.sh: --engine must be one of $(basename -s .txt "$ENGINES"/*.txt | paste -sd ' '), got '${*:2}'" >&2
    exit 2
  fi
elif [ "$#" -gt 0 ]; then
  echo "setup.sh: the options are --engine NAME and --help, got $1" >&2
  exit 2
fi

VENV="$ROOT/.venv"
LOCK="$ROOT/run_scripts/cpu.lock.txt"
MEGATRON="$ROOT/run_scripts/cpu.megatron.txt"
VISION="$ROOT/run_scripts/cpu_torchvision.py"
STAMPS="$ROOT/.cache/setup"
ONE_AT_A_TIME="$STAMPS/lock"
STEPS=6
cd "$ROOT"
if [ -n "$ENGINE" ]; then
  VENV="$ROOT/.cache/venvs/$ENGINE"
  STAMPS="$STAMPS/$ENGINE"
fi
LOG="$STAMPS/setup.log"
mkdir -p "$STAMPS"

# Two concurrent set-ups would overwrite each other.
if command -v flock >/dev/null; then
  exec 9>"$ONE_AT_A_TIME"
  flock 9
fi
: >"$LOG"

if [ -n "$ENGINE" ]; then
  # The lines of the engine's file take the place of the lock's, by name.
  awk -F== '{ name = $1; sub(/\[.*/, "", name) } NR == FNR { if (NF > 1) { own[name]; print } next } !(name in own)' \
    "$ENGINES/$ENGINE.txt" "$LOCK" >"$STAMPS/lock.txt"
  LOCK="$STAMPS/lock.txt"
fi

die() {
  printf '\nsetup: %s\n' "$*" >&2
  exit 1
}

# A dot every five seconds. It waits in the shell itself: a `sleep` would outlive it and hold our output open.
tick() {
  exec 7<> <(:)
  while :; do
    read -r -t 5 -u 7 || true
    printf '.'
  done
}

TICKER=""
stop_ticker() {
  [ -z "$TICKER" ] || { kill "$TICKER" && wait "$TICKER"; } 2>/dev/null || true
  TICKER=""
}
trap stop_ticker EXIT

# step N TITLE STAMP FUNCTION: run FUNCTION unless its stamp file holds STAMP; its output goes to the log.
step() {
  local number="$1" title="$2" stamp="$3" function="$4"
  local file="$STAMPS/$function" started=$SECONDS status
  printf '[%s/%s] %s ... ' "$number" "$STEPS" "$title"
  if [ -f "$file" ] && [ "$(cat "$file")" = "$stamp" ]; then
    printf 'up to date\n'
    return
  fi
  rm -f "$file"
  tick &
  TICKER=$!
  # Not "if ! (...)": there bash would switch `set -e` off inside as well.
  set +e
  (
    set -e
    "$function"
  ) >>"$LOG" 2>&1
  status=$?
  set -e
  stop_ticker
  if [ "$status" -ne 0 ]; then
    printf ' failed after %s s\n' "$((SECONDS - started))"
    tail -n 15 "$LOG" >&2
    die "step $number failed; the whole log is $LOG"
  fi
  printf '%s' "$stamp" >"$file"
  printf ' %s s\n' "$((SECONDS - started))"
}

hash_of() { cat "$@" | git hash-object --stdin; }

# A Python of a version that the lock can be installed on. If it is that of a virtual environment, such as the one
# that is activated and about to be replaced, the one that the environment was made from.
find_python() {
  local candidate base
  for candidate in ${PYTHON:-python3.11 python3 python3.12}; do
    base="$("$candidate" -c 'import os, sys; print(os.path.realpath(sys._base_executable))' 2>/dev/null)" || continue
    if "$base" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then
      printf '%s\n' "$base"
      return
    fi
  done
  return 1
}

make_venv() {
  local python
  if [ -L "$VENV" ] || mountpoint -q "$VENV" 2>/dev/null; then
    die "$VENV is a link or a mount of another folder, which would be emptied; remove it, or put an environment there"
  fi
  python="$(find_python)" || die "no Python 3.11 or 3.12 found; install python3.11, or set PYTHON to one"
  rm -rf "$VENV" "$STAMPS/install_lock" "$STAMPS/install_editable" "$STAMPS/compile_all"
  "$python" -m venv "$VENV"
}

# By the interpreter, never by bin/pip: that names in its first line the folder it was made in.
pip() { "$VENV/bin/python" -m pip "$@"; }

# uv reads neither pip.conf nor PIP_*: hand it what pip would use.
export_pip_settings_to_uv() {
  local index extra links
  index="${PIP_INDEX_URL:-$(pip config get global.index-url 2>/dev/null || true)}"
  extra="${PIP_EXTRA_INDEX_URL:-$(pip config get global.extra-index-url 2>/dev/null || true)}"
  links="${PIP_FIND_LINKS:-$(pip config get global.find-links 2>/dev/null || true)}"
  [ -z "$index" ] || export UV_DEFAULT_INDEX="$index"
  # A local folder that is missing is a warning for pip and an error for uv, so only remote ones are passed on.
  extra="$(tr ' ' '\n' <<<"$extra" | grep -v '^file:' | tr '\n' ' ' || true)"
  [ -z "${extra// /}" ] || export UV_INDEX="$extra"
  links="$(tr -s ' \n' ',' <<<"$links")"
  [ -z "${links//,/}" ] || export UV_FIND_LINKS="${links%,}"
}

install() {
  if [ "${ASYNC_PIPELINE_INSTALLER:-uv}" = uv ] && [ -x "$VENV/bin/uv" ]; then
    (export_pip_settings_to_uv && "$VENV/bin/uv" pip install --python "$VENV/bin/python" --no-deps "$@") && return
    echo "setup: uv could not; trying pip"
  fi
  pip install --no-deps "$@"
}

# vLLM's CPU build needs torch's: first where one was named, then where pip looks anyway. Only if that offers
# no build that is marked as CPU, the plain version (on some platforms that is the CPU build).
install_torch() {
  local version
  version="$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' "$LOCK")"
  if [ -n "${ASYNC_PIPELINE_TORCH_INDEX:-}" ]; then
    pip install --no-deps --index-url "$ASYNC_PIPELINE_TORCH_INDEX" "torch==$version+cpu" && return
  fi
  install "torch==$version+cpu" && return
  echo "setup: no CPU build of torch $version; if what follows downloads gigabytes, stop and set"
  echo "setup: ASYNC_PIPELINE_TORCH_INDEX to PyTorch's index of CPU builds"
  install "torch==$version"
}

install_lock() {
  if [ "${ASYNC_PIPELINE_INSTALLER:-uv}" = uv ]; then
    pip install --no-deps "$(grep '^uv==' "$LOCK")" || echo "setup: no uv; pip alone will do"
  fi
  install_torch
  grep -v '^torch==' "$LOCK" >"$STAMPS/lock-without-torch.txt"
  install -r "$STAMPS/lock-without-torch.txt"
  install -r "$MEGATRON"
  declare_vision_operators
}

# Python reads each .pth file of its packages when it starts.
declare_vision_operators() {
  local packages
  packages="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  cp "$VISION" "$packages/"
  echo "import $(basename "$VISION" .py)" >"$packages/cpu_torchvision.pth"
}

fetch_verl() {
  if [ -n "${VERL_DIR:-}" ]; then
    "$VENV/bin/python" -m recipe.async_pipeline patch fetch --verl-dir "$VERL_DIR"
  else
    "$VENV/bin/python" -m recipe.async_pipeline patch fetch
  fi
}

apply_patches() {
  "$VENV/bin/python" -m recipe.async_pipeline patch apply
}

install_editable() {
  pip install --no-deps --no-build-isolation -e "$VERL_TREE" -e "$ROOT"
}

# Without byte code (PYTHONDONTWRITEBYTECODE), each of the dozen processes of a run compiles torch, vLLM and
# verl again, which is half of its start-up. A few files of the stack are templates and do not compile.
compile_all() {
  "$VENV/bin/python" -m compileall -q -j 0 "$VENV/lib" "$VERL_TREE/verl" recipe || true
}

VERL_TREE="$ROOT/.cache/verl/verl-$(sed -n 's/^version: //p' patches/PIN)"
"$VENV/bin/python" -c "" 2>/dev/null || rm -f "$STAMPS/make_venv"
[ -d "$VERL_TREE" ] || rm -f "$STAMPS/fetch_verl" "$STAMPS/install_editable"

step 1 "virtual environment" "$VENV" make_venv
step 2 "locked packages, about 2 GB" "$(hash_of "$LOCK" "$MEGATRON" "$VISION")" install_lock
step 3 "verl source, hash checked" "$(hash_of patches/PIN) ${VERL_DIR:-}" fetch_verl
# No stamp: the files themselves show whether the tree is patched, and checking them takes under a second.
step 4 "verl patches" "$$" apply_patches
step 5 "verl and async_pipeline, editable" "$ROOT $(hash_of setup.py)" install_editable
step 6 "byte code" "$VENV $(hash_of "$LOCK" "$MEGATRON" patches/*)" compile_all
