# SPDX-License-Identifier: Apache-2.0
"""The YAML, the documentation page and the help are rendered from the dataclasses."""

from __future__ import annotations

from typing import Any, cast

import pytest
from omegaconf import OmegaConf

from recipe.async_pipeline.config.keys.aliases import FOREIGN, SET_BY_OTHERS, quota
from recipe.async_pipeline.config.keys.foreign_keys import Draft
from recipe.async_pipeline.config.keys.translation import resolve
from recipe.async_pipeline.config.knobs.fields import flattened, knobs_of
from recipe.async_pipeline.config.knobs.schema import AsyncPipelineConfig, knob_paths
from recipe.async_pipeline.config.paths import OWN, select
from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.tools.explain.reference import DOCS, YAML, render_docs, render_help, render_yaml
from tests import REPOSITORY
from tests.fakes.alias_values import UNDERSTOOD, WITH_OTHERS


@pytest.mark.parametrize(("path", "render"), [(YAML, render_yaml), (DOCS, render_docs)])
def test_a_rendered_file_is_up_to_date(path: Any, render: Any) -> None:
    written = (REPOSITORY / path).read_text(encoding="utf-8")
    assert written == render(), f"{path} differs from the knobs; run `bash run_scripts/fix.sh`"


def test_the_yaml_has_every_knob_with_its_default() -> None:
    raw = cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.create(render_yaml())))
    found = flattened(AsyncPipelineConfig, select(raw, OWN))
    assert tuple(found) == knob_paths()
    assert resolve(raw).config == AsyncPipelineConfig()
    for knob in knobs_of(AsyncPipelineConfig):
        default = list(knob.default) if isinstance(knob.default, tuple) else knob.default
        assert found[knob.path] == (None if knob.path in SET_BY_OTHERS else default), knob.path


def test_every_knob_is_documented() -> None:
    lines, page, help_text = render_yaml().splitlines(), render_docs(), "\n".join(render_help())
    for knob in knobs_of(AsyncPipelineConfig):
        above = [
            b for b, line in zip(lines, lines[1:], strict=False) if line.strip().startswith(f"{knob.name}:")
        ]
        assert above and all(line.strip().startswith("#") for line in above), knob.path
        assert f"| `{knob.path}` |" in page
        assert f"\n{knob.path}  (" in help_text


def test_a_foreign_key_sets_only_the_knobs_that_it_declares() -> None:
    seen = {"pools"}
    for path, value, _ in (*UNDERSTOOD, *WITH_OTHERS):
        for key in FOREIGN:
            if path == key.path:
                draft = Draft()
                for name, wanted in key.apply(value, {}).overrides.items():
                    draft.propose(name, wanted, path)
                quota(draft, None)
                found = {name for name in draft.values if name in knob_paths()}
                assert found <= set(key.sets), path
                seen |= found
    assert seen | {"strategy"} == SET_BY_OTHERS


def test_help_can_be_limited_to_a_section() -> None:
    text = "\n".join(render_help("weight_sync"))
    assert "weight_sync.every  (whole number >= 1; default: 1)" in text
    assert "staleness" not in text
    with pytest.raises(ConfigError, match="no section or knob 'weight_snc' .did you mean 'weight_sync'"):
        render_help("weight_snc")


@pytest.mark.parametrize("path", ["staleness.max_lag", f"{OWN}.staleness.max_lag", "max_lag"])
def test_help_can_be_limited_to_a_knob(path: str) -> None:
    """A knob is found by its path, its whole key or its name."""
    knobs = [line for line in render_help(path) if line.startswith(("staleness", "weight_sync"))]
    assert len(knobs) == 1 and knobs[0].startswith("staleness.max_lag  (")
