# SPDX-License-Identifier: Apache-2.0
"""Each of these ends the run: cause on the last screen, status not 0, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.lab.event_audit import audit_events
from recipe.async_pipeline.tools.ledger.file import audit_file
from recipe.async_pipeline.weight_sync.memory.segment_names import PREFIX, SHM_DIR
from tests import HANG_S
from tests.e2e.conftest import StartNodes
from tests.e2e.job import (
    ROOT,
    Event,
    Job,
    check_clean_end,
    interrupt,
    kill_all,
    kill_reference,
    pids_named,
    processes_of,
    run_job,
    signal_one_of_two,
    smoke_command,
)

pytestmark = pytest.mark.e2e


def check_ended(job: Job, cause: str) -> None:
    assert job.status not in (0, None)
    assert job.ended_after_event_s is not None, job.output[-3000:]
    assert job.ended_after_event_s < HANG_S
    last_screen = "\n".join(job.output.splitlines()[-24:])
    assert cause in last_screen
    assert processes_of(job.run_dir) == []
    summary = json.loads((job.run_dir / "summary.json").read_text())
    assert summary["status"] == ("interrupted" if cause == "interrupted" else "failed")


def memory_of(run_dir: Path) -> int:
    """Bytes of all processes of a job without mapped files, what they share counted once."""
    total = 0
    for line in processes_of(run_dir):
        with suppress(OSError):
            rollup = Path(f"/proc/{line.partition(':')[0]}/smaps_rollup").read_text()
            total += 1024 * sum(
                map(int, re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB", rollup, re.MULTILINE))
            )
    return total


def long_run(tmp_path: Path) -> list[str]:
    return smoke_command(
        "trainer.total_training_steps=1000", f"trainer.v1.async_pipeline.run_dir={tmp_path / 'run'}"
    )


@pytest.mark.nightly
def test_a_reward_function_that_raises(tied_task: Path, tmp_path: Path) -> None:
    job = run_job(
        [
            *long_run(tmp_path),
            f"reward.custom_reward_function.path={ROOT / 'tests' / 'e2e' / 'rewards.py'}",
            "reward.custom_reward_function.name=raises",
        ],
        tmp_path / "run",
        tied_task,
        events=[Event("samples/s")],
    )
    check_ended(job, "ValueError: the judge fell asleep")
    assert job.summary["status"] == "failed"


@pytest.mark.nightly
def test_a_log_prob_that_is_no_number_names_the_replica_and_its_version(
    tied_task: Path, tmp_path: Path
) -> None:
    agents = tmp_path / "agents.json"
    agents.write_text(json.dumps([{"name": "flawed", "_target_": "tests.e2e.parts.FlawedLoop"}]))
    job = run_job(
        [
            *long_run(tmp_path),
            "actor_rollout_ref.rollout.agent.default_agent_loop=flawed",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={agents}",
        ],
        tmp_path / "run",
        tied_task,
        events=[Event("samples/s")],
    )
    check_ended(job, "are not finite, the first nan at token ")
    assert ", written by replica 0 with version " in job.summary["error"]


@pytest.mark.nightly
def test_replicas_that_die_or_hang_come_back_even_if_none_is_left(tied_task: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    signal_one = partial(signal_one_of_two, "EngineCore", run_dir)
    back = "serves again, version "

    job = run_job(
        [
            *long_run(tmp_path),
            "actor_rollout_ref.rollout.n_gpus_per_node=2",
            "ray_kwargs.ray_init.num_gpus=3",
            "trainer.v1.async_pipeline.weight_sync.timeout_s=20",
        ],
        run_dir,
        tied_task,
        events=[
            Event(" 4/1000", signal_one(signal.SIGKILL)),
            Event(back, signal_one(signal.SIGSTOP)),
            Event(back, kill_all("EngineCore", run_dir)),
            Event(back),
            Event(back, kill_all("PipelineVLLMServer", run_dir)),
            Event(back),
            Event(back, interrupt),
        ],
    )
    check_ended(job, "interrupted")
    assert audit_file(run_dir).violations == []
    events = list(job.events())
    replicas = [event["replicas"] for event in events if event["event"] == "SERVED"]
    assert [count for count, _ in groupby(replicas)][:2] == [2, 1], "training continued with the other one"
    fenced = [event for event in events if event["event"] == "FENCED"]
    assert len(fenced) == len([event for event in events if event["event"] == "REJOINED"]) == 6
    assert "EngineDeadError" in job.output and "ActorDiedError" in job.output


@pytest.mark.nightly
def test_a_node_that_is_lost_and_replaced(tied_task: Path, tmp_path: Path, nodes: StartNodes) -> None:
    """On it are a replica, agent loops and reward workers; trainer and samples are on the other, which was
    there before.
    """
    run_dir = tmp_path / "run"
    cluster = nodes(tied_task, 3)
    second = cluster.add(1)
    release = cluster.keep_free()

    def lose(process: subprocess.Popen[str]) -> None:
        cluster.lose(second)

    def replace(process: subprocess.Popen[str]) -> None:
        cluster.add(1)

    job = run_job(
        [
            *long_run(tmp_path),
            "async_strategy=fully_async",
            "trainer.n_gpus_per_node=2",
            "actor_rollout_ref.rollout.n_gpus_per_node=2",
            "actor_rollout_ref.rollout.agent.num_workers=2",
            "reward.num_workers=2",
            "+transfer_queue.backend.SimpleStorage.required_node_resource=node:__internal_head__",
            "trainer.v1.async_pipeline.weight_sync.timeout_s=20",
            *cluster.overrides,
        ],
        run_dir,
        tied_task,
        events=[
            Event("starting training workers", lambda process: release()),
            Event(" 4/1000", lose),
            Event(" is fenced and restarts; 1 still serve"),
            *[Event("/1000 ") for _ in range(6)],
            Event("/1000 ", replace),
            Event("serves again, version "),
            *[Event("/1000 ") for _ in range(4)],
            Event("/1000 ", interrupt),
        ],
    )
    check_ended(job, "interrupted")
    assert audit_file(run_dir).violations == []
    assert audit_events(job.events()).violations == []
    replicas = [event["replicas"] for event in job.events() if event["event"] == "SERVED"]
    assert [count for count, _ in groupby(replicas)] == [2, 1, 2], "training continued meanwhile"


@pytest.mark.nightly
def test_memory_is_flat_where_training_is_ten_times_slower_than_generation(
    tied_task: Path, tmp_path: Path
) -> None:
    """Who generates waits until there is room, and nothing piles up elsewhere."""
    run_dir, steps, seen = tmp_path / "run", 14, []

    def look(process: subprocess.Popen[str]) -> None:
        seen.append(memory_of(run_dir))

    job = run_job(
        [
            *smoke_command(
                f"trainer.total_training_steps={steps}", f"trainer.v1.async_pipeline.run_dir={run_dir}"
            ),
            "async_strategy=tests.e2e.parts:SlowlyTrained",
            "trainer.v1.async_pipeline.staleness.max_lag=3",
        ],
        run_dir,
        tied_task,
        events=[Event(f" {step}/{steps}", look) for step in range(4, steps + 1)],
    )
    check_clean_end(job, "tests.e2e.parts:SlowlyTrained", 3, steps)
    # What piles up is there at the end of every step; a peak is not.
    assert min(seen[-4:]) < 1.01 * max(seen[:4])
    changes: dict[str, Callable[[Any], int]] = {
        "DRAWN": lambda event: len(event["keys"]),
        "TRAINED": lambda event: -16,
    }
    untrained = list(
        accumulate(changes[event["event"]](event) for event in job.events() if event["event"] in changes)
    )
    assert max(untrained) == (3 + 1) * 16, "all the room there is was taken, and no more"


@pytest.mark.nightly
def test_workers_that_score_or_compute_log_probs_are_replaced(tied_task: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    job = run_job(
        [
            *long_run(tmp_path),
            "async_strategy=n_step_ahead",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "+trainer.use_nodes_ratios=[0.25,0.25,0.25,0.25]",
            "trainer.n_gpus_per_node=3",
            "ray_kwargs.ray_init.num_gpus=4",
        ],
        run_dir,
        tied_task,
        events=[
            Event(" 3/1000", kill_all("LogProbWorker", run_dir)),
            Event("the workers of logp compute again", kill_reference(run_dir)),
            Event("the workers of ref_logp compute again", kill_all("RewardLoopWorker", run_dir)),
            *[Event("/1000 ") for _ in range(8)],
            Event("/1000 ", kill_all("PushAgentLoopWorker", run_dir)),
            *[Event("/1000 ") for _ in range(8)],
            Event("/1000 ", interrupt),
        ],
    )
    check_ended(job, "interrupted")
    assert audit_file(run_dir).violations == []
    assert audit_events(job.events()).violations == []
    again = [
        (event["event"], event["replica"])
        for event in job.events()
        if event["event"] in ("FENCED", "REJOINED")
    ]
    assert again == [
        ("FENCED", "logp"),
        ("REJOINED", "logp"),
        ("FENCED", "ref_logp"),
        ("REJOINED", "ref_logp"),
    ]


@pytest.mark.nightly
def test_agent_loop_workers_that_die_in_a_validation(
    tied_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are started again and validate their prompts again."""
    agents, deaths, run_dir, steps = tmp_path / "agents.json", tmp_path / "deaths", tmp_path / "run", 3
    agents.write_text(json.dumps([{"name": "dies", "_target_": "tests.e2e.parts.DiesInValidation"}]))
    deaths.mkdir()
    for name in ("first", "second"):
        (deaths / name).touch()
    monkeypatch.setenv("ASYNC_PIPELINE_TEST_DEATHS", str(deaths))
    job = run_job(
        [
            *smoke_command(
                f"trainer.total_training_steps={steps}", f"trainer.v1.async_pipeline.run_dir={run_dir}"
            ),
            "trainer.val_before_train=true",
            "trainer.test_freq=-1",
            "actor_rollout_ref.rollout.agent.default_agent_loop=dies",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={agents}",
        ],
        run_dir,
        tied_task,
    )
    assert job.status == 0, job.output[-3000:]
    assert list(deaths.iterdir()) == [], "two processes have ended"
    validated = [row["data"] for row in job.metrics() if "async_pipeline/validation/version" in row["data"]]
    assert [row["async_pipeline/validation/version"] for row in validated] == [0]
    assert job.summary["steps"] == steps


@pytest.mark.nightly
def test_a_training_worker_that_hangs_is_named(tied_task: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def stop(process: subprocess.Popen[str]) -> None:
        for pid in pids_named("WorkerDict", run_dir):
            os.kill(pid, signal.SIGSTOP)

    job = run_job(
        [*long_run(tmp_path), "trainer.v1.async_pipeline.faults.wait_timeout_s=40"],
        run_dir,
        tied_task,
        events=[Event(" 3/1000", stop)],
    )
    assert job.status not in (0, None)
    assert "timeout: " in job.output
    named = re.compile(r"WaitTimeout: .*waiting for the call \w+ to return")
    assert named.search(job.summary["error"])
    assert named.search("\n".join(job.output.splitlines()[-3:]))
    assert processes_of(run_dir) == []
    diagnosis = (run_dir / "diagnosis.txt").read_text()
    assert re.search(r"waits since \d+\.\d s \(of at most 40 s\) for the call \w+ to return", diagnosis)
    for part in (
        "waits:",
        "roles:",
        "pools:",
        "channels:",
        "message queue: ",
        "last 30 events:",
    ):
        assert part in diagnosis


@pytest.mark.nightly
def test_a_training_worker_that_dies(tied_task: Path, tmp_path: Path) -> None:
    """Its memory is unlinked in every state."""
    run_dir = tmp_path / "run"
    before = set(SHM_DIR.glob(f"{PREFIX}*"))

    job = run_job(
        long_run(tmp_path), run_dir, tied_task, events=[Event(" 3/1000", kill_all("WorkerDict", run_dir))]
    )
    check_ended(job, "ActorDiedError")
    assert set(SHM_DIR.glob(f"{PREFIX}*")) <= before


@pytest.mark.nightly
def test_ctrl_c_while_adapters_are_trained(tied_task: Path, tmp_path: Path) -> None:
    # Adapters alone are trained here, and published without their base.
    adapters = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.rollout.load_format=auto"]
    job = run_job(
        [*long_run(tmp_path), *adapters], tmp_path / "run", tied_task, events=[Event(" 2/1000", interrupt)]
    )
    check_ended(job, "interrupted")
    assert job.status == 130
    served = [event["version"] for event in job.events() if event["event"] == "SERVED"]
    assert served[:2] == [0, 1]
    assert max(abs(row["data"]["rollout_corr/kl"]) for row in job.metrics()) < 0.005
