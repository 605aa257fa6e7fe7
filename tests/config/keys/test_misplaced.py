# SPDX-License-Identifier: Apache-2.0
"""A misplaced or misspelled key is an error that names the right one."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.config.keys.aliases import FOREIGN
from recipe.async_pipeline.config.keys.misplaced import ALSO_VERLS, ON_THE_WAY, unknown_key
from recipe.async_pipeline.config.keys.translation import resolve
from recipe.async_pipeline.config.knobs.fields import sections_of
from recipe.async_pipeline.config.knobs.schema import AsyncPipelineConfig, knob_paths
from recipe.async_pipeline.config.paths import OWN
from recipe.async_pipeline.errors import ConfigError
from tests.fakes.alias_values import ROLLOUT, nested


def test_a_key_that_the_config_lacks() -> None:
    assert unknown_key("trainer.v1.async_pipeline.staleness.max_lag").endswith(
        "since this config has no such key; write +trainer.v1.async_pipeline.staleness.max_lag=..."
    )
    assert "nearest knobs: faults.wait_timeout_s, " in unknown_key("trainer.v1.async_pipeline.wait_timeout")
    assert unknown_key("trainer.v1.async_pipeline.agentic.environment_kwargs").endswith(
        "write +trainer.v1.async_pipeline.agentic.environment_kwargs={...} to add them, and "
        "trainer.v1.async_pipeline.agentic.environment_kwargs=null before it to remove the names of the "
        "configuration"
    )
    assert unknown_key("trainer.nope") == (
        "trainer.nope is not a key of this config; check its spelling, or write +trainer.nope=... to add it"
    )
    assert unknown_key("trainer.nope", read=False) == (
        "trainer.nope is not a key of this config, and no code of verl reads it; leave it out, or write "
        "+trainer.nope=... for code of yours that does"
    )
    loss = "actor_rollout_ref.actor.policy_loss.tis_upper_bound"  # this package's, in a section of verl
    assert unknown_key(loss, fixed=True).endswith(f"write +{loss}=...")
    assert unknown_key("max_turns", read=False).endswith(f"leave it out, or set ++{OWN}.agentic.max_turns")


@pytest.mark.parametrize("path", [path for path in knob_paths() if path.count(".") < 2])
def test_every_knob_is_recognized_on_the_way_to_its_section(path: str) -> None:
    name = path.rpartition(".")[2]
    misplaced = [f"{parent}.{name}".lstrip(".") for parent in ON_THE_WAY]
    misplaced += [f"somewhere.else.{path}"] if "." in path else []
    for key in {*misplaced} - {key.path for key in FOREIGN}:
        with pytest.raises(ConfigError, match=f"^{key} is misplaced, got 3; it belongs at .*{path}"):
            resolve(nested((key, 3)))


@pytest.mark.parametrize("name", ["max_turns", "timeout_s", "environment"])
def test_a_section_of_the_user_may_have_any_name(name: str) -> None:
    assert resolve(nested((f"{ROLLOUT}.custom.{name}", 3))) == resolve({})


@pytest.mark.parametrize("section", [path for path in sections_of(AsyncPipelineConfig) if "." not in path])
def test_a_section_one_level_too_high_is_misplaced(section: str) -> None:
    for parent in ON_THE_WAY:
        key = f"{parent}.{section}".lstrip(".")
        if key != ALSO_VERLS:
            with pytest.raises(ConfigError, match=f"{key} is misplaced, .*belongs at {OWN}.{section}"):
                resolve(nested((key, {"x": 1})))
