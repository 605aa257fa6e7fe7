# SPDX-License-Identifier: Apache-2.0
"""The trace follows the format, matches the log, and is read correctly by Perfetto's trace processor."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.core.replay import busy_intervals
from recipe.async_pipeline.errors import RunFilesError
from recipe.async_pipeline.tools.report.trace import MAX_FLOWS, trace_events, write_trace
from recipe.async_pipeline.tools.report.trace_episodes import TraceEvent
from recipe.async_pipeline.tools.run_directory import read_events
from tests import HANG_S, REPOSITORY
from tests.observe.run_folder import RecordedTrainer, write_run

PROCESSOR = Path(os.environ.get("TRACE_PROCESSOR_DIR", REPOSITORY / ".cache" / "trace_processor"))
REQUIRED = {
    "M": {"name", "pid", "args"},
    "X": {"name", "cat", "ts", "dur", "pid", "tid"},
    "C": {"name", "ts", "pid", "args"},
    "i": {"name", "ts", "pid", "tid", "s"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "t": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
}
GROUPS, STEPS = 4, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("run")
    trainer = RecordedTrainer(
        max_lag=2,
        steps=STEPS,
        groups=GROUPS,
        n=2,
        places={"ref_logp": "ref"},
        order="finished",
        costs={"validate": 1.0, "draw": 0.01},
    )
    return write_run(path, trainer, strategy="fully_async")


@pytest.fixture(scope="module")
def events(folder: Path) -> list[TraceEvent]:
    return trace_events(read_events(folder / "events.jsonl"))


def slices(events: list[TraceEvent], **wanted: Any) -> list[TraceEvent]:
    return [e for e in events if e["ph"] == "X" and all(e.get(k) == v for k, v in wanted.items())]


def test_every_event_has_the_fields_of_its_phase(events: list[TraceEvent]) -> None:
    for event in events:
        assert REQUIRED[event["ph"]] <= event.keys(), event
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 1) > 0
    assert {e["ph"] for e in events} == set(REQUIRED)
    json.loads(json.dumps(events, allow_nan=False))


def test_slices_of_a_track_do_not_overlap(events: list[TraceEvent]) -> None:
    tracks: dict[tuple[int, int], float] = defaultdict(float)
    for event in slices(events):
        track = (event["pid"], event["tid"])
        assert event["ts"] >= tracks[track] - 1e-3, "overlaps the previous slice"
        tracks[track] = event["ts"] + event["dur"]
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert tracks.keys() <= named


def test_a_stage_runs_as_long_as_in_the_log(folder: Path, events: list[TraceEvent]) -> None:
    records = read_events(folder / "events.jsonl")
    for role in ("train", "logp", "ref_logp"):
        shown = sum(e["dur"] for e in slices(events, name=role, cat="run")) / 1e6
        assert shown == pytest.approx(sum(b - a for a, b in busy_intervals(records, role)), abs=1e-4)


def test_every_wait_names_its_cause(events: list[TraceEvent]) -> None:
    waits = {e["name"] for e in slices(events, cat="wait")}
    assert waits
    assert all(name.startswith(("waits for ", "hands over ")) and not name.endswith(" ") for name in waits)
    gated = [name for name in waits if name.startswith("waits for param_update (version ")]
    assert gated, "log-probs wait for the gather of the previous version"


def test_each_pool_shows_the_holders_of_its_lease(events: list[TraceEvent]) -> None:
    pools = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(pools.values()) == [
        "no device",
        "pool generate: 4 devices",
        "pool ref: 1 device",
        "pool train: 4 devices",
        "run",
    ]
    held = {pools[e["pid"]]: e["name"] for e in slices(events, cat="lease") if e["pid"] > 2}
    assert held["pool ref: 1 device"] == "ref_logp"
    assert {e["name"] for e in slices(events, cat="lease", pid=3)} >= {"train", "logp", "param_update"}
    assert any(e["name"] == "generate" for e in slices(events, cat="lease"))


def test_an_arrow_follows_each_trained_group_from_prompt_to_step(events: list[TraceEvent]) -> None:
    flows: dict[int, list[TraceEvent]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
    assert len(flows) == STEPS * GROUPS
    for passages in flows.values():
        assert "".join(p["ph"] for p in passages) == "s" + "t" * (len(passages) - 2) + "f"
        assert [p["ts"] for p in passages] == sorted(p["ts"] for p in passages)
        through = [around(events, p) for p in passages]
        assert through[:3] == ["dataloader", "generate", "rollout"]
        assert sorted(through[3:5]) == ["logp", "ref_logp"]
        assert through[5:] == ["reward", "train"]


def around(events: list[TraceEvent], point: TraceEvent) -> str:
    """Return the name of the slice that an arrow passes through."""
    found = [
        e["name"]
        for e in slices(events, pid=point["pid"], tid=point["tid"])
        if e["ts"] <= point["ts"] < e["ts"] + e["dur"]
    ]
    assert len(found) == 1
    return str(found[0])


def test_counters_and_marks_match_the_run(events: list[TraceEvent]) -> None:
    counters: dict[str, list[dict[str, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            counters[event["name"]].append(event["args"])

    versions = counters["version"]
    for kind in ("trained", "gathered", "served"):
        seen = [v[kind] for v in versions]
        assert seen == sorted(seen), "versions only grow"
        assert seen[-1] == STEPS
    assert all(v["served"] <= v["gathered"] <= v["trained"] for v in versions)
    assert len(counters["lag"]) == STEPS
    assert all(lag["mean"] <= lag["max"] <= 2 for lag in counters["lag"])
    assert sum(counters["groups"][-1].values()) == 0

    marks = [e["name"] for e in events if e["ph"] == "i"]
    assert marks.count("version 3 gathered") == marks.count("version 3 served") == 1
    assert len(slices(events, cat="validated")) == STEPS + 1


def test_arrows_follow_only_some_of_many_groups(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    assert MAX_FLOWS >= 1000
    monkeypatch.setattr("recipe.async_pipeline.tools.report.trace.MAX_FLOWS", 10)
    ends = [e for e in trace_events(read_events(folder / "events.jsonl")) if e["ph"] == "f"]
    assert 1 <= len(ends) <= 10


def test_a_killed_run_has_a_trace_up_to_its_last_event(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "events.jsonl").write_text("".join(lines[: len(lines) // 2]) + '{"t": 9')
    written = json.loads(write_trace(tmp_path).read_text())["traceEvents"]
    last_s = json.loads(lines[len(lines) // 2 - 1])["t"]
    assert max(e["ts"] + e["dur"] for e in slices(written)) == pytest.approx(last_s * 1e6, abs=1)
    assert not (tmp_path / "trace.part").exists()


def test_a_log_without_pools_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(
        '{"t": 0.0, "role": "flow", "event": "START", "state": "RUNNING"}\n'
    )
    with pytest.raises(RunFilesError, match="does not name the stages and pools"):
        write_trace(tmp_path)


QUERIES = {
    "problems": "select name, value from stats where severity != 'info' and value > 0",
    "slices": "select count(*) n, max(depth) depth from slice",
    "flows": "select s.name out_of, d.name into_, count(*) n from flow f join slice s on f.slice_out = s.id "
    "join slice d on f.slice_in = d.id group by 1, 2",
    "counters": "select t.name, count(*) n, max(c.value) most from counter c join counter_track t on "
    "c.track_id = t.id group by 1",
    "train_s": "select sum(dur) / 1e9 s from slice where name = 'train' and category = 'run'",
    "processes": "select name from process where name is not null order by pid",
}


def test_perfetto_reads_the_trace_correctly(folder: Path, events: list[TraceEvent]) -> None:
    node = shutil.which("node")
    if node is None or not (PROCESSOR / "trace_processor.wasm").exists():
        pytest.skip(
            "needs node and Perfetto's trace processor; `bash run_scripts/trace_processor.sh` fetches it"
        )

    command = [
        node,
        str(REPOSITORY / "tests" / "perfetto" / "query.mjs"),
        str(PROCESSOR),
        str(write_trace(folder)),
    ]
    done = subprocess.run(command, input=json.dumps(QUERIES), capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-2000:]

    read = json.loads(done.stdout)
    assert read["problems"] == []
    assert read["slices"] == [{"n": len(slices(events)) + sum(e["ph"] == "i" for e in events), "depth": 0}]

    edges = {(row["out_of"], row["into_"]): row["n"] for row in read["flows"]}
    trained = STEPS * GROUPS
    # Perfetto lets an arrow leave the slice that began first, and generate works on other groups already when
    # the dataloader draws this one.
    drawn = edges["dataloader", "generate"] + edges.get(("generate", "dataloader"), 0)
    assert drawn == edges["generate", "rollout"] == edges["reward", "train"] == trained
    assert sum(edges.values()) == trained * 6, "no arrow is lost"

    counters = {row["name"]: row for row in read["counters"]}
    assert counters["version served"]["most"] == STEPS
    assert counters["lag max"]["n"] == STEPS
    assert read["train_s"][0]["s"] == pytest.approx(STEPS * 1.0, rel=1e-6)
    assert [row["name"] for row in read["processes"]] == [
        "run",
        "no device",
        "pool train: 4 devices",
        "pool generate: 4 devices",
        "pool ref: 1 device",
    ]
