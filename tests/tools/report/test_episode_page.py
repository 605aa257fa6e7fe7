# SPDX-License-Identifier: Apache-2.0
"""The page of a step's episodes: what each version wrote, calls of tools, rewards, and its bounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from recipe.async_pipeline.observe.run_directory.agent_output import KeptOutput
from recipe.async_pipeline.tools.report import episode_page as module
from recipe.async_pipeline.tools.report.episode_page import MAX_PART, episode_page
from recipe.async_pipeline.tools.report.figures.episodes import EpisodeRecord, EpisodesRead, TextPart
from tests.tools.report.pages import Page, check

RUN = Path("runs", "lake")
CALL = '<tool_call>\n{"name": "<b>add</b>"}\n</tool_call>'


def episode(key: str, reward: float | None, *parts: TextPart, **more: object) -> EpisodeRecord:
    given = {
        "step": 3,
        "end": "done",
        "attempts": 1,
        "tokens": 9,
        "versions": (1, 2),
        "prompt": "2+3?",
        **more,
    }
    return EpisodeRecord(key=key, reward=reward, parts=parts, **given)  # type: ignore[arg-type]


def page_of(*episodes: EpisodeRecord, worst: int | None = None, **more: object) -> Page:
    return check(episode_page(RUN, EpisodesRead(step=3, episodes=episodes, **more), worst))  # type: ignore[arg-type]


def spans(page: Page) -> list[tuple[str | None, str | None]]:
    return [(attrs["class"], attrs["data-tip"]) for attrs in page.all("span")]


def test_each_version_has_its_colour_and_calls_of_tools_are_marked() -> None:
    half = len(CALL) // 2
    page = page_of(
        episode(
            "u_0_0",
            1.0,
            TextPart(True, "I call." + CALL[:half], 1),
            TextPart(True, CALL[half:], 2),
            TextPart(False, "5"),
            TextPart(True, "five", 2),
            turns=2,
        )
    )
    first, second = "c-generate", "c-train"
    assert spans(page) == [
        (first, "version 1"),
        (f"{first} call", "version 1, tool call"),
        (f"{second} call", "version 2, tool call"),
        (second, "version 2"),
    ]
    assert [text for text in page.texts if text.startswith(("turn", "read", "2 turns"))] == [
        "2 turns, 9 tokens,\nversions 1 to 2",
        "turn 1, versions 1, 2, 1 tool call",
        "read",
        "turn 2, version 2",
    ]
    assert CALL[:half] in page.texts, "texts are escaped"


@pytest.mark.parametrize(
    "call",
    [
        "<tool_call>\n<function=add>\n</function>\n</tool_call>",
        '<｜DSML｜invoke name="add">\n</｜DSML｜invoke>',
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n{}<｜tool▁call▁end｜>",
        "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        'functions.add:0{"a": 1}',
        "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}<|call|>",
        'commentary to=functions.add json{"a": 1}',
    ],
)
def test_calls_of_the_model_families_are_marked(call: str) -> None:
    page = page_of(episode("u_0_0", 1.0, TextPart(True, f"I call. {call}", 1)))
    assert [tip for _, tip in spans(page)] == ["version 1", "version 1, tool call"]
    assert call in page.texts and "turn 1, version 1, 1 tool call" in page.texts


def test_two_calls_of_kimi_without_its_special_tokens() -> None:
    page = page_of(episode("u_0_0", 1.0, TextPart(True, "functions.a:0{}functions.b:1{}", 1)))
    assert "turn 1, version 1, 2 tool calls" in page.texts


def test_rewards_of_turns_are_shown() -> None:
    parts = (TextPart(True, "a", 1), TextPart(False, "b"), TextPart(True, "c", 1))
    page = page_of(episode("u_0_0", 0.75, *parts, turn_rewards=(0.25, 0.5)))
    assert {"turn 1, version 1, reward 0.25", "turn 2, version 1, reward 0.5"} <= {*page.texts}


def test_the_episodes_of_a_prompt_are_together_the_lowest_reward_first() -> None:
    page = page_of(
        episode("u_0_0", 1.0),
        episode("u_1_0", 0.5, is_last=False),
        episode("u_1_1", 0.5, end="turns", attempts=2),
        episode("v_0_0", -1.0, place={"index": 7}),
        outputs=(
            KeptOutput(Path("a.txt"), "u_1", 1, "agent_failed", "a bug"),
            KeptOutput(Path("b.txt"), "w_0", 1, "deadline", "slow"),
        ),
    )
    headings = [text for text in page.texts if text.startswith(("Prompt ", "u_", "v_", "Failed"))]
    assert headings == [
        "Prompt v",
        "v_0_0",
        "Prompt u",
        "u_0_0",
        "u_1_1",
        "Failed attempts at other episodes",
    ]
    assert {"ends: 2 done, 1 turns", "index 7, reward -1", "rewards 0.5 to 1", "attempt 2"} <= {*page.texts}
    assert "a.txt" in page.texts and "b.txt" in page.texts
    assert page.texts.count("2+3?") == 2, "the prompt once for each group"


def test_episodes_of_different_prompts_keep_them() -> None:
    page = page_of(episode("u_0_0", 1.0, TextPart(True, "x")), episode("u_1_0", 1.0, prompt="3+4?"))
    assert page.texts.index("2+3?") > page.texts.index("u_0_0")
    assert "3+4?" in page.texts


def test_long_texts_and_many_episodes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    long = episode("u_0_0", 0.0, TextPart(True, "a" * MAX_PART, 1), TextPart(True, "b" * 5, 2))
    page = page_of(long, replace(long, key="u_1_0", reward=1.0), worst=1)
    assert "… 5 characters are left out …" in page.texts
    assert "1 episodes with higher rewards are left out" in page.texts
    assert len("".join(page.texts)) < MAX_PART + 1000
    assert [tip for _, tip in spans(page)] == ["version 1", "version 1", "version 2"]

    monkeypatch.setattr(module, "MAX_PAGE", MAX_PART + 10)
    page = page_of(long, replace(long, key="u_1_0", reward=1.0))
    assert [tip for _, tip in spans(page)] == ["version 1", "version 1", "version 2"]
    assert any(text.startswith("the text of 1 conversations is left out") for text in page.texts)


def test_a_step_without_texts_is_a_page_too() -> None:
    page = page_of(episode("other", None, prompt=None), without_text="the run wrote no text")
    assert {"the run wrote no text", "Prompt other", "reward none"} <= {*page.texts}


def test_a_prompts_pictures_are_shown_once_and_missing_ones_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here.png").write_bytes(b"PNG")
    pictures = (str(tmp_path / "here.png"), "https://example.org/there.jpg")
    both = [episode(f"u_{n}_0", 1.0, TextPart(True, "x", 1), pictures=pictures) for n in range(2)]
    page = page_of(*both)
    assert [(one["src"], one["alt"]) for one in page.all("img")] == [
        ("data:image/png;base64,UE5H", "here.png")
    ]
    assert "there.jpg" in page.texts

    monkeypatch.setattr(module, "MAX_PAGE", 3)
    assert page_of(*both).all("img") == [], "no room"
