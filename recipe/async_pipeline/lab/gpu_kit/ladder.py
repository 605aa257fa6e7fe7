# SPDX-License-Identifier: Apache-2.0
"""The first rung of the ladder: `on_policy` does what verl's sync trainer does, step by step.

    python -m recipe.async_pipeline.lab.gpu_kit.ladder --folder F --tolerance T --json FILE -- OVERRIDE...

Both train from the same weights on responses with the same seeds. A response is the same in both runs only
if every version that wrote it is, so after a few steps any error of a weight update shows in the metrics.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...console import echo

STEPS = 3
COMPARED = (
    "actor/pg_loss",
    "actor/grad_norm",
    "critic/score/mean",
    "critic/advantages/max",
    "response_length/mean",
)
LOOP = "recipe.async_pipeline.lab.gpu_kit.seeded_loop.SeededLoop"
STOCK = "stock"
"""verl's name of the run of its sync trainer, and so of its file of metrics."""
Metrics = Sequence[Mapping[str, float]]
"""The metrics of each step."""


def differences(sync: Metrics, on_policy: Metrics) -> dict[str, float]:
    """Return the largest difference of each compared metric over all steps, relative to 1 or to the sync
    trainer's value if that is larger.

    Raises ValueError if the runs have different numbers of steps, or none.
    """
    if not sync or len(sync) != len(on_policy):
        raise ValueError(f"the sync trainer has made {len(sync)} steps, on_policy {len(on_policy)}")
    return {
        name: max((_difference(a[name], b[name]) for a, b in zip(sync, on_policy, strict=True)), key=_rank)
        for name in COMPARED
    }


def _difference(sync: float, on_policy: float) -> float:
    return abs(on_policy - sync) / max(1.0, abs(sync))


def _rank(difference: float) -> float:
    """No number is worse than any number."""
    return math.inf if math.isnan(difference) else difference


def metrics_in(file: Path) -> Metrics:
    """Return the steps in a file of verl's logger."""
    rows = (json.loads(line)["data"] for line in file.read_text(encoding="utf-8").splitlines())
    return [row for row in rows if COMPARED[0] in row]


def common_settings(folder: Path) -> list[str]:
    """Return the settings of both runs, after writing the file that they name."""
    loops = folder / "agents.json"
    loops.write_text(json.dumps([{"name": "seeded", "_target_": LOOP}]), encoding="utf-8")
    return [
        "actor_rollout_ref.rollout.name=vllm",
        # Without it, verl's own trainer joins whatever Ray runs on this machine.
        "++ray_kwargs.ray_init.address=local",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=seeded",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
    ]


def train(folder: Path, *settings: str) -> int:
    """Run one of the two and return its exit status."""
    watch = (sys.executable, "-m", "recipe.async_pipeline", "watch", "--")
    environment = {**os.environ, "VERL_FILE_LOGGER_ROOT": str(folder)}
    command = [*watch, sys.executable, "-m", "verl.trainer.main_ppo", *settings]
    return subprocess.run(command, env=environment).returncode


def main(arguments: Sequence[str]) -> int:
    """Run and compare both. Returns 1 if one fails or a metric differs by more than the tolerance, else 0."""
    parser = argparse.ArgumentParser(prog="gpu_kit.ladder")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tolerance", type=float, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("settings", nargs="+")
    args = parser.parse_args(arguments)
    args.folder.mkdir(parents=True, exist_ok=True)
    run_dir, common = args.folder / "run", [*args.settings, *common_settings(args.folder)]

    stock = ("actor_rollout_ref.rollout.nnodes=0", f"trainer.experiment_name={STOCK}")
    own = (
        "+async_pipeline=True",
        "+async_strategy=on_policy",
        f"trainer.v1.async_pipeline.run_dir={run_dir}",
    )
    for trainer, settings in (("verl's sync trainer", stock), ("on_policy", own)):
        if status := train(args.folder, *common, *settings):
            echo(f"the run with {trainer} ended with status {status}, so there is nothing to compare")
            return 1

    (sync,) = args.folder.rglob(f"{STOCK}.jsonl")
    found = differences(metrics_in(sync), metrics_in(run_dir / "metrics.jsonl"))
    report: dict[str, Any] = {"steps": STEPS, "tolerance": args.tolerance, "differences": found}
    args.json.write_text(json.dumps(report) + "\n", encoding="utf-8")
    wrong = {name: value for name, value in found.items() if not value <= args.tolerance}
    for name, value in wrong.items():
        echo(
            f"{name} differs by {value:.2g} from verl's sync trainer; at most {args.tolerance:g} is rounding"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
