# SPDX-License-Identifier: Apache-2.0
"""Every command in a code block of a page is run in its dry form, or listed here with the reason why not.

Arguments of `async-pipeline` are parsed and checked as the command does it; training commands are explained;
scripts run with their option that changes nothing.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from recipe.async_pipeline.cli.main import SUBCOMMANDS, build_parser
from recipe.async_pipeline.lab.bench.inputs.arms import ARMS
from recipe.async_pipeline.lab.bench.inputs.workload import names
from recipe.async_pipeline.lab.cli.soak import kinds_of
from recipe.async_pipeline.lab.tasks.tokenizer import VOCAB_SIZE, make_tokenizer
from tests import HANG_S, REPOSITORY, tracked_files

PAGES = [name for name in tracked_files() if name.endswith(".md")]
BLOCK = re.compile(r"^```(?:bash|sh|shell|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLACEHOLDERS = {"N": "4", "W": "agentic_wait"}

YOURS = (
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "algorithm.adv_estimator=grpo",
    *("trainer.nnodes=1", "trainer.n_gpus_per_node=4"),
    *("actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=4"),
)
"""A user's overrides, where a page has a word in angle brackets."""

NOT_RUN = {
    r"python examples/hello_pipeline\.py": "tests/test_examples.py runs it",
    r"pip install ": "changes the environment; run_scripts/wheel.sh installs the wheel",
    r"source \S+ && ": "changes the shell and the checkout's hooks",
    r"bash run_scripts/setup\.sh": "has no dry form; every tier of run_scripts/test.sh begins with it",
    r"python -m tests\.\S+gather_cost ": "measures for minutes",
    r"python tests/e2e/forms_probe\.py ": "loads an engine; tests/e2e/test_engine.py runs it",
    r"docker build ": "tests/test_cluster_examples.py reads the Dockerfile",
    r"exec docker run ": "needs Docker; tests/agents/processes/test_sandbox.py reaches the socket",
    r"kubectl apply ": "tests/test_cluster_examples.py reads the file; its entry point is explained below",
    r"bash run_qwen3_8b_fsdp_vllm\.sh ": "tests/test_recipe_folder.py explains it",
}
"""Commands without a dry form, as patterns from their start, each with the reason."""


class Command(NamedTuple):
    """A command of a page, on one line and without its comment."""

    page: str
    line: str

    @property
    def words(self) -> list[str]:
        """Its words, without settings of the environment."""
        words = shlex.split(self.line)
        while re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        return words


def commands_of(page: str, text: str) -> list[Command]:
    """Return the commands in the code blocks of a page. Lines that begin with + are overrides alone."""
    found = []
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            words = " ".join(re.sub(r"(^|\s)#.*", "", line).split())
            if words and not words.startswith(("+", "'+")):
                found.append(Command(page, words))
    return found


COMMANDS = sorted({c for page in PAGES for c in commands_of(page, (REPOSITORY / page).read_text("utf-8"))})
OURS = [c for c in COMMANDS if c.words[0] == "async-pipeline"]
SCRIPTS = [c for c in COMMANDS if re.match(r"bash run_scripts/(install_\w+|test|verify_gpu)\.sh", c.line)]
SMOKE = [c for c in COMMANDS if c.words[:2] == ["bash", "run_scripts/smoke_cpu.sh"]]
SLURM = [c for c in COMMANDS if c.words[0] == "sbatch"]
TRAINING = [c for c in COMMANDS if c.words[:3] == ["python", "-m", "verl.trainer.main_ppo"]]


def name_of(command: Command) -> str:
    return f"{command.page}: {command.line[:70]}"


def test_every_command_has_a_dry_form_or_a_reason() -> None:
    covered = {*OURS, *SCRIPTS, *SMOKE, *SLURM, *TRAINING}
    left = [c for c in COMMANDS if c not in covered and not any(re.match(p, c.line) for p in NOT_RUN)]
    assert left == []
    unused = [p for p in NOT_RUN if not any(re.match(p, c.line) for c in COMMANDS)]
    assert unused == [], "no page has such a command: drop its line"


def test_commands_are_found_in_blocks_only() -> None:
    text = "`x y`\n```bash\nA=1 x \\\n    --b   # why\n+key=1\n# nothing\n```\n```\nz\n```\n"
    (found,) = commands_of("p", text)
    assert found.line == "A=1 x --b" and found.words == ["x", "--b"]


# `async-pipeline`.


def complaint(words: list[str]) -> str:
    """Return what is wrong with the arguments of `async-pipeline`, or an empty string."""
    words = [PLACEHOLDERS.get(word, word) for word in words]
    if words[0] not in SUBCOMMANDS:
        return f"no subcommand {words[0]}"
    err = io.StringIO()
    try:
        with contextlib.redirect_stderr(err):
            args = build_parser(words[0]).parse_args(words)
    except SystemExit:
        return err.getvalue().strip().splitlines()[-1]

    if words[0] == "soak":
        kinds_of(args.faults, args.task)
    if words[0] == "bench" and args.instead is None:
        unknown = set(args.arms.split(",")) - set(ARMS) | {args.workload} - set(names())
        return f"unknown {', '.join(sorted(unknown))}" if unknown else ""
    return ""


@pytest.mark.parametrize("command", OURS, ids=name_of)
def test_arguments_of_the_command_are_accepted(command: Command) -> None:
    assert complaint(command.words[1:]) == ""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("summary RUN", "no subcommand summary"),
        ("plan --devices 4", "required: --profile"),
        ("replicas", "required: RUN"),
        ("plan --profile p --devices many", "invalid int value"),
        ("bench --arms one_step_off,gone --workload lost", "unknown gone, lost"),
    ],
)
def test_a_false_command_would_be_found(line: str, words: str) -> None:
    assert words in complaint(line.split())


# Scripts.


@pytest.mark.parametrize("command", SCRIPTS, ids=name_of)
def test_a_script_runs_dry(command: Command) -> None:
    script, arguments = command.words[1], command.words[2:]
    if script.endswith("/verify_gpu.sh"):
        assert complaint(["verify-gpu", *arguments]) == ""
        dry = ["--help"]
    elif script.endswith("/test.sh"):
        dry = ["--help"]
    else:
        dry = ["--dry-run"]
    done = subprocess.run(
        ["bash", script, *dry], cwd=REPOSITORY, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    if not script.endswith("/verify_gpu.sh"):
        shown = f"{done.stdout} --dry-run --resolve"
        assert [word for word in arguments if word.startswith("--") and word not in shown] == []
    assert [w for w in arguments if "/" in w and not (REPOSITORY / w).exists()] == []


# Training commands.


def explained_words(command: Command, folder: Path) -> list[str]:
    """Return the arguments of `async-pipeline` that explain a training command.

    Bash runs the command as it is printed, with a stand-in for Python that records its arguments.
    """
    standin, called = folder / "python", folder / "words"
    standin.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > '{called}'\n", encoding="utf-8")
    standin.chmod(0o700)
    line = re.sub(r"<[^>]*>", " ".join(YOURS), command.line).replace("/models/", f"{folder}/")
    more = {}
    if command in SLURM:
        nodes, devices = re.findall(r"--(?:nodes|gpus-per-node)=(\d+)", line)
        more = {"SLURM_JOB_NUM_NODES": nodes, "SLURM_GPUS_ON_NODE": devices}
        line = re.sub(r"^sbatch (--\S+ )*", "bash ", line)
    line = line.replace(" --explain", "")
    line = re.sub(r"(bash \S+\.sh(?: --(?:task|model) \w+)*)", r"\1 --explain", line, count=1)
    subprocess.run(
        ["bash", "-c", line],
        cwd=REPOSITORY,
        env=os.environ
        | {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "ASYNC_PIPELINE_PYTHON": str(standin),
            "ASYNC_PIPELINE_TASK": str(folder),
            "ASYNC_PIPELINE_AGENT_PYTHON": sys.executable,
        }
        | more,
        check=True,
    )
    module, name, *words = called.read_text(encoding="utf-8").splitlines()
    if command in TRAINING:
        assert [module, name] == ["-m", "verl.trainer.main_ppo"]
        return ["explain", *words]
    assert [module, name] == ["-m", "recipe.async_pipeline"]
    return words


def write_models(folder: Path) -> None:
    """Write what describes a model of texts and one of images, where the smoke task and the user's own have
    them.
    """
    make_tokenizer().save_pretrained(folder / "model")
    described = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": VOCAB_SIZE}
    (folder / "model" / "config.json").write_text(json.dumps(described), encoding="utf-8")
    for model in ("model", "stable-diffusion-3.5-medium"):
        for name, content in {
            "model_index.json": {"_class_name": "StableDiffusion3Pipeline"},
            "transformer/config.json": {"in_channels": 16, "patch_size": 2},
            "scheduler/scheduler_config.json": {"shift": 3.0},
            "vae/config.json": {"block_out_channels": [8, 16, 16, 16]},
        }.items():
            (folder / model / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / model / name).write_text(json.dumps(content), encoding="utf-8")


def on_kubernetes() -> Command:
    """Return the entry point of KubeRay's example."""
    file = "run_scripts/rayjob.yaml"
    return Command(file, yaml.safe_load((REPOSITORY / file).read_text("utf-8"))["spec"]["entrypoint"])


@pytest.mark.real_engine
def test_every_training_command_is_explained(tmp_path: Path) -> None:
    """In one process, which imports verl once."""
    write_models(tmp_path)
    commands = {
        tuple(explained_words(command, tmp_path)): name_of(command)
        for command in [*SMOKE, *SLURM, *TRAINING, on_kubernetes()]
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.fakes.explained_commands"],
        cwd=REPOSITORY,
        env=os.environ
        | {
            "ASYNC_PIPELINE_TASK": str(tmp_path),
            "ASYNC_PIPELINE_RUN": "run",
            "ASYNC_PIPELINE_AGENT_PYTHON": sys.executable,
            "HF_HUB_OFFLINE": "1",
        },
        input=json.dumps(list(commands)),
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    reports = json.loads(done.stdout.rpartition("\nREPORT ")[2])
    refused = {
        name: error
        for name, (status, _, error) in zip(commands.values(), reports, strict=True)
        if status != 0
    }
    assert refused == {}
