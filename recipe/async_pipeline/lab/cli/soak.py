# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline soak`: inject faults into a real run, and verify that nothing is lost."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, get_args

from ...console import echo
from ...errors import ConfigError
from ..bench.inputs.arms import hydra_overrides
from ..bench.inputs.workload import CONFIGS
from ..soak import judge, lake_agent, moods
from ..soak.faults import FAULTS, SoakTask
from ..soak.job import MARK, NOTICE_S, SoakJob, checkpoints_in, control_of, run_dir_in
from ..soak.nemesis import report, room_for, soak
from ..soak.small_disk import small_disk
from ..soak.surroundings import build_clock
from ..tasks.build import DistillSpec, Toy, ToySpec, ensure_toy
from ..tasks.calculator_task.calculator_build import CalculatorSpec
from ..tasks.model import ModelSpec

ENGINES = ("vllm", "sglang")
MIN_MINUTES = 1.0
SAVE_EVERY = 10
"""Optimizer steps between checkpoints."""
PUBLISH_S, REWARD_S, ENVIRONMENT_S, TOOL_S, AGENT_S, TEACHER_S = 20, 5, 15, 5, 30, 120
"""Short deadlines in seconds, so that a hang is detected soon."""
ENVIRONMENTS, AGENTS = 8, 4
"""Processes of environments and of agents at once; each imports gymnasium when it starts."""
PROMPTS, RESPONSES = 4, 4
"""Prompts of a step and responses to each, of tasks with environments, tools and agents: small steps, so that
a slow machine makes some between two faults."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline soak`."""
    kinds = "\n".join(f"  {name:15} {fault.text}" for name, fault in FAULTS.items())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"faults:\n{kinds}\n\nexit status: 0 no violation, 1 at least one violation, 2 user error"

    parser.add_argument(
        "--task",
        choices=get_args(SoakTask),
        default="addition",
        help="what the run learns; lake has environments that fail, calculator a tool, lake_agent a program "
        "that plays over HTTP, distill a teacher (default: %(default)s)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        metavar="M",
        help="duration in minutes, from the second step (default: %(default)g)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        metavar="S",
        help="seed of the order of faults and of their targets (default: %(default)s)",
    )
    parser.add_argument(
        "--faults",
        default="all",
        metavar="LIST",
        help="kinds of faults, separated by commas (default: %(default)s)",
    )

    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default=ENGINES[0],
        help="rollout engine; its processes are vLLM's engine cores or SGLang's schedulers "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the outcome as one JSON object; progress goes to stderr"
    )
    parser.add_argument(
        "--logs",
        type=Path,
        metavar="FOLDER",
        help="an empty or new folder for the run's files, which is kept (default: a temporary folder, "
        "deleted unless there is a violation)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the soak. Returns 0 without violations, else 1. Raises ConfigError if an option is invalid."""
    kinds = kinds_of(args.faults, args.task)
    if not MIN_MINUTES <= args.minutes < math.inf:
        raise ConfigError(f"--minutes must be at least {MIN_MINUTES:g}, got {args.minutes:g}")
    if args.logs is not None and args.logs.exists() and (not args.logs.is_dir() or any(args.logs.iterdir())):
        raise ConfigError(f"--logs {args.logs} is not an empty folder; name another")

    say = partial(echo, file=sys.stderr)
    folder = (
        args.logs.resolve()
        if args.logs is not None
        else Path(tempfile.mkdtemp(prefix="async-pipeline-soak-"))
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--logs {args.logs} cannot be created ({error.strerror}); name a writable folder"
        ) from None
    try:
        return _soak(args, kinds, folder, say)
    except BaseException:
        say(f"logs are in {folder}")
        raise


def _soak(args: argparse.Namespace, kinds: Sequence[str], folder: Path, say: Callable[[str], None]) -> int:
    if (room := room_for(60 * args.minutes)) < len(kinds):
        say(f"--minutes {args.minutes:g} has room for about {room} of {len(kinds)} kinds of faults")

    disk = folder / "disk"
    with small_disk(disk) if "full_disk" in kinds else nullcontext(disk):
        task = _task_of(args.task, say)
        say(f"starting the run, which takes a minute or two; its output goes to {folder / 'job.log'}")
        preloaded = build_clock(folder) if "stepped_clock" in kinds else None
        job = SoakJob(folder, overrides(folder, args.task, args.engine), task.dir, args.seed, preloaded)
        outcome = soak(job, kinds, 60 * args.minutes, args.seed, say)
        found = report(outcome, job.run_dir, kinds)
        if job.run_dir.is_dir():
            # The disk is in memory, and the user may want to read the files.
            shutil.copytree(job.run_dir, folder / "run")

    for line in [json.dumps(found, indent=2)] if args.json else in_words(found):
        echo(line)
    if args.logs is None and not found["violations"]:
        shutil.rmtree(folder)
    else:
        say(f"logs are in {folder}")
    return 1 if found["violations"] else 0


def _task_of(name: SoakTask, say: Callable[[str], None]) -> Toy:
    root = Path(".cache/toy").resolve()
    if name in ("lake", "lake_agent"):
        # The only task that needs gymnasium, an optional package.
        from ..tasks.lake_task.lake_build import LakeSpec

        return ensure_toy(LakeSpec(), root, report=say)
    if name == "distill":
        return ensure_toy(DistillSpec(seed=0, model=ModelSpec(tied=True)), root, report=say)
    if name == "calculator":
        return ensure_toy(CalculatorSpec(), root, report=say)
    return ensure_toy(ToySpec.of(seed=0, tied=True), root, report=say)


def kinds_of(text: str, task: SoakTask) -> Sequence[str]:
    """Parse `--faults`. Raises ConfigError if a fault is unknown, or is one of another task."""
    possible = [kind for kind, fault in FAULTS.items() if fault.task in (None, task)]
    kinds = tuple(possible if text == "all" else dict.fromkeys(word.strip() for word in text.split(",")))
    unknown = [kind for kind in kinds if kind not in FAULTS]
    if unknown:
        raise ConfigError(
            f"--faults: unknown {', '.join(map(repr, unknown))}; choose from {', '.join(FAULTS)}, or all"
        )
    for kind in kinds:
        if kind not in possible:
            raise ConfigError(
                f"--faults: {kind} requires --task {FAULTS[kind].task}, got {task}; name that task, or leave "
                f"{kind} out"
            )
    return kinds


def overrides(folder: Path, task: SoakTask, engine: str = ENGINES[0]) -> list[str]:
    """Return the run's overrides: two replicas, a lag of up to two, checkpoints on the disk to be filled."""
    own = "trainer.v1.async_pipeline"
    values: dict[str, Any] = {
        "async_strategy": "fully_async",
        f"{own}.staleness.max_lag": 2,
        f"{own}.run_dir": str(run_dir_in(folder)),
        f"{own}.faults.notice_s": NOTICE_S,
        f"{own}.weight_sync.timeout_s": PUBLISH_S,
        "actor_rollout_ref.rollout.name": engine,
        "actor_rollout_ref.rollout.n_gpus_per_node": 2,
        "ray_kwargs.ray_init.num_gpus": 3,
        # Never connect to another user's cluster on this machine.
        "ray_kwargs.ray_init.address": "local",
        "trainer.total_training_steps": 1_000_000,
        "trainer.total_epochs": 1_000_000,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "trainer.resume_mode": "auto",
        "trainer.save_freq": SAVE_EVERY,
        "trainer.max_actor_ckpt_to_keep": 2,
        "trainer.default_local_dir": str(checkpoints_in(folder)),
        "trainer.logger": ["file", "trackio"],
        **OF_TASK[task](folder),
    }
    return [*([f"+task={task}"] if task != "addition" else []), *hydra_overrides(values)]


def _judged(folder: Path) -> dict[str, Any]:
    own = "trainer.v1.async_pipeline.reward"
    return {
        f"{own}.timeout_s": REWARD_S,
        f"{own}.failure": "drop",
        "reward.custom_reward_function.path": str(Path(judge.__file__)),
        "reward.custom_reward_function.name": "score",
        "reward.custom_reward_function.reward_kwargs": {"control": str(control_of(folder))},
    }


def _environments(folder: Path) -> dict[str, Any]:
    own = "trainer.v1.async_pipeline.agentic"
    return {
        f"{own}.environment": f"{moods.__name__}:{moods.MoodyLake.__name__}",
        f"{own}.environment_kwargs": {"size": 4, "frozen": 0.8, "control": str(control_of(folder))},
        f"{own}.isolation": "process",
        f"{own}.concurrency": ENVIRONMENTS,
        f"{own}.env_timeout_s": ENVIRONMENT_S,
        f"{own}.attempts": 4,
        **_small_steps(),
    }


def _tools(folder: Path) -> dict[str, Any]:
    own = "trainer.v1.async_pipeline.agentic"
    return {f"{own}.tool_timeout_s": TOOL_S, f"{own}.attempts": 4, **_small_steps()}


def _agents(folder: Path) -> dict[str, Any]:
    own = "trainer.v1.async_pipeline.agentic"
    command = [sys.executable, "-m", lake_agent.__name__, str(control_of(folder))]
    return {
        f"{own}.agent": shlex.join(command),
        # A command gets few variables of the run, and not the one by which its processes are found.
        f"{own}.agent_env": {"PYTHONPATH": str(CONFIGS.parent), MARK: str(folder)},
        f"{own}.concurrency": AGENTS,
        f"{own}.episode_timeout_s": AGENT_S,
        f"{own}.attempts": 4,
        **_small_steps(),
    }


def _teachers(folder: Path) -> dict[str, Any]:
    return {"ray_kwargs.ray_init.num_gpus": 4, "trainer.v1.async_pipeline.faults.wait_timeout_s": TEACHER_S}


def _small_steps() -> dict[str, Any]:
    batch = PROMPTS * RESPONSES
    return {
        "data.train_batch_size": PROMPTS,
        "actor_rollout_ref.rollout.n": RESPONSES,
        "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": batch,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": batch,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": batch,
    }


OF_TASK: Mapping[SoakTask, Callable[[Path], dict[str, Any]]] = {
    "addition": _judged,
    "lake": _environments,
    "calculator": _tools,
    "lake_agent": _agents,
    "distill": _teachers,
}
"""Overrides of each task, given the folder of the run."""


def in_words(found: Mapping[str, Any]) -> list[str]:
    """Return the report as lines of text."""
    counts = ", ".join(f"{name} {count}" for name, count in found["faults_injected"].items())
    fates = found["samples"]
    lines = [
        f"faults       {sum(found['faults_injected'].values())} ({counts}); recovered from "
        f"{found['recovered']}",
        f"steps        {found['steps']}, by {found['processes']} processes",
        f"prompts      {fates['dispatched']} dispatched = "
        + " + ".join(f"{count} {name}" for name, count in fates.items() if name != "dispatched"),
    ]

    if found["recovery_s"]:
        lines.append(
            f"recovery     median {found['recovery_s']['median']} s, at most {found['recovery_s']['max']} s"
        )
    if found["goodput_ratio"] is not None:
        lines.append(f"goodput      {found['goodput_ratio']:.2f} of the undisturbed run")
    if found["not_injected"]:
        lines.append(f"not tried    {', '.join(found['not_injected'])}: the time was up; increase --minutes")
    return [
        *lines,
        *(
            [f"VIOLATION    {text}" for text in found["violations"]]
            or ["ok           nothing was lost, trained twice or hung"]
        ),
    ]
