# SPDX-License-Identifier: Apache-2.0
"""A configuration that is read and resolved in less time is the same configuration."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf, _utils
from omegaconf._utils import get_yaml_loader
from omegaconf.grammar_parser import parse
from yaml.cyaml import CParser  # type: ignore[import-untyped]

from recipe.async_pipeline.installed.verl import find_verl_root
from recipe.async_pipeline.verl_bridge import replaced
from recipe.async_pipeline.verl_bridge.launch.run_config import parsed_once, with_libyaml
from tests import REPOSITORY

WRITTEN = """
numbers: [1e-6, 1.5, .5, 0x1F, 1_000, 012, 1:30, .inf, -.INF, .nan]
words: {yes: on, no: off, none: ~, date: 2026-11-28, quoted: "1e3", tilde: '~'}
refers: ${numbers.0}
long: >-
  two
  lines
"""


def read(text: str, loader: Any) -> Any:
    return yaml.load(text, Loader=loader)


def test_each_file_of_verl_and_of_this_package_is_read_the_same() -> None:
    folders = (find_verl_root() / "verl" / "trainer" / "config", REPOSITORY / "configs")
    texts = [WRITTEN, *(file.read_text() for folder in folders for file in sorted(folder.rglob("*.yaml")))]
    assert len(texts) > 40
    quick = with_libyaml(get_yaml_loader)()
    for text in texts:
        assert repr(read(text, quick)) == repr(read(text, get_yaml_loader()))


@pytest.mark.parametrize("text", ["a: 1\na: 2", "a: [1", "a: b: c", "!!python/object/apply:os.system [ls]"])
def test_what_is_no_configuration_is_refused_with_the_place(text: str) -> None:
    with pytest.raises(yaml.MarkedYAMLError, match="line 1|line 2"):
        read(text, with_libyaml(get_yaml_loader)())


def test_an_interpolation_is_parsed_once() -> None:
    parsed = Counter[str]()

    def counted(value: str, *more: Any, **others: Any) -> Any:
        parsed[value] += 1
        return parse(value, *more, **others)

    config = OmegaConf.create({"a": "${oc.select:b,1}", "b": "${oc.decode:'2'}", "c": "${a}-${b}"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("omegaconf.base.parse", parsed_once(counted))
        found = [OmegaConf.to_container(config, resolve=True) for _ in range(3)]
    assert found == [{"a": 2, "b": 2, "c": "2-2"}] * 3
    assert set(parsed.values()) == {1}


def test_a_composed_configuration_is_read_so() -> None:
    with replaced.applied("configuration"):
        assert issubclass(_utils.get_yaml_loader(), CParser)
        assert OmegaConf.create(WRITTEN).refers == 1e-6
