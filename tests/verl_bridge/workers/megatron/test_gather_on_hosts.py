# SPDX-License-Identifier: Apache-2.0
"""Megatron ranks on two hosts write what they hold into the memory of their host."""

from __future__ import annotations

import asyncio
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.fakes.private_mounts import may_unshare
from tests.fakes.training_hosts import TrainingHost, training_hosts, versions_of
from tests.verl_bridge.workers.megatron.gather_cost import LAYOUTS
from tests.verl_bridge.workers.megatron.layouts import ENVIRONMENT

pytestmark = [
    pytest.mark.real_engine,
    pytest.mark.nightly,
    pytest.mark.skipif(find_spec("megatron") is None, reason="no megatron"),
    pytest.mark.skipif(not may_unshare(), reason="private mounts require root"),
]
VERSIONS = 2


@pytest.mark.parametrize("name", LAYOUTS)
def test_tensor_and_expert_parallel_ranks_on_two_hosts_publish_what_each_holds(
    tmp_path: Path, name: str
) -> None:
    module = "tests.verl_bridge.workers.megatron.gather_on_hosts"
    commands = [
        [sys.executable, "-m", module, str(host), str(tmp_path), name, str(VERSIONS)] for host in range(2)
    ]

    async def main(asked: list[TrainingHost]) -> None:
        version = 0
        async for found in versions_of(asked, VERSIONS):
            expected = torch.load(tmp_path / f"{version}.pt", weights_only=True)
            assert set(found) == set(expected)
            assert all(torch.equal(found[name], value) for name, value in expected.items())
            version += 1
        assert version == VERSIONS

    with training_hosts(commands, tmp_path, ENVIRONMENT) as asked:
        asyncio.run(main(asked))
