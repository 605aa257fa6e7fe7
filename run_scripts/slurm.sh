#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Start Ray on the nodes of a Slurm job, check every node, and run one of the training scripts. Not verified on GPUs.
#
#   sbatch --nodes=4 --gpus-per-node=8 run_scripts/slurm.sh fsdp_vllm_dense.sh data.train_files=... [hydra overrides]
#   bash run_scripts/slurm.sh --explain fsdp_vllm_dense.sh ...     says what that would be on two nodes of 8 devices
#
# The first half of the nodes trains and the other half generates, unless the overrides say otherwise. Submit it in
# the checkout, on a file system that the nodes share. Settings:
#   ASYNC_PIPELINE_PYTHON   the interpreter, at the same path on all nodes (default: .venv-gpu's of the checkout,
#                           otherwise .venv's, otherwise python3)
#   PORT                    of Ray's head (default: 6379)
#   JOIN_S                  seconds for all nodes to join (default: 300)
#SBATCH --job-name=async_pipeline
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
set -euo pipefail

# Slurm runs a copy of this file, so the checkout is where the job was submitted.
ROOT="${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/..}"
if [ ! -f "$ROOT/run_scripts/common.sh" ]; then
  echo "slurm.sh: submit it in the checkout; $ROOT has no run_scripts/" >&2
  exit 2
fi
ROOT="$(cd "$ROOT" && pwd)"
# shellcheck source=run_scripts/common.sh
source "$ROOT/run_scripts/common.sh"
if help_wanted "$@"; then
  print_header "${BASH_SOURCE[0]}"
  exit
fi

EXPLAIN=()
if [ "${1:-}" = --explain ]; then
  EXPLAIN=(--explain)
  shift
fi
SCRIPT="$ROOT/run_scripts/${1:-}"
if [ "$#" -eq 0 ] || [ ! -f "$SCRIPT" ]; then
  echo "slurm.sh: the first argument must be a script of run_scripts/, got '${1:-}'; --help shows how" >&2
  exit 2
fi
shift

NODES="${SLURM_JOB_NUM_NODES:-2}"
DEVICES="${SLURM_GPUS_ON_NODE:-8}"
PYTHON="$(find_interpreter "$ROOT")"
TRAINING=$((NODES / 2))
if [ "$TRAINING" -eq 0 ]; then
  echo "slurm.sh: --nodes must be at least 2, got $NODES; on one node run $SCRIPT itself" >&2
  exit 2
fi
SIZES=(
  "trainer.nnodes=$TRAINING" "trainer.n_gpus_per_node=$DEVICES"
  "actor_rollout_ref.rollout.nnodes=$((NODES - TRAINING))" "actor_rollout_ref.rollout.n_gpus_per_node=$DEVICES"
)
export ASYNC_PIPELINE_PYTHON="$PYTHON"
[ "${#EXPLAIN[@]}" -eq 0 ] || exec bash "$SCRIPT" --explain "${SIZES[@]}" "$@"

# Ray refuses calls without the token of its cluster; srun passes the environment on.
RAY_AUTH_TOKEN="${RAY_AUTH_TOKEN:-$("$PYTHON" -c 'import secrets; print(secrets.token_hex(32))')}"
export RAY_AUTH_TOKEN
mapfile -t NAMES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
HEAD="${NAMES[0]}"
IP="$(srun --overlap --nodes=1 --ntasks=1 -w "$HEAD" hostname --ip-address | awk '{print $1}')"
export RAY_ADDRESS="$IP:${PORT:-6379}"

RAY=("$PYTHON" -m ray.scripts.scripts start "--num-gpus=$DEVICES" --block)
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
srun --overlap --nodes=1 --ntasks=1 -w "$HEAD" \
  env -u RAY_ADDRESS "${RAY[@]}" --head "--node-ip-address=$IP" "--port=${PORT:-6379}" &
srun --overlap "--nodes=$((NODES - 1))" "--ntasks=$((NODES - 1))" -x "$HEAD" "${RAY[@]}" "--address=$RAY_ADDRESS" &

# The doctor examines the nodes that have joined, so it needs the number of all nodes.
DEADLINE=$((SECONDS + ${JOIN_S:-300}))
until FOUND="$("$PYTHON" -m recipe.async_pipeline doctor --cluster "$RAY_ADDRESS" --nodes "$NODES" 2>&1)"; do
  if [ "$SECONDS" -gt "$DEADLINE" ]; then
    printf '%s\n' "$FOUND" >&2
    exit 1
  fi
  sleep 5
done
printf '%s\n' "$FOUND"
bash "$SCRIPT" "${SIZES[@]}" "$@"
