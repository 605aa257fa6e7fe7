# SPDX-License-Identifier: Apache-2.0
"""The measurement of the arena, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from recipe.async_pipeline.cli.main import main
from recipe.async_pipeline.lab.bench import arena


@pytest.mark.slow
def test_every_size_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(arena, "TENSOR_BYTES", 1 << 18)
    monkeypatch.setattr(arena, "LIMIT_BYTES", 1 << 18)
    monkeypatch.setattr(arena, "BUCKET_BYTES", 1 << 20)
    out = tmp_path / "a.json"
    assert (
        main(
            [
                "bench",
                "arena",
                "--device",
                "cpu",
                "--sizes",
                "0.001,0.002",
                "--versions",
                "3",
                "--json",
                str(out),
            ]
        )
        == 0
    )

    data = json.loads(out.read_text())
    assert set(data["limits"]) == {"to_host_gb_s", "to_device_gb_s", "within_device_gb_s"}
    assert list(data["sizes"]) == ["0.001", "0.002"]
    for row in data["sizes"].values():
        assert 0 < row["gather_gb_s"]["min"] <= row["gather_gb_s"]["median"]
        assert row["stage_gb_s"]["median"] > 0
        assert row["commit_s"]["median"] > 0
    assert "| 0.002 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sizes", "1,x"), "--sizes must be numbers of GiB"),
        (("--sizes", "0"), "--sizes must be 0.001 to 1024 GiB and --versions >= 1"),
        (("--sizes", "1,nan"), "--sizes must be 0.001 to 1024 GiB and --versions >= 1"),
        (("--sizes", "inf"), "--sizes must be 0.001 to 1024 GiB and --versions >= 1"),
        (("--sizes", "1e-9"), "--sizes must be 0.001 to 1024 GiB and --versions >= 1"),
        (("--versions", "0"), "--sizes must be 0.001 to 1024 GiB and --versions >= 1"),
        ((), "--device cuda needs a CUDA device"),
    ],
)
def test_invalid_options_are_errors_of_one_line(
    options: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "arena", *options]) == 2
    assert message in capsys.readouterr().err
