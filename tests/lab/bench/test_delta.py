# SPDX-License-Identifier: Apache-2.0
"""The measurement of differences between versions, on models that take no time to train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipe.async_pipeline.cli.main import main
from recipe.async_pipeline.lab.bench import delta


class Tiny(torch.nn.Module):
    """Learns nothing, but its weights change."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(
            torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 0.02
        )

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        self.loss = (self.weights * input_ids.float().mean()).pow(2).sum()
        return self


def tiny(*args: Any) -> Any:
    return Tiny(), iter(lambda: (torch.ones(2), torch.ones(2)), None)


def test_both_models_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(delta, "smoke_model", tiny)
    monkeypatch.setattr(delta, "untrained_model", tiny)
    out = tmp_path / "d.json"
    assert main(["bench", "delta", "--updates", "3", "--lr", "1e-6", "--json", str(out)]) == 0

    models = json.loads(out.read_text())["models"]
    assert list(models["smoke run"]["updates"]) == ["float32", "bfloat16"]
    (updates,) = models["untrained"]["updates"].values()
    assert len(updates) == 3
    for update in updates:
        assert 0 < update["changed"] < 0.1 and update["ratio"] > 4
        assert update["encode_gb_s"] > 0 and update["apply_gb_s"] > 0
    assert "| untrained | 0.0 M | 1e-06 | bfloat16 |" in capsys.readouterr().out


def test_weights_without_anything_in_common_are_sent_whole() -> None:
    chance = np.random.default_rng(0)
    old, new = (chance.integers(0, 256, 4096, dtype=np.uint8) for _ in range(2))
    update = delta.compared(old, new, 2)
    assert (update.ratio, update.apply_gb_s) == (1.0, None)
    row = {"params": 1, "lr": 1.0, "updates": {"float32": [update._asdict()]}}
    assert delta.table({"models": {"x": row}}).endswith("| sent whole |")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--params", "many"), "--params must be a number from 5M to 10B such as 40M, got 'many'"),
        (("--params", "1K"), "--params must be a number from 5M"),
        (("--updates", "0"), "--updates must be >= 1 and --lr > 0"),
        (("--lr", "0"), "--updates must be >= 1 and --lr > 0"),
    ],
)
def test_invalid_options_are_errors_of_one_line(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "delta", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_untrained_model_has_the_requested_size() -> None:
    model, batches = delta.untrained_model(8_000_000)
    found = delta.measure(model, batches, 1e-6, 1, [torch.bfloat16])
    assert found["bfloat16"][0]["ratio"] > 10
    assert 6e6 < sum(parameter.numel() for parameter in model.parameters()) < 10e6
