# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Source this file: how the scripts find their interpreter, and print their header as help.

# find_interpreter ROOT [cpu]: print ASYNC_PIPELINE_PYTHON, otherwise the Python of ROOT's .venv-gpu (install_*.sh),
# otherwise that of its .venv (setup.sh), otherwise python3. With `cpu`, .venv goes before .venv-gpu.
find_interpreter() {
  local folder folders=(.venv-gpu .venv)
  [ "${2:-}" != cpu ] || folders=(.venv .venv-gpu)
  if [ -n "${ASYNC_PIPELINE_PYTHON:-}" ]; then
    printf '%s\n' "$ASYNC_PIPELINE_PYTHON"
    return
  fi
  for folder in "${folders[@]}"; do
    if [ -x "$1/$folder/bin/python" ]; then
      printf '%s\n' "$1/$folder/bin/python"
      return
    fi
  done
  command -v python3 && return
  echo "no Python found; run setup.sh or one of install_*.sh, or set ASYNC_PIPELINE_PYTHON" >&2
  return 2
}

# help_wanted ARGUMENT...: whether one of them asks for help.
help_wanted() {
  local argument
  for argument in "$@"; do
    case "$argument" in --help | -h) return 0 ;; esac
  done
  return 1
}

# print_header SCRIPT: print the comment at its top.
print_header() { sed -n '3,/^[^#]/{/^#SBATCH/d;s/^# \{0,1\}//p}' "$1"; }
