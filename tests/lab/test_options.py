# SPDX-License-Identifier: Apache-2.0
"""The fields of a struct are options with their types, defaults, bounds and help."""

from __future__ import annotations

import argparse
from typing import Annotated

import msgspec
import pytest
from msgspec import Meta

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.lab.options import Option, options_of


class Size(msgspec.Struct, kw_only=True):
    rows: Annotated[int, Meta(ge=1, title="N", description="rows of it")] = 3
    row_share: Annotated[float, Meta(ge=0, lt=1, title="SHARE", description="share of it")] = 0.5
    wait_s: Annotated[float, Meta(gt=0, title="S", description="time of it")] = 0.1


ROWS, SHARE, WAIT = options_of(Size)


def test_options_have_the_types_defaults_and_help_of_the_fields() -> None:
    parser = argparse.ArgumentParser()
    for option in (ROWS, SHARE, WAIT):
        option.add_to(parser, default=option.default)
    assert vars(parser.parse_args(["--rows", "7", "--row-share", "0.25"])) == {
        "rows": 7,
        "row_share": 0.25,
        "wait_s": 0.1,
    }
    shown = " ".join(parser.format_help().split())
    assert "--rows N rows of it (default: 3)" in shown
    assert "--row-share SHARE share of it (default: 0.5)" in shown


@pytest.mark.parametrize(("option", "value"), [(ROWS, 1), (SHARE, 0.0), (SHARE, 0.999), (WAIT, 1e-9)])
def test_values_within_the_bounds_are_accepted(option: Option, value: float) -> None:
    option.check(value)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (ROWS, 0, r"--rows must be >= 1, got 0; the default is 3"),
        (SHARE, 1.0, r"--row-share must be in \[0, 1\), got 1"),
        (SHARE, -0.1, r"--row-share must be in \[0, 1\), got -0.1"),
        (WAIT, 0.0, r"--wait-s must be > 0, got 0"),
    ],
)
def test_values_out_of_the_bounds_are_rejected(option: Option, value: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        option.check(value)
