# SPDX-License-Identifier: Apache-2.0
"""A job on two hosts: separate networks, separate shared memory; one of them disappears."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipe.async_pipeline.bench.two_hosts import TwoHosts
from recipe.async_pipeline.observe.ledger_file import audit_file
from tests.e2e.job import Event, check_clean_end, run_job, smoke_command
from tests.fakes.private_mounts import may_unshare

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,
    pytest.mark.skipif(not may_unshare(), reason="namespaces require root"),
]
STEPS = 14


@pytest.fixture
def hosts(tied_task: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoHosts]:
    """One training device and one replica on the first host, two replicas on the second."""
    monkeypatch.setenv("ASYNC_PIPELINE_TASK", str(tied_task))
    monkeypatch.setenv("ASYNC_PIPELINE_RUN", "run")
    # A job that connects to a cluster must not look for a token that the cluster does not have.
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    made = TwoHosts(2, 2)
    yield made
    made.close()


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

    version_bytes = max(event["bytes"] for event in job.events() if "bytes" in event)
    assert version_bytes > 0
    for segments in seen:
        assert 0 < sum(segments.values()) <= 1.1 * 2 * version_bytes
        assert len({name.split("-")[2] for name in segments}) == 1, "one process owns them"
