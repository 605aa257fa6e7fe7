# SPDX-License-Identifier: Apache-2.0
"""A job on two hosts: separate networks, separate shared memory; one of them disappears."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from recipe.async_pipeline.lab.bench.two_hosts import TwoHosts
from recipe.async_pipeline.tools.ledger.file import audit_file
from tests.e2e.job import Event, Job, check_clean_end, run_job, smoke_command
from tests.fakes.private_mounts import may_unshare

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,
    pytest.mark.skipif(not may_unshare(), reason="namespaces require root"),
]
STEPS = 14


@pytest.fixture
def hosts(
    tied_task: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[TwoHosts]:
    """A device for training and one for generation on the first host, the latter's number on the second."""
    monkeypatch.setenv("ASYNC_PIPELINE_TASK", str(tied_task))
    monkeypatch.setenv("ASYNC_PIPELINE_RUN", "run")
    # A job that connects to a cluster must not look for a token that the cluster does not have.
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    made = TwoHosts(2, request.param)
    yield made
    made.close()


@pytest.mark.parametrize("hosts", [2], indirect=True)
def test_a_run_on_two_hosts_goes_through_the_loss_of_one(
    tied_task: Path, tmp_path: Path, hosts: TwoHosts
) -> None:
    """The replicas of the second host share one copy of two versions; the other replica continues alone."""
    run_dir, seen = tmp_path / "run", list[dict[str, int]]()

    def look(process: subprocess.Popen[str]) -> None:
        seen.append(hosts.second.segments())

    def lose(process: subprocess.Popen[str]) -> None:
        hosts.second.lose()

    job = run_job(
        smoke_command(
            f"trainer.total_training_steps={STEPS}",
            f"trainer.v1.async_pipeline.run_dir={run_dir}",
            "actor_rollout_ref.rollout.n_gpus_per_node=3",
            "trainer.v1.async_pipeline.weight_sync.timeout_s=20",
            *hosts.overrides,
        ),
        run_dir,
        tied_task,
        prefix=hosts.first.prefix,
        events=[
            Event("starting training workers", lambda process: hosts.release()),
            Event(" 3/14", look),
            Event(" 5/14", look),
            Event(" 6/14", lose),
            Event(" is fenced and restarts; "),
        ],
    )

    check_clean_end(job, "one_step_off", 1, STEPS)
    assert audit_file(run_dir).violations == []
    served = [event for event in job.events() if event["event"] == "SERVED"]
    assert served[3]["replicas"] == 3 and served[-1]["replicas"] == 1
    fenced = {event["replica"] for event in job.events() if event["event"] == "FENCED"}
    assert len(fenced) == 2, "the replicas of the lost host, and no other"

    check_segments(job, seen)


@pytest.mark.parametrize("hosts", [1], indirect=True)
@pytest.mark.parametrize(("engine", "staging"), [("vllm", "device"), ("sglang", "host")])
def test_a_replica_over_two_hosts_starts_again_after_the_loss_of_one(
    tied_task: Path, tmp_path: Path, hosts: TwoHosts, engine: str, staging: str
) -> None:
    """Each host of the replica receives each version once, and its rank proves it."""
    run_dir, seen = tmp_path / "run", list[dict[str, int]]()
    ranks, left = set[int](), set[int]()

    def look(process: subprocess.Popen[str]) -> None:
        seen.append(hosts.second.segments())

    def lose(process: subprocess.Popen[str]) -> None:
        ranks.update(hosts.first.processes(RANK_NAMES[engine]))
        hosts.second.end_processes()

    def rejoin(process: subprocess.Popen[str]) -> None:
        hosts.start_second(1)

    def count(process: subprocess.Popen[str]) -> None:
        left.update(ranks & hosts.first.processes())

    job = run_job(
        smoke_command(
            f"trainer.total_training_steps={STEPS}",
            f"trainer.v1.async_pipeline.run_dir={run_dir}",
            f"actor_rollout_ref.rollout.name={engine}",
            "actor_rollout_ref.rollout.nnodes=2",
            "actor_rollout_ref.rollout.n_gpus_per_node=1",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            f"trainer.v1.async_pipeline.weight_sync.load_staging={staging}",
            *hosts.overrides,
        ),
        run_dir,
        tied_task,
        prefix=hosts.first.prefix,
        events=[
            Event("starting training workers", lambda process: hosts.release()),
            Event(" 3/14", look),
            Event(" 5/14", look),
            Event(" 6/14", lose),
            Event(" is fenced and restarts; ", rejoin),
            Event(BACK, count),
        ],
    )

    check_clean_end(job, "one_step_off", 1, STEPS)
    assert audit_file(run_dir).violations == []
    assert [event["replica"] for event in job.events() if event["event"] == "FENCED"] == ["replica 0"]
    assert BACK in job.output
    assert ranks and not left, "the processes on the host that was not lost have ended"
    check_segments(job, seen)


RANK_NAMES = {"vllm": "VLLM::Worker", "sglang": "sglang::scheduler"}
"""Beginnings of the titles of the processes of ranks."""
BACK = "serves again, version "
BOARD_BYTES = 4096


def check_segments(job: Job, seen: Sequence[dict[str, int]]) -> None:
    """Check that a host had one copy of at most two versions, in one process."""
    version_bytes = max(event["bytes"] for event in job.events() if "bytes" in event)
    assert version_bytes > 0
    for segments in seen:
        assert 0 < sum(segments.values()) <= 1.1 * 2 * version_bytes
        # A rank that stages on its device has a board there, of a page.
        owners = {name.split("-")[2] for name, nbytes in segments.items() if nbytes > BOARD_BYTES}
        assert len(owners) == 1, "one process owns them"
