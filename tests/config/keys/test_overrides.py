# SPDX-License-Identifier: Apache-2.0
"""hydra's complaints about a command line become one line, with the override to write instead."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from recipe.async_pipeline.config.keys.overrides import explain_complaint, quote_names, sets
from recipe.async_pipeline.config.paths import OWN
from tests import REPOSITORY

DEADLINE = f"{OWN}.faults.wait_timeout_s"
STAGES = f"{OWN}.custom_stages"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("name=1", "name is not a key of this config; check its spelling, or write +name=... to add it"),
        (
            f"+{DEADLINE}=1",
            f"+{DEADLINE} must not have a +, because this config has the key; write {OWN}.",
        ),
        (f"{STAGES}=[a:B@reward->train]", f"{STAGES}=[a:B@reward->train] cannot be parsed; put values with "),
        (
            f'{STAGES}=["a:B"',
            "an override cannot be parsed (no viable alternative at input '[\"a:B\"'); put ",
        ),
        (
            f"{STAGES}=a,b",
            f"{STAGES} must be one value, got a,b; write '{STAGES}=[a,b]' for a list",
        ),
    ],
)
def test_a_complaint_becomes_one_line(override: str, line: str) -> None:
    """The installed hydra makes the complaints."""
    GlobalHydra.instance().clear()
    with (
        initialize_config_dir(config_dir=str(REPOSITORY / "configs"), version_base=None),
        pytest.raises(HydraException) as caught,
    ):
        compose(config_name="async_pipeline", overrides=[override])
    words = explain_complaint(str(caught.value).split("\n")[0])
    assert words is not None
    assert words.startswith(line) and "\n" not in words


def test_other_lines_are_left_alone() -> None:
    assert explain_complaint("ValueError: no viable alternative") is None
    assert explain_complaint("") is None


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("a.b=1", True),
        ("+a.b=1", True),
        ("++a.b='x=y'", True),
        ("a.bc=1", False),
        ("a=b", False),
        ("c=a.b", False),
        ("~a.b", False),
    ],
)
def test_a_command_line_sets_a_key(override: str, expected: bool) -> None:
    assert sets(["other=1", override], "a.b") is expected


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("name=läuft", "läuft"),
        ("name=/data/日本 語/it's: 1, 2", "/data/日本 語/it's: 1, 2"),
        ("name=über\\", "über\\"),
        ("name='schön'", "schön"),
        ('name="schön"', "schön"),
        ("name=[/a/é.parquet, b, 'ü,ö', [ö]]", ["/a/é.parquet", "b", "ü,ö", ["ö"]]),
        ("name={size: groß wie 4, path: /é:b, more: {list: [ä, 1]}}",
         {"size": "groß wie 4", "path": "/é:b", "more": {"list": ["ä", 1]}}),
        ("name=[a,{b:c}]", ["a", {"b": "c"}]),
    ],
)  # fmt: skip
def test_texts_that_are_not_ascii_need_no_quotes(override: str, value: object) -> None:
    parsed = OverridesParser.create().parse_override(quote_names(override))
    assert OmegaConf.to_container(OmegaConf.create({"name": parsed.value()})) == {"name": value}


@pytest.mark.parametrize("override", ["größe=1", "name={größe: 1}", "name={größe: groß}"])
def test_keys_that_are_not_ascii_belong_into_a_file(override: str) -> None:
    GlobalHydra.instance().clear()
    with (
        initialize_config_dir(config_dir=str(REPOSITORY / "configs"), version_base=None),
        pytest.raises(HydraException) as caught,
    ):
        compose(config_name="async_pipeline", overrides=[quote_names(override)])
    line = explain_complaint(str(caught.value).split("\n")[0])
    assert line is not None and line.endswith("because it has keys that are not ASCII; set it in a file")
