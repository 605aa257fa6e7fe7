# SPDX-License-Identifier: Apache-2.0
"""The table of arms, the parser of `--arms`, and overrides in hydra's grammar."""

from __future__ import annotations

from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.lab.bench.inputs import arms
from recipe.async_pipeline.lab.bench.inputs.arms import (
    ARMS,
    DEFAULT_ARMS,
    DEVICES,
    SGLANG_BACKEND,
    arms_of_engine,
    hydra_overrides,
    parse_arms,
)
from recipe.async_pipeline.verl_bridge.rollout.vllm.plugin import IN_PROCESS
from tests import REPOSITORY


def test_arms_keep_the_order_of_their_turns() -> None:
    assert parse_arms(" n_step_ahead, verl_sync ") == ["n_step_ahead", "verl_sync"]
    assert parse_arms(",".join(ARMS)) == list(ARMS)


@pytest.mark.parametrize("text", ["", ",", "sync", "verl_sync,verl_sync", "verl_sync,nope"])
def test_an_invalid_list_names_the_arms(text: str) -> None:
    with pytest.raises(ConfigError, match="of verl_sync, verl_colocate_async, verl_separate_async, "):
        parse_arms(text)


@pytest.mark.parametrize("name", [name for name in ARMS if name != "one_step_off_ref_apart"])
def test_every_arm_has_two_devices(name: str) -> None:
    arm = ARMS[name]
    training = arm.overrides.get("trainer.n_gpus_per_node", 1)
    generating = 0 if arm.overrides.get("actor_rollout_ref.rollout.nnodes") == 0 else 1
    assert (training, generating) == ((DEVICES, 0) if arm.shared_devices else (1, 1))


@pytest.mark.parametrize("name", ARMS)
def test_only_arms_of_this_package_enable_the_pipeline(name: str) -> None:
    assert (
        ("async_pipeline" in ARMS[name].overrides) is ARMS[name].uses_pipeline is not name.startswith("verl_")
    )


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(alphabet="ab:/,{}[]'\" =\\.$"),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["median", "cap"]), inner)
    ),
    max_leaves=6,
)


def unquoted(value: Any) -> Any:
    """Return a parsed value without hydra's wrappers of quoted strings."""
    if isinstance(value, list):
        return [unquoted(item) for item in value]
    if isinstance(value, dict):
        return {key: unquoted(item) for key, item in value.items()}
    return getattr(value, "text", value)


@pytest.mark.slow
@given(VALUES)
def test_hydra_parses_every_value_back(value: Any) -> None:
    (override,) = OverridesParser.create().parse_overrides(hydra_overrides({"a.b": value}))
    assert override.key_or_group == "a.b"
    assert unquoted(override._value) == value


def test_a_separate_reference_has_an_additional_device() -> None:
    pools = ARMS["one_step_off_ref_apart"].overrides["trainer.v1.async_pipeline.pools"]
    assert sum(pool["devices"] for pool in pools.values()) == DEVICES + 1
    assert ARMS["one_step_off_ref_apart"].overrides["trainer.n_gpus_per_node"] == DEVICES
    assert ARMS["one_step_off_ref_apart"].overrides["ray_kwargs.ray_init.num_gpus"] == DEVICES + 1


def test_stock_arms_use_the_executor_of_our_servers() -> None:
    assert arms.IN_PROCESS_EXECUTOR == IN_PROCESS


def test_vllm_runs_all_arms_and_sglang_the_ones_with_separate_devices() -> None:
    assert arms_of_engine(None, "vllm") == list(DEFAULT_ARMS)
    assert arms_of_engine(["verl_sync"], "vllm") == ["verl_sync"]
    separate = [name for name in DEFAULT_ARMS if not ARMS[name].shared_devices and name != "verl_fully_async"]
    assert arms_of_engine(None, "sglang") == separate
    assert arms_of_engine(["fully_async", "verl_separate_async"], "sglang") == [
        "fully_async",
        "verl_separate_async",
    ]


@pytest.mark.parametrize("name", ["verl_sync", "verl_fully_async"])
def test_an_arm_that_sglang_does_not_run_is_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"--engine sglang does not run the arm {name}, .*; choose from verl_sep"
    ):
        arms_of_engine([name], "sglang")


def test_an_arm_with_sglang_has_no_override_of_vllm() -> None:
    rollout = "actor_rollout_ref.rollout"
    for name in arms_of_engine(None, "sglang"):
        made, before = ARMS[name].with_engine("sglang"), ARMS[name].with_engine("vllm")
        assert made[f"{rollout}.name"] == "sglang"
        assert not any("vllm" in key for key in made)
        key = f"{rollout}.checkpoint_engine.custom_backend_module"
        assert made.get(key) == (SGLANG_BACKEND if key in before else None)
        others = {
            key: value for key, value in before.items() if "vllm" not in key and "backend_mod" not in key
        }
        assert others.items() <= made.items()


MODULES = {
    str(value).partition(".Pipeline")[0]
    for arm in ARMS.values()
    for value in (arm.entry, *arm.overrides.values())
    if str(value).startswith("recipe.")
}


@pytest.mark.parametrize("module", sorted({SGLANG_BACKEND, *MODULES}))
def test_the_modules_that_jobs_start_exist(module: str) -> None:
    assert (REPOSITORY / module.replace(".", "/")).with_suffix(".py").is_file()
