# SPDX-License-Identifier: Apache-2.0
"""Chains of names that read keys, and the functions that a run may call."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.tools.verl_keys.reads import KeyRead, units_of, units_of_a_run

from .conftest import MakeSources


@pytest.mark.parametrize(
    ("code", "chain"),
    [
        ("config.trainer.device", ("?", "trainer", "device")),
        ("self.config.trainer['device']", ("?", "trainer", "device")),
        ("config.trainer.get('device', None)", ("?", "trainer", "device")),
        ("OmegaConf.select(config, 'trainer.device')", ("?", "trainer", "device")),
        ("trainer_config.device", ("trainer", "device")),
        ("part = config.trainer\n    part.device", ("?", "trainer", "device")),
        ("(config.trainer or {}).get('device')", ("?", "trainer", "device")),
        ("omega_conf_to_dataclass(x, dataclass_type=PartConfig).device", ("@PartConfig", "device")),
        ("typed.device", ("@PartConfig", "device")),
        ("f'{section}.trainer.device'", ("?", "trainer", "device")),
        ("x = ('device_of', 'b')", ("?", "device_of")),
    ],
)
def test_a_chain_is_read(sources_of: MakeSources, code: str, chain: tuple[str, ...]) -> None:
    text = f"def function(self, config, typed: PartConfig | None):\n    {code}\n"
    (unit,) = (u for u in units_of(sources_of({"verl/a.py": text}), "verl", ()) if u.name)
    assert KeyRead(chain) in unit.reads and unit.place == "verl/a.py:function"


@pytest.mark.parametrize("code", ["f(**config.trainer)", "{**config.trainer}", "config.trainer.items()"])
def test_a_section_is_passed_on_whole(sources_of: MakeSources, code: str) -> None:
    text = f"def function(config):\n    {code}\n"
    (unit,) = (u for u in units_of(sources_of({"verl/a.py": text}), "verl", ()) if u.name)
    assert KeyRead(("?", "trainer"), True) in unit.reads


@pytest.mark.parametrize(
    "code", ["assert config.trainer.device", "if config.trainer.device:\n        raise ValueError"]
)
def test_a_check_is_not_a_read(sources_of: MakeSources, code: str) -> None:
    text = f"def function(config):\n    {code}\n"
    (unit,) = (u for u in units_of(sources_of({"verl/a.py": text}), "verl", ()) if u.name)
    assert not [read for read in unit.reads if read.chain[-1] == "device"]


def test_a_subclass_reads_what_its_base_was_given(sources_of: MakeSources) -> None:
    text = """
class Base:
    def __init__(self, part: PartConfig):
        self.part = part
class Sub(Base):
    def work(self):
        return self.part.device
"""
    units = units_of(sources_of({"verl/a.py": text}), "verl", ())
    (unit,) = (unit for unit in units if unit.name == "work")
    assert KeyRead(("@PartConfig", "device")) in unit.reads


def test_what_is_called_runs_and_what_is_overridden_does_not(sources_of: MakeSources) -> None:
    verl = """
class PPOTrainer:
    def fit(self): return stock_only()
    def kept(self): return helper()
def helper(): ...
def stock_only(): ...
def unused(): ...
@register("x")
def registered(): ...
"""
    own = """
from verl.a import PPOTrainer
class Trainer(PPOTrainer):
    def fit(self): self.kept()
"""
    theirs, ours = units_of_a_run(sources_of({"verl/a.py": verl, "pkg/b.py": own}))
    assert {unit.name for unit in theirs if unit.name} == {"kept", "helper", "registered"}
    assert {unit.name for unit in ours if unit.name} == {"fit"}
