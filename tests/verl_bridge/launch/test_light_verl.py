# SPDX-License-Identifier: Apache-2.0
"""What is read of verl without importing the whole of it is what verl has."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.async_pipeline.config.paths import walk
from recipe.async_pipeline.errors import PatchedVerlRequired
from recipe.async_pipeline.verl_bridge.rules.verl_keys import verl_trees
from tests import REPOSITORY
from tests.conftest import Load
from tests.verl_bridge.conftest import Smoke

pytestmark = pytest.mark.real_engine

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
WRONG: tuple[dict[str, Any], ...] = (
    {},
    {f"{ACTOR}.loss_agg_mode": "no-mean"},
    {f"{ACTOR}.ppo_micro_batch_size": 2},
    {f"{ACTOR}.optim.lr_scheduler_type": "unheard"},
    {f"{ROLLOUT}.temperature": 0, f"{ROLLOUT}.val_kwargs.do_sample": True},
    {f"{ACTOR}.unheard": 1},
)
LIGHT = """
import json, sys
from omegaconf import OmegaConf
from recipe.async_pipeline.verl_bridge.launch import light_verl

targets, configs = json.load(sys.stdin)
found = {
    "fields": {target: light_verl.fields_of(target) for target in targets},
    "estimators": sorted(light_verl.registered_estimators()),
    "losses": sorted(light_verl.registered_losses()),
    "refusals": [light_verl.refusal(OmegaConf.create(one), reference=False) for one in configs],
    "imported": sorted(sys.modules.keys() & {"verl", "torch", "ray", "transformers"}),
}
print(json.dumps(found))
"""


def in_a_new_process(code: str, given: object = None) -> Any:
    """Run code without verl, and return the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(given),
        check=True,
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    )
    return json.loads(done.stdout.splitlines()[-1])


def plain(config: DictConfig) -> Any:
    """Return the part of a config that verl's `validate_config` reads."""
    names = ("actor_rollout_ref", "algorithm", "data", "trainer")
    return {name: OmegaConf.to_container(config[name], resolve=True) for name in names}


@pytest.fixture(scope="module")
def targets() -> list[str]:
    found = {str(value) for tree in verl_trees().values() for path, value in walk(tree) if "_target_" in path}
    assert len(found) > 40
    return sorted(found)


def test_what_is_light_is_what_verl_has(
    module: ModuleType, load: Load, smoke: Smoke, targets: list[str]
) -> None:
    configs = [plain(smoke(changes)) for changes in WRONG]
    found = in_a_new_process(LIGHT, [targets, configs])
    assert found.pop("imported") == []

    load("verl")
    algorithms = load("verl.trainer.ppo.core_algos")
    for target in targets:
        place, _, name = target.rpartition(".")
        fields = [field.name for field in dataclasses.fields(getattr(import_module(place), name))]
        assert found["fields"][target] == fields, target
    for kind, registry in (
        ("estimators", algorithms.ADV_ESTIMATOR_REGISTRY),
        ("losses", algorithms.POLICY_LOSS_REGISTRY),
    ):
        # This package and other tests register more.
        verls = {name for name, function in registry.items() if function.__module__ == algorithms.__name__}
        assert set(found[kind]) == verls
    whole = [module.refusal(OmegaConf.create(one), reference=False) for one in configs]
    assert found["refusals"] == whole
    assert not whole[0] and all(whole[1:])


def test_what_is_postponed_stays_in_no_module_and_leads_to_the_whole() -> None:
    code = """
import json, sys
from recipe.async_pipeline.verl_bridge.launch import light_verl

def tokens():
    from verl.utils import hf_tokenizer
    from transformers import AutoConfig
    tries.append("verl.protocol" in sys.modules)
    return AutoConfig.for_model("gpt2").model_type

tries = []
with light_verl.light() as used:
    try:
        tokens()
    except ImportError as error:
        message = str(error)
    names = list(used)
left = sorted(sys.modules.keys() & {"verl", "transformers"})
print(json.dumps([message, names, left, light_verl.compute(tokens), tries]))
"""
    name = "transformers.AutoConfig.for_model"
    assert in_a_new_process(code) == [f"{name} is postponed", [name], [], "gpt2", [False, False, True]]


@pytest.mark.parametrize(
    ("variable", "points", "suffices"),
    [
        (None, ["recipe.async_pipeline.verl_bridge.plugin"], True),
        (None, [], False),
        (None, ["recipe.async_pipeline.verl_bridge.plugin", "other.plugin"], False),
        ("VERL_USE_EXTERNAL_MODULES", ["recipe.async_pipeline.verl_bridge.plugin"], False),
        ("VERL_USE_EXTERNAL_PLUGINS", ["recipe.async_pipeline.verl_bridge.plugin"], False),
    ],
)
def test_verl_is_imported_as_a_whole_where_others_extend_it(
    module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
    points: list[str],
    suffices: bool,
) -> None:
    monkeypatch.setattr(module, "plugins_of", lambda group: frozenset(points))
    if variable is not None:
        monkeypatch.setenv(variable, "json")
    assert module.suffices() is suffices


def test_verl_without_the_plugin_is_refused(
    module: ModuleType, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    load("verl")
    module.require_plugin()
    monkeypatch.setattr(load("recipe.async_pipeline.verl_bridge.process.after_import"), "_loaded", False)
    with pytest.raises(PatchedVerlRequired, match="did not load our plugin"):
        module.require_plugin()


DEFAULT: dict[str, Any] = {
    "custom_reward_function": {"path": None},
    "reward_model": {"enable": False},
    "reward_manager": {"name": "naive", "module": {"path": None}},
}


@pytest.mark.parametrize(
    ("data_source", "known"),
    [("openai/gsm8k", True), ("math_dapo", True), ("async_pipeline/frozen_lake", False), (None, False)],
)
def test_verls_function_knows_few_data_sources(
    module: ModuleType, data_source: str | None, known: bool
) -> None:
    assert module.can_score(OmegaConf.create({"reward": DEFAULT}), data_source) is known


@pytest.mark.parametrize(
    "own",
    [
        {"custom_reward_function": {"path": "score.py"}},
        {"reward_model": {"enable": True}},
        {"reward_manager": {"module": {"path": "manager.py"}}},
    ],
)
def test_a_function_or_model_of_the_run_scores_anything(module: ModuleType, own: dict[str, Any]) -> None:
    assert module.can_score(OmegaConf.create({"reward": {**DEFAULT, **own}}), "of_no_benchmark")
