# SPDX-License-Identifier: Apache-2.0
"""The slowest episode of each group is shown with its turns and what is between them."""

from __future__ import annotations

from recipe.async_pipeline.core.events import SLOWEST_TURNS, LogRecord
from recipe.async_pipeline.tools.report.trace import trace_events
from recipe.async_pipeline.tools.report.trace_episodes import MAX_TRACKS, SlowestEpisode, episode_events


def answered(t: float, key: str, seconds: float, *turns: list[float]) -> LogRecord:
    fields = {"key": key, "seconds": seconds, **({SLOWEST_TURNS: list(turns)} if turns else {})}
    return LogRecord(t=t, role="generate", event="ANSWERED", state=None, fields=fields)


def test_an_episode_is_divided_into_turns_and_environment() -> None:
    episode = SlowestEpisode.of(answered(10.0, "a", 4.0, [0.5, 1.0], [2.0, 1.5]))
    assert episode is not None
    shown = [one for one in episode_events([episode], 9) if one["ph"] == "X"]
    assert [(one["name"], one["cat"], one["ts"] / 1e6, one["dur"] / 1e6) for one in shown] == [
        ("episode of a", "episode", 6.0, 4.0),
        ("environment", "environment", 6.0, 0.5),
        ("turn 1", "turn", 6.5, 1.0),
        ("environment", "environment", 7.5, 0.5),
        ("turn 2", "turn", 8.0, 1.5),
        ("environment, score", "environment", 9.5, 0.5),
    ]
    assert shown[0]["args"] == {"group": "a", "turns": 2}
    assert {(one["pid"], one["tid"]) for one in shown} == {(9, 1)}


def test_a_group_of_single_responses_has_no_episode() -> None:
    assert SlowestEpisode.of(answered(10.0, "a", 4.0)) is None
    assert list(episode_events([], 9)) == []


def test_episodes_that_overlap_are_on_different_threads() -> None:
    def episode(start: float, end: float) -> SlowestEpisode:
        return SlowestEpisode(f"{start}", start, end, [(start, end)])

    found = {
        one["name"]: one["tid"]
        for one in episode_events([episode(0, 5), episode(1, 2), episode(2, 6), episode(5, 7)], 9)
        if one.get("cat") == "episode"
    }
    assert list(found.values()) == [1, 2, 2, 1]
    crowd = [episode(0, 1) for _ in range(MAX_TRACKS + 5)]
    shown = [one for one in episode_events(crowd, 9) if one.get("cat") == "episode"]
    assert len(shown) == MAX_TRACKS


def test_they_are_in_the_trace_after_the_pools() -> None:
    start = {"graph": {"generate": []}, "pools": {"p": {"devices": 1, "roles": ["generate"]}}}
    records = [
        LogRecord(t=0.0, role="flow", event="START", state=None, fields=start),
        answered(10.0, "a", 4.0, [0.0, 1.0], [2.0, 1.5]),
    ]
    events = trace_events(records)
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    (turn,) = [one for one in events if one["name"] == "turn 2"]
    assert names[turn["pid"]] == "slowest episode of each group"
    assert max(names) == turn["pid"] and len(names) == 4
