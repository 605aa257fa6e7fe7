# SPDX-License-Identifier: Apache-2.0
"""Which errors of a checkpoint are the disk's. The rest of the module is driven by whole jobs, see
tests/e2e/test_resume.py.
"""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.conftest import Load

pytestmark = pytest.mark.real_engine


@pytest.fixture(scope="module")
def ours(load: Load) -> ModuleType:
    return load("recipe.async_pipeline.verl_bridge.trainer.checkpointing")


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(28, "No space left on device"), True),
        (RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"), True),
        # What torch said on a tmpfs without a free byte.
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 128 vs 0"), True),
        (RuntimeError("basic_ios::clear: iostream error"), True),
        (TimeoutError("a worker did not answer"), False),
        (ConnectionError("a worker is gone"), False),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_a_full_disk_is_told_from_a_wrong_program(ours: ModuleType, error: Exception, full: bool) -> None:
    assert ours.is_full(error) is full
