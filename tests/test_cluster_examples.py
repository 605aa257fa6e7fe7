# SPDX-License-Identifier: Apache-2.0
"""The examples for several nodes: the image, the Slurm script with stand-ins, and KubeRay's file."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import HANG_S, REPOSITORY

FOLDER = REPOSITORY / "run_scripts"
STACKS = {f"{trainer}_{engine}" for trainer in ("fsdp", "megatron") for engine in ("vllm", "sglang")}

# Image.


def test_the_image_installs_with_the_scripts_and_names_no_registry() -> None:
    text = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    steps = [line for line in text.splitlines() if re.match(r"[A-Z]+ ", line)]
    assert [line for line in steps if line.startswith("FROM ")] == ["FROM ${BASE_IMAGE}"]
    assert "ARG BASE_IMAGE" in steps, "without a default: a base image is the user's choice"
    assert 'RUN bash "run_scripts/install_${STACK}.sh" && uv cache clean' in steps
    assert STACKS == {stack for stack in STACKS if (FOLDER / f"install_{stack}.sh").is_file()}
    assert all(stack in text for stack in STACKS)


def test_the_image_leaves_out_what_a_checkout_collects() -> None:
    left_out = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {".git", ".venv*", ".cache", "outputs"} <= set(left_out)


# Slurm.

STANDIN = """#!/bin/sh
printf '%s\\n' "$(basename "$0") $*" >> "$CALLS"
case "$(basename "$0") $*" in
  *"token_hex"*) echo secret ;;
  scontrol*) printf 'one\\ntwo\\nthree\\nfour\\n' ;;
  *" hostname --ip-address") echo 10.0.0.1 10.1.0.1 ;;
  *" doctor --cluster "*)
    echo "$RAY_AUTH_TOKEN, $JOINED of 4"
    # Both calls of srun are in the background.
    grep -q -e --head "$CALLS" && grep -q -e --address= "$CALLS" && [ "$JOINED" = 4 ] ;;
  *"watch -- "*) printf 'job at %s\\n' "$RAY_ADDRESS" >> "$CALLS" ;;
esac
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """Return an environment as of a Slurm job on four nodes, with stand-ins for its commands and Python."""
    for name in ("srun", "scontrol", "python"):
        (tmp_path / name).write_text(STANDIN, encoding="utf-8")
        (tmp_path / name).chmod(0o700)
    return os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "ASYNC_PIPELINE_PYTHON": str(tmp_path / "python"),
        "SLURM_SUBMIT_DIR": str(REPOSITORY),
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_JOB_NODELIST": "node[1-4]",
        "JOINED": "4",
    }


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(FOLDER / "slurm.sh"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


def test_slurm_starts_ray_checks_the_nodes_and_trains(slurm: dict[str, str]) -> None:
    done = run(slurm, "fsdp_vllm_dense.sh", "data.train_files=t", "trainer.nnodes=3")
    assert done.returncode == 0, done.stderr
    assert "secret, 4 of 4" in done.stdout, "with one token for all nodes"

    calls = Path(slurm["CALLS"]).read_text(encoding="utf-8").splitlines()
    (head,) = (call for call in calls if "--head" in call)
    assert "-w one" in head and "--node-ip-address=10.0.0.1 --port=6379" in head
    (others,) = (call for call in calls if "--address=10.0.0.1:6379" in call)
    assert "--nodes=3 --ntasks=3 -x one" in others and "--num-gpus=8" in others
    (training,) = (call for call in calls if "watch -- " in call)
    assert calls[-1] == "job at 10.0.0.1:6379", "in the environment, so that the run joins the cluster"
    assert training.endswith(
        "trainer.nnodes=2 trainer.n_gpus_per_node=8 actor_rollout_ref.rollout.nnodes=2 "
        "actor_rollout_ref.rollout.n_gpus_per_node=8 data.train_files=t trainer.nnodes=3"
    ), "the user's overrides come last"


def test_slurm_says_what_a_node_lacks_and_trains_nothing(slurm: dict[str, str]) -> None:
    done = run(slurm | {"JOINED": "3", "JOIN_S": "-1"}, "fsdp_vllm_dense.sh")
    assert done.returncode == 1 and "3 of 4" in done.stderr
    assert "watch -- " not in Path(slurm["CALLS"]).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        ({}, (), "must be a script of run_scripts/, got ''"),
        ({}, ("gone.sh",), "must be a script of run_scripts/, got 'gone.sh'"),
        ({"SLURM_JOB_NUM_NODES": "1"}, ("fsdp_vllm_dense.sh",), "--nodes must be at least 2, got 1"),
    ],
)
def test_a_wrong_submission_is_one_line(
    changes: dict[str, str], arguments: tuple[str, ...], words: str, slurm: dict[str, str]
) -> None:
    done = run(slurm | changes, *arguments)
    assert done.returncode == 2 and words in done.stderr
    assert len(done.stderr.splitlines()) == 1


# KubeRay.


@pytest.fixture
def ray_job() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / "rayjob.yaml").read_text(encoding="utf-8"))
    return loaded


def test_the_workers_of_kuberay_have_the_devices_of_the_job(ray_job: dict[str, Any]) -> None:
    assert (ray_job["apiVersion"], ray_job["kind"]) == ("ray.io/v1", "RayJob")
    words = ray_job["spec"]["entrypoint"].split()
    sizes = dict(word.split("=", 1) for word in words if "=" in word)
    (workers,) = ray_job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    nodes = int(sizes["trainer.nnodes"]) + int(sizes["actor_rollout_ref.rollout.nnodes"])
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == nodes
    (container,) = workers["template"]["spec"]["containers"]
    gpus = {container["resources"][kind]["nvidia.com/gpu"] for kind in ("requests", "limits")}
    of_a_node = {sizes["trainer.n_gpus_per_node"], sizes["actor_rollout_ref.rollout.n_gpus_per_node"]}
    assert gpus == of_a_node and len(gpus) == 1


def test_every_pod_of_kuberay_has_the_image_the_files_and_shared_memory(ray_job: dict[str, Any]) -> None:
    spec = ray_job["spec"]["rayClusterSpec"]
    words = ray_job["spec"]["entrypoint"].split()
    assert (REPOSITORY / words[1]).is_file(), "in the image's working directory"
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"] == "async-pipeline", "without the host of a registry"
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
        assert mounts == {"shared": "/shared", "shm": "/dev/shm"}
        (memory,) = (volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm")
        assert memory == {"medium": "Memory"}
    files = [word.split("=", 1)[1] for word in words if "=/" in word]
    assert files and all(file.startswith("/shared/") for file in files), "all nodes see it"
    assert spec["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"
