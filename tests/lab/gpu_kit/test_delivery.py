# SPDX-License-Identifier: Apache-2.0
"""Weights of FSDP2 ranks reach a served model bit by bit, and are proved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipe.async_pipeline.lab.gpu_kit import delivery

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_version_arrives_and_a_bad_load_is_refused(ranks: int, tmp_path: Path) -> None:
    written = tmp_path / "delivery.json"
    assert delivery.main(["--device", "cpu", "--ranks", str(ranks), "--json", str(written)]) == 0
    found = json.loads(written.read_text(encoding="utf-8"))
    assert (found["ranks"], found["tensors_different"]) == (ranks, 0)
    assert found["tensors_proved"] == delivery.VERSIONS * delivery.PROOF_TENSORS
    assert f"layers.{delivery.LAYERS - 1}.k.weight" in found["refused"]
    assert {"gather_s", "stage_s", "commit_s", "prove_s"} <= found.keys()
