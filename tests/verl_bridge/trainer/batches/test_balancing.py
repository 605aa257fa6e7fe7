# SPDX-License-Identifier: Apache-2.0
"""A batch is balanced exactly as by verl."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.conftest import Load

pytestmark = pytest.mark.real_engine


@pytest.fixture
def module(load: Load) -> ModuleType:
    return load("recipe.async_pipeline.verl_bridge.trainer.batches.data_rows")


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("equal_size", [True, False])
@pytest.mark.parametrize("longest", [3, 40_000])
def test_the_partitions_are_verls(module: ModuleType, ranks: int, equal_size: bool, longest: int) -> None:
    torch = module.torch
    lengths = torch.randint(1, longest, (48,), generator=torch.Generator().manual_seed(ranks))
    workload = module.seqlen_balancing.calculate_workload(lengths)
    stock = module.seqlen_balancing.get_seqlen_balanced_partitions
    expected = stock(workload, k_partitions=ranks, equal_size=equal_size)
    for given in (workload, workload.tolist()):
        assert module.balanced_partitions(given, k_partitions=ranks, equal_size=equal_size) == expected


def test_an_impossible_partition_is_refused_as_by_verl(module: ModuleType) -> None:
    with pytest.raises(AssertionError, match="number of items"):
        module.balanced_partitions([1], k_partitions=2, equal_size=True)
    with pytest.raises(AssertionError, match="number of items"):
        module.balanced_partitions([], k_partitions=1, equal_size=True)
