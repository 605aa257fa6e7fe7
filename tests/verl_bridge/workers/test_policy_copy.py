# SPDX-License-Identifier: Apache-2.0
"""A copy of the policy reports a version only if every rank holds it, and keeps one on disk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.async_pipeline.errors import ProofError, WeightSyncError
from recipe.async_pipeline.verl_bridge.workers.policy_copy import PolicyCopy
from recipe.async_pipeline.weight_sync.engine.shard_load import RankLoad
from recipe.async_pipeline.weight_sync.memory.manifest import WeightTicket

TICKET, NEXT = (
    WeightTicket(version=version, board="b", pid=1, num_bytes=8, gather_s=0.1) for version in (4, 5)
)

MEMORIES: Any = object()


def copy_of(load: Any) -> PolicyCopy:
    return PolicyCopy("logp", SimpleNamespace(load_version=load))


def test_every_rank_loads_the_version() -> None:
    loads = []

    def load(*arguments: Any) -> list[RankLoad]:
        loads.append(arguments)
        return [RankLoad(4, 0), RankLoad(4, 3)]

    policy = copy_of(load)
    assert policy.version is None
    policy.load(TICKET, MEMORIES, 2.0)
    assert policy.version == 4
    assert loads == [(TICKET, MEMORIES, 2.0)]


def test_ranks_with_different_versions_are_an_error() -> None:
    policy = copy_of(lambda *arguments: [RankLoad(4, 1), RankLoad(3, 1)])
    with pytest.raises(
        WeightSyncError, match=r"logp should have loaded version 4, but its ranks hold \[3, 4\]"
    ):
        policy.load(TICKET, MEMORIES, 2.0)
    assert policy.version is None


def test_ranks_that_together_compared_nothing_are_an_error() -> None:
    policy = copy_of(lambda *arguments: [RankLoad(4, 0), RankLoad(4, 0)])
    with pytest.raises(ProofError, match="v4: nothing could be compared on any rank of logp"):
        policy.load(TICKET, MEMORIES, 2.0)
    assert policy.version is None


def test_no_version_is_held_after_a_failed_load() -> None:
    def load(*arguments: Any) -> list[RankLoad]:
        if policy.version is None and arguments[0] == NEXT:
            raise ProofError("differs")
        return [RankLoad(4, 1)]

    policy = copy_of(load)
    policy.load(TICKET, MEMORIES, 2.0)
    with pytest.raises(ProofError):
        policy.load(NEXT, MEMORIES, 2.0)
    assert policy.version is None


# On disk.


class Ranks:
    """Workers whose weights are a text; `missing` of them write to another file system."""

    def __init__(self, ranks: int = 2, missing: int = 0) -> None:
        self.workers, self._missing, self.weights = [None] * ranks, missing, "initial"
        self.saves: list[str] = []
        self.fails: Exception | None = None

    def save_reference(self, folder: str) -> None:
        self.saves.append(Path(folder).name)
        for rank in range(len(self.workers) - self._missing):
            Path(folder).mkdir(parents=True, exist_ok=True)
            Path(folder, f"rank_{rank}").write_text(self.weights)
            if self.fails is not None:
                raise self.fails

    def load_reference(self, folder: str) -> None:
        if self.fails is not None:
            raise self.fails
        self.weights = Path(folder, "rank_0").read_text()


def kept_copy(tmp_path: Path, group: Any) -> PolicyCopy:
    policy = PolicyCopy("ref_logp", group, tmp_path / "kept")
    group.weights, policy.version = "of 4", 4
    return policy


def contents(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("rank_*")}


def test_only_the_newest_version_is_kept(tmp_path: Path) -> None:
    policy = kept_copy(tmp_path, Ranks())
    policy.keep()
    policy.group.weights, policy.version = "of 8", 8
    policy.keep()
    assert policy.kept == 8
    assert contents(tmp_path / "kept") == {"version_8/rank_0": "of 8", "version_8/rank_1": "of 8"}


def test_new_workers_load_what_was_kept(tmp_path: Path) -> None:
    policy = kept_copy(tmp_path, Ranks())
    policy.keep()
    policy.restarted(Ranks())
    assert (policy.version, policy.kept) == (None, 4)
    policy.load_kept()
    assert (policy.version, policy.group.weights) == (4, "of 4")


def test_after_a_failed_load_no_version_is_held(tmp_path: Path) -> None:
    policy = kept_copy(tmp_path, Ranks())
    policy.keep()
    policy.group.fails = OSError("a stale handle")
    with pytest.raises(OSError, match="stale"):
        policy.load_kept()
    assert policy.version is None


def test_what_was_saved_in_part_is_deleted(tmp_path: Path) -> None:
    policy = kept_copy(tmp_path, Ranks())
    policy.keep()
    policy.group.fails, policy.version = OSError(28, "No space left on device"), 8
    with pytest.raises(OSError, match="No space"):
        policy.keep()
    assert policy.kept is None and contents(tmp_path) == {}


@pytest.mark.parametrize("missing", [1, 3])
def test_ranks_that_write_elsewhere_keep_nothing(tmp_path: Path, missing: int) -> None:
    policy = kept_copy(tmp_path, Ranks(ranks=3, missing=missing))
    with pytest.raises(OSError, match=f"{3 - missing} of 3 ranks of ref_logp have written to .*version_4"):
        policy.keep()
    assert policy.kept is None and contents(tmp_path) == {}


@pytest.mark.parametrize("links", [True, False])
def test_a_checkpoint_gets_the_kept_version_without_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """They may be restarting. The next version does not change it."""

    def link(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    if not links:
        monkeypatch.setattr("os.link", link)
    policy = kept_copy(tmp_path, Ranks())
    policy.keep()
    policy.restarted(Ranks())
    policy.save(4, tmp_path / "checkpoint" / "reference")
    policy.group.weights, policy.version = "of 8", 8
    policy.keep()
    assert contents(tmp_path / "checkpoint") == {"reference/rank_0": "of 4", "reference/rank_1": "of 4"}
    assert policy.group.saves == ["version_8"]


def test_a_checkpoint_gets_a_version_that_is_not_kept_from_the_workers(tmp_path: Path) -> None:
    policy = kept_copy(tmp_path, Ranks())
    policy.save(4, tmp_path / "reference")
    assert contents(tmp_path / "reference") == {"rank_0": "of 4", "rank_1": "of 4"}


def test_a_checkpoint_does_not_get_the_initial_weights_of_new_workers(tmp_path: Path) -> None:
    policy = kept_copy(tmp_path, Ranks())
    policy.restarted(Ranks())
    with pytest.raises(WeightSyncError, match="holds version None, but the checkpoint needs version 4"):
        policy.save(4, tmp_path / "reference")
    assert contents(tmp_path) == {}
