# SPDX-License-Identifier: Apache-2.0
"""Each unsupported option of verl is an error."""

from __future__ import annotations

import importlib
import inspect
import re
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from recipe.async_pipeline.config.checks import verl_values
from recipe.async_pipeline.config.checks.rollout_correction import RS_OPTIONS
from recipe.async_pipeline.config.checks.verl_options import RULES
from recipe.async_pipeline.config.paths import nested
from recipe.async_pipeline.errors import ConfigError
from tests.conftest import Load
from tests.refusals import Refused, cases_of
from tests.verl_bridge.conftest import Smoke

pytestmark = pytest.mark.real_engine


def test_the_smoke_config_is_supported(module: ModuleType, smoke: Smoke) -> None:
    module.check_verl_config(smoke())


def test_every_row_is_used(module: ModuleType, smoke: Smoke) -> None:
    """`tests/config/checks/test_verl_options.py` has a case for each row; here, every third one."""
    for row in RULES[::3]:
        with pytest.raises(ConfigError) as refused:
            module.check_verl_config(smoke({row.path: "nonsense"}))
        expected = re.compile(f"^{re.escape(row.path)} must .*, got 'nonsense'; ")
        # A setting that another one interpolates is refused once for each.
        assert any(expected.match(problem) for problem in refused.value.problems), refused.value


@cases_of("sections")
def test_a_value_in_place_of_a_section_is_refused(module: ModuleType, smoke: Smoke, case: Refused) -> None:
    case.replay(lambda changes: module.check_sections(smoke(changes)))


@cases_of("adapters")
def test_adapters_that_would_not_be_trained_are_refused(
    module: ModuleType, smoke: Smoke, case: Refused
) -> None:
    case.replay(lambda changes: module.check_adapters(smoke(changes)))


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
    with_reference = {"actor_rollout_ref.actor.use_kl_loss": True}
    module.check_adapters(smoke({RANK: 8, load_format: "auto", **with_reference}))
    merged = {RANK: 8, f"{MODEL}.lora.merge": True}
    module.check_adapters(smoke({**merged, **with_reference}))

    fsdp1 = {"actor_rollout_ref.actor.strategy": "fsdp"}
    module.check_adapters(smoke({**merged, **fsdp1}))
    module.check_adapters(smoke({f"{MODEL}.lora.rank": 8, RANK: 8, load_format: "auto"}))


def test_a_text_in_place_of_a_number_or_a_switch_is_refused(module: ModuleType) -> None:
    wrong = {
        "actor_rollout_ref.actor.grad_clip": "abc",
        "actor_rollout_ref.actor.fsdp_config.param_offload": "yes!",
        "trainer.test_freq": "often",
    }
    with pytest.raises(ConfigError) as refused:
        module.check_types(nested({**wrong, "algorithm.rollout_correction.rollout_is_threshold": "0.5_5.0"}))
    assert [problem.partition(",")[0] for problem in refused.value.problems] == [
        "actor_rollout_ref.actor.fsdp_config.param_offload must be True or False",
        "actor_rollout_ref.actor.grad_clip must be a number",
        "trainer.test_freq must be a number",
    ]


def test_names_of_values_are_verls(load: Load) -> None:
    """verl has them in branches, so that they are listed."""
    torch, algorithms = load("torch"), load("verl.trainer.ppo.core_algos")
    dtypes = load("verl.utils.torch_dtypes")
    optimizers = load("verl.workers.config.optimizer")
    zero = torch.zeros(1, 1)
    helper = load("verl.trainer.ppo.rollout_corr_helper")
    assert set(RS_OPTIONS) == helper.SUPPORTED_ROLLOUT_RS_OPTIONS
    for name in verl_values.KL:
        algorithms.kl_penalty(zero, zero, name)
    for dtype in verl_values.DTYPES:
        dtypes.PrecisionType.to_dtype(dtype)
    for name in verl_values.KL_CONTROLLERS:
        algorithms.get_kl_controller(
            OmegaConf.create({"type": name, "kl_coef": 1, "horizon": 1, "target_kl": 1})
        )
    known = {str(name) for part in ("HALF", "FLOAT", "BFLOAT") for name in getattr(dtypes, f"{part}_LIST")}
    assert {name for name in known if "." not in name} == {*map(str, verl_values.DTYPES)}
    for name in verl_values.SCHEDULERS:
        optimizers.FSDPOptimizerConfig(lr=1e-6, lr_scheduler_type=name)
    for name in ("linear", "inverse-square-root", "unheard"):
        with pytest.raises(AssertionError):
            optimizers.FSDPOptimizerConfig(lr=1e-6, lr_scheduler_type=name)
    source = inspect.getsource(algorithms.kl_penalty_forward)
    branches = " ".join(re.findall(r"kl_penalty (?:==|in) (.*):", source))
    names = set(re.findall(r'"(\w+)"', branches))
    assert names - {"full"} == {name.rstrip("+") for name in verl_values.KL}, "verl's `full` raises"


def test_names_of_values_are_megatrons() -> None:
    package = find_spec("megatron")
    assert package is not None and package.submodule_search_locations
    (folder,) = package.submodule_search_locations
    # Read, not imported: without a job of Megatron, nothing of this package imports it.
    source = Path(folder, "core", "optimizer_param_scheduler.py").read_text(encoding="utf-8")
    for path, names in (
        ("lr_decay_style", verl_values.OF_MEGATRON["lr_decay_style"]),
        ("wd_incr_style", verl_values.OF_MEGATRON["weight_decay_incr_style"]),
        ("lr_wsd_decay_style", verl_values.WSD_STYLES),
    ):
        assert set(re.findall(rf"self\.{path} == ['\"]([\w-]+)['\"]", source)) == set(names)


@pytest.mark.parametrize("method", ["token", "sequence", "batch", 1, None])
def test_a_correction_that_is_not_tried_is_one_that_verl_accepts(module: ModuleType, method: Any) -> None:
    numbers = (1e-9, 0.5, 1, 2.0, 1e30, 0, -1, float("inf"), float("nan"), True, None, "2.0", "0.5_5.0")
    untried = [number for number in numbers if module.is_plain_weight("rollout_is", method, number)]
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    token = torch.zeros(1, 1)
    for number in untried:
        weights, _ = helper.compute_rollout_correction_weights(token, token + 1, method, number)
        assert bool(weights.isfinite().all())
    assert bool(untried) == (method in ("token", "sequence"))
    assert not module.is_plain_weight("rollout_rs", "token", 2.0)
