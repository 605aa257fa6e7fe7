# SPDX-License-Identifier: Apache-2.0
"""Keys that propose the same knob must agree, and the one that proposed it is named."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.config.foreign_keys import Draft
from recipe.async_pipeline.errors import ConfigError


def test_keys_that_agree_share_a_knob() -> None:
    draft = Draft()
    draft.propose("strategy", "on_policy", "a")
    draft.propose("strategy", "on_policy", "b")
    assert (draft.values, draft.sources) == ({"strategy": "on_policy"}, {"strategy": "a"})


def test_keys_that_disagree_are_named() -> None:
    draft = Draft()
    draft.propose("strategy", "on_policy", "a")
    with pytest.raises(ConfigError, match="b asks for strategy=fully_async but a for on_policy; keep one"):
        draft.propose("strategy", "fully_async", "b")
