# SPDX-License-Identifier: Apache-2.0
"""Shapes are read from all files of a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from recipe.async_pipeline.config.derived.adapters import count_parameters, tensor_shapes
from recipe.async_pipeline.errors import ConfigError

pytestmark = pytest.mark.real_engine


def test_the_shapes_of_all_files(tmp_path: Path) -> None:
    save_file(
        {"a": torch.zeros(3, 5), "scalar": torch.zeros(())}, tmp_path / "model-00001-of-00002.safetensors"
    )
    save_file({"b": torch.zeros(4)}, tmp_path / "model-00002-of-00002.safetensors", {"format": "pt"})
    assert tensor_shapes(tmp_path) == {"a": [3, 5], "scalar": [], "b": [4]}
    assert count_parameters(tmp_path) == 20


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", b"\x02\0\0\0\0\0\0\0}{"])
def test_a_damaged_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors must be a safetensors file, but is damaged"):
        tensor_shapes(tmp_path)


def test_a_model_on_another_machine_has_no_size(tmp_path: Path) -> None:
    assert tensor_shapes(tmp_path / "nowhere") == {}
    assert count_parameters(tmp_path / "nowhere") is None


def test_of_a_pipeline_of_diffusers_the_transformer_counts(tmp_path: Path) -> None:
    for part, size in (("transformer", 7), ("vae", 100)):
        (tmp_path / part).mkdir()
        save_file({"a": torch.zeros(size)}, tmp_path / part / "diffusion_pytorch_model.safetensors")
    assert count_parameters(tmp_path) == 7
