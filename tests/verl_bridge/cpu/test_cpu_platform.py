# SPDX-License-Identifier: Apache-2.0
"""verl's device abstraction on CPU is complete, and used only if configured."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.conftest import Load

pytestmark = pytest.mark.real_engine


@pytest.fixture
def platform(module: ModuleType) -> Any:
    return module.PlatformCPU()


def test_it_is_registered_once(module: ModuleType, load: Load) -> None:
    registry = load("verl.plugin.platform.platform_manager").PlatformRegistry
    module.register()
    assert registry.get("cpu") is module.PlatformCPU


def test_the_environment_chooses_it(module: ModuleType, load: Load) -> None:
    manager = load("verl.plugin.platform.platform_manager")
    assert manager._detect_platform_name() == "cpu"


def test_it_is_never_chosen_by_detection(platform: Any) -> None:
    assert platform.is_available()
    assert platform.is_platform_available() is False
    assert platform.is_platform_available(use_smi_check=True) is False


def test_every_abstract_method_of_verl_is_implemented(platform: Any, load: Load) -> None:
    base = load("verl.plugin.platform.platform_base").PlatformBase
    for name in base.__abstractmethods__:
        member = inspect.getattr_static(platform, name)
        if isinstance(member, property):
            getattr(platform, name)
            continue
        needed = [
            {"device_index": 0, "seed": 1, "settings": "", "msg": "m"}[p.name]
            for p in inspect.signature(getattr(platform, name)).parameters.values()
            if p.default is p.empty
        ]
        getattr(platform, name)(*needed)


def test_tensors_are_moved_to_the_host(platform: Any) -> None:
    tensor = torch.ones(3).to(platform.current_device())
    assert tensor.device.type == platform.device_name == "cpu"
    assert platform.communication_backend_name() == "gloo"
    assert platform.ray_resource_name() == "GPU"
    assert not platform.is_ipc_supported()
    with platform.nvtx_range("step"):
        pass


def test_the_device_module_describes_the_host(platform: Any) -> None:
    module = platform.device_module
    free, total = module.mem_get_info()
    assert 0 < free <= total
    assert module.memory_allocated() == module.max_memory_reserved() == 0
    assert module.get_device_name() == "cpu"
    assert module.is_available is torch.cpu.is_available, "other attributes are torch.cpu's"
    module.empty_cache()
    module.synchronize()
    with pytest.raises(AttributeError):
        _ = module.no_such_thing


def test_random_state_is_the_hosts(platform: Any) -> None:
    module = platform.device_module
    before = module.get_rng_state()
    try:
        platform.manual_seed(5)
        first = torch.rand(2)
        module.manual_seed_all(5)
        assert torch.equal(first, torch.rand(2))
    finally:
        module.set_rng_state(before)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("value", "expected"), [("cpu", True), (" CPU", True), ("cuda", False), ("", False)])
def test_is_cpu(module: ModuleType, monkeypatch: pytest.MonkeyPatch, value: str, expected: bool) -> None:
    monkeypatch.setenv("VERL_PLATFORM", value)
    assert module.is_cpu() is expected
