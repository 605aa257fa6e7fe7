# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline episodes`: the lowest rewards come first."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.async_pipeline.cli import main
from recipe.async_pipeline.observe.run_directory.agent_output import KeptOutput
from recipe.async_pipeline.tools.cli.episodes import OTHER_OUTPUTS, in_words
from recipe.async_pipeline.tools.report.figures.episodes import EpisodeRecord, EpisodesRead, TextPart
from tests.fakes.ledgers import whole, write


def episode(key: str, reward: float | None, **more: object) -> EpisodeRecord:
    given = {"step": 3, "end": "done", "attempts": 1, "tokens": 9, "versions": (1, 2), **more}
    return EpisodeRecord(key=key, reward=reward, **given)  # type: ignore[arg-type]


EPISODES = EpisodesRead(
    step=3,
    episodes=(
        episode(
            "a",
            1.0,
            prompt="P.\n..>",
            parts=(TextPart(True, "R"), TextPart(False, "\n#..G>\n"), TextPart(True, "")),
            versions=(2, 2),
            turns=2,
            place={"index": 7, "seed": 3},
        ),
        episode(
            "b",
            0.0,
            end="invalid",
            attempts=2,
            prompt="p",
            parts=(TextPart(True, "x", 1), TextPart(True, "y", 2)),
            pictures=("texts/pictures/1.png",),
        ),
        episode("c", None),
    ),
)


def test_the_worst_come_first() -> None:
    assert list(in_words(EPISODES, None)) == [
        "step 3: 3 episodes, mean reward 0.500; ends: 2 done, 1 invalid",
        "> what the policy read, < what it wrote",
        "",
        "c  reward None  end done  1 turn  9 tokens  versions 1 to 2",
        "",
        "b  reward 0.0  end invalid, attempt 2  1 turn  9 tokens  versions 1 to 2",
        "  > picture texts/pictures/1.png",
        "  > p",
        "  < xy",
        "",
        "a  prompt 7  seed 3  reward 1.0  end done  2 turns  9 tokens  version 2",
        "  > P.",
        "  > ..>",
        "  < R",
        "  > #..G>",
        "  <",
    ]
    assert [line.split()[0] for line in in_words(EPISODES, 1) if line and line[0] not in " >"] == [
        "step",
        "c",
    ]


def test_conversations_are_shown_with_their_episode() -> None:
    found = EpisodesRead(
        step=3,
        episodes=(
            episode("u_0_0", 1.0),
            episode("u_1_0", 0.0, is_last=False),
            episode("u_1_1", 0.0, end="tokens"),
        ),
    )
    assert [line for line in in_words(found, 1) if line] == [
        "step 3: 2 episodes in 3 conversations, mean reward 0.500; ends: 1 done, 1 tokens",
        "u_1_0  conversation 1 of 2  1 turn  9 tokens  versions 1 to 2",
        "u_1_1  conversation 2 of 2  reward 0.0  end tokens  1 turn  9 tokens  versions 1 to 2",
    ]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "ledger.jsonl", [*whole()])
    assert main.main(["episodes", str(tmp_path), "--worst", "1", "--step", "2"]) == 0
    out = capsys.readouterr().out
    assert "step 2: 4 episodes" in out and out.count("tokens  ") == 1
    assert "set trainer.rollout_data_dir to have it" in out
    assert main.main(["episodes", str(tmp_path / "nothing")]) == 2


def test_the_page_is_in_the_run_directory_or_in_the_given_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "ledger.jsonl", [*whole()])
    other = tmp_path / "made" / "page.html"
    assert main.main(["episodes", str(tmp_path), "--html"]) == 0
    assert main.main(["episodes", str(tmp_path), "--html", str(other), "--step", "2", "--worst", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"wrote {path}" for path in (tmp_path / "episodes.html", other)
    ]
    assert "Episodes of step 4" in (tmp_path / "episodes.html").read_text()
    assert "3 episodes with higher rewards are left out" in other.read_text()


def test_the_output_of_failed_attempts_is_named(tmp_path: Path) -> None:
    def output(episode: str, number: int) -> KeptOutput:
        return KeptOutput(tmp_path / f"{episode}-{number}.txt", episode, number, "agent_failed", "a bug")

    others = tuple(output(f"w_{i}", 1) for i in range(OTHER_OUTPUTS + 1))
    found = EpisodesRead(
        step=3,
        episodes=(episode("u_0_0", 1.0, attempts=2), episode("u_1_0", 2.0)),
        outputs=(*others, output("u_0", 1), output("v_0", 2)),
    )
    lines = list(in_words(found, 1))
    at = lines.index("u_0_0  reward 1.0  end done, attempt 2  1 turn  9 tokens  versions 1 to 2")
    assert lines[at + 1 : at + 3] == [
        "  attempt 1 at u_0: agent_failed: a bug",
        f"    {tmp_path / 'u_0-1.txt'}",
    ]
    assert lines[at + 4] == "12 failed attempts at episodes that this step has not trained:"
    assert lines[-1] == f"    {tmp_path / 'v_0-2.txt'}"
    assert len(lines) == at + 5 + 2 * OTHER_OUTPUTS
