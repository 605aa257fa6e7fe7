# SPDX-License-Identifier: Apache-2.0
"""Profiles are validated strictly, scale by simple formulas, and round-trip."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.tools.plan.profile import PROFILES, Batch, Decode, Stage, Stages, dump, load
from tests.tools.plan.workloads import profile, random_profile

SHIPPED = sorted(path.stem for path in PROFILES.glob("*.yaml"))
SMALLEST = """
origin: assumed
note: for a test
batch: {groups: 4}
answers: {tokens: 10}
decode: {token_s: [0.1]}
stages: {update: {fixed_s: 1.0}}
"""


def read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    load(str(path))


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_profile_loads_and_names_its_origin(name: str) -> None:
    found = load(name)
    assert found.origin in found.note


@pytest.mark.parametrize("name", SHIPPED)
def test_profiles_round_trip(name: str, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(dump(load(name)))
    assert load(str(path)) == load(name)


def test_the_smallest_profile_loads(tmp_path: Path) -> None:
    read(tmp_path, SMALLEST)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("note:", "nota:", r"unknown field `nota`"),
        ("tokens: 10", "tokens: 10, token: 3", r"unknown field `token` - at `\$.answers`"),
        ("groups: 4", "groups: 0", r"batch.groups must be >= 1, got 0"),
        ("groups: 4", "answers: 4", r"batch must have groups or groups_per_device"),
        ("[0.1]", "[0.1, 0.2]", r"decode.token_s must have one value for each concurrency"),
        ("[0.1]", "[0.2, 0.1], concurrency: [1, 2]", r"decode.token_s must be > 0 and not fall"),
        (
            "fixed_s: 1.0",
            "fixed_s: -1.0",
            r"fixed_s of a stage must be >= 0, got -1.0.* at `\$.stages.update`",
        ),
        (
            "stages: {",
            "stages: {critic: {fixed_s: 1}, ",
            r"stages.values and stages.critic require each other",
        ),
        (
            "note: for a test",
            "note: x\nsync: {load_s: 1, stall_s: 2}",
            r"sync.stall_s must be at most commit_s \(by default load_s\), 1, got 2",
        ),
        ("note: for a test", "note: x\nfailures: {group: 1.0}", r"failures.group must be from 0 to below 1"),
        ("origin: assumed", "origin: guessed", r"Invalid enum value 'guessed'"),
    ],
)
def test_an_invalid_profile_is_a_one_line_error(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        read(tmp_path, SMALLEST.replace(old, new))
    assert "\n" not in str(raised.value)
    assert "p.yaml" in str(raised.value)


def test_a_missing_profile_error_lists_the_shipped_profiles() -> None:
    with pytest.raises(ConfigError, match="no profile 'nowhere'; give a .yaml file, or one of .*gpu_cluster"):
        load("nowhere")


def test_a_batch_may_grow_with_the_cluster() -> None:
    assert Batch(groups=7).on(1000) == 7
    assert Batch(groups_per_device=0.5).on(64) == 32
    assert Batch(groups_per_device=0.1).on(2) == 1


def test_an_engine_is_interpolated_and_extrapolated() -> None:
    decode = Decode(concurrency=(2, 4, 8), token_s=(1.0, 2.0, 3.0))
    assert [decode.step_s(c) for c in (1, 2, 3, 4, 6, 8, 12)] == pytest.approx(
        [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0]
    )


def test_a_stage_scales_with_devices_and_tokens() -> None:
    stage = Stage(fixed_s=1.0, device_s=8.0, token_s=0.5, serial_share=0.25)
    assert stage.seconds(16, 1) == pytest.approx(17.0)
    assert stage.seconds(16, 4) == pytest.approx(1 + 16 * (0.25 + 0.75 / 4))
    assert stage.seconds(0, 0) == pytest.approx(9.0), "the host counts as one device"


def test_roles_are_the_stages_with_a_cost() -> None:
    assert profile().roles() == ("train", "logp", "generate")
    of_rollout = Stages(update=Stage(), logp=None)
    assert msgspec.structs.replace(profile(), stages=of_rollout).roles() == ("train", "generate")
    critic = Stages(update=Stage(), ref_logp=Stage(), values=Stage(), critic=Stage())
    assert msgspec.structs.replace(random_profile(1), stages=critic).roles() == (
        "train",
        "logp",
        "ref_logp",
        "critic",
        "generate",
    )
