# SPDX-License-Identifier: Apache-2.0
"""Each unsupported option of verl is an error."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest

from recipe.async_pipeline.config.verl_options import RULES
from recipe.async_pipeline.errors import ConfigError
from tests.verl_bridge.conftest import Smoke

pytestmark = pytest.mark.real_engine


def test_the_smoke_config_is_supported(module: ModuleType, smoke: Smoke) -> None:
    module.check_verl_config(smoke())


def test_every_row_is_used(module: ModuleType, smoke: Smoke) -> None:
    """`tests/config/test_verl_options.py` has a case for each row; here, every third one."""
    for row in RULES[::3]:
        with pytest.raises(ConfigError) as refused:
            module.check_verl_config(smoke({row.path: "nonsense"}))
        expected = re.compile(f"^{re.escape(row.path)} must .*, got 'nonsense'; ")
        # A setting that another one interpolates is refused once for each.
        assert any(expected.match(problem) for problem in refused.value.problems), refused.value


SECTIONS = [
    ("actor_rollout_ref.actor.policy_loss", 1),
    ("transfer_queue", "a/b"),
    ("trainer.v1", 3),
    ("critic", None),
    ("actor_rollout_ref.model", None),
]


@pytest.mark.parametrize(("path", "value"), SECTIONS)
def test_a_value_in_place_of_a_section_is_refused(
    module: ModuleType, smoke: Smoke, path: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=f"^{path} must be a section, got "):
        module.check_sections(smoke({path: value}))


def test_verls_sections_are_accepted_also_switched_off_or_absent(module: ModuleType, smoke: Smoke) -> None:
    module.check_sections(smoke())
    module.check_sections(
        smoke({"algorithm.rollout_correction": None, "actor_rollout_ref.model.override_config": {"a": 1}})
    )
    without = smoke()
    del without.actor_rollout_ref.actor.fsdp_config
    module.check_sections(without)


MODEL = "actor_rollout_ref.model"
RANK = f"{MODEL}.lora_rank"


def test_adapters_must_be_merged_or_have_a_loaded_base(module: ModuleType, smoke: Smoke) -> None:
    load_format = "actor_rollout_ref.rollout.load_format"
    with pytest.raises(
        ConfigError, match=r"rollout\.load_format must not be dummy for LoRA adapters.*lora\.merge=True"
    ):
        module.check_adapters(smoke({RANK: 8, load_format: "dummy"}))
    with_reference = {"actor_rollout_ref.actor.use_kl_loss": True}
    module.check_adapters(smoke({RANK: 8, load_format: "auto", **with_reference}))
    merged = {RANK: 8, f"{MODEL}.lora.merge": True}
    module.check_adapters(smoke({**merged, **with_reference}))

    fsdp1 = {"actor_rollout_ref.actor.strategy": "fsdp"}
    with pytest.raises(ConfigError, match="strategy must be fsdp2 or megatron for LoRA adapters"):
        module.check_adapters(smoke({RANK: 8, load_format: "auto", **fsdp1}))
    module.check_adapters(smoke({**merged, **fsdp1}))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({f"{MODEL}.lora.rank": 8}, "lora.rank must be 0 or .*lora_rank=0 with .*, got 8; set .*lora_rank"),
        ({f"{MODEL}.lora.rank": 8, RANK: 4}, "lora.rank must be 0 or .*lora_rank=4 with fsdp .*, got 8"),
        (
            {f"{MODEL}.lora_adapter_path": "adapter"},
            "lora_rank must be >= 1 with .*_path, .*, got 0; set it",
        ),
    ],
)
def test_an_adapter_that_would_not_be_trained_is_refused(
    module: ModuleType, smoke: Smoke, changes: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        module.check_adapters(smoke(changes))
    module.check_adapters(
        smoke({f"{MODEL}.lora.rank": 8, RANK: 8, "actor_rollout_ref.rollout.load_format": "auto"})
    )
