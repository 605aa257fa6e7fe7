# SPDX-License-Identifier: Apache-2.0
"""Values round-trip, and values that could run code are not written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipe.async_pipeline.checkpoint.hashed_file import WrittenFiles, entry_of
from recipe.async_pipeline.errors import CheckpointError
from tests.conftest import Load

pytestmark = pytest.mark.real_engine


@pytest.fixture(scope="module")
def tree(load: Load) -> Any:
    return load("recipe.async_pipeline.checkpoint.tensor_tree")


def round_trip(tree: Any, path: Path, value: Any) -> Any:
    files = WrittenFiles(path)
    tree.write(files, path / "x", value)
    assert files.entries == {name: entry_of(path, path / name) for name in files.entries}
    assert {p.name for p in path.iterdir()} == {"x.safetensors", "x.msgpack"}
    return tree.read(path / "x")


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"a": [1, 2.5, "ü", True, None, b"\x00\xff"], "b": {"c": ()}},
        {"t": (1, [2, (3,)]), 4: "by number", ("a", 1): "by pair", "~tensor": "a name that we use"},
        {},
        [],
    ],
)
def test_plain_values_round_trip(tree: Any, tmp_path: Path, value: Any) -> None:
    assert round_trip(tree, tmp_path, value) == value


def test_nan_round_trips(tree: Any, tmp_path: Path) -> None:
    assert math.isnan(round_trip(tree, tmp_path, float("nan")))


def test_tensors_keep_shape_and_type(tree: Any, tmp_path: Path) -> None:
    import torch

    base = torch.arange(12).reshape(3, 4)
    value = {
        "rows": list(base.unbind(0)),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "none": torch.zeros(0, 3),
        "one": torch.tensor(True),
        "turned": base.t(),
    }
    found = round_trip(tree, tmp_path, value)
    for name in ("half", "none", "one", "turned"):
        assert found[name].dtype == value[name].dtype and torch.equal(found[name], value[name])
    assert all(torch.equal(a, b) for a, b in zip(found["rows"], value["rows"], strict=True))


def test_every_type_of_tensor_round_trips(tree: Any, tmp_path: Path) -> None:
    import torch

    made = {str(kind): torch.ones(3, dtype=torch.float32).to(kind) for kind in tree._DTYPES}
    found = round_trip(tree, tmp_path, made)
    for name, tensor in made.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()


def test_arrays_round_trip(tree: Any, tmp_path: Path) -> None:
    import numpy as np

    value = {
        "n": np.arange(6.0).reshape(2, 3)[:, ::-1],
        "s": np.array(["a", "bc"]),
        "o": np.array([[1], {"k": (2,)}, None], dtype=object),
        "i": np.int64(7),
    }
    found = round_trip(tree, tmp_path, value)
    np.testing.assert_array_equal(found["n"], value["n"])
    assert found["s"].tolist() == ["a", "bc"] and found["o"].dtype == object
    assert found["o"].tolist() == [[1], {"k": (2,)}, None]
    assert found["i"] == 7 and type(found["i"]) is int


def test_images_round_trip(tree: Any, tmp_path: Path) -> None:
    images = pytest.importorskip("PIL.Image")
    picture = images.new("RGB", (3, 2), (10, 20, 30))
    (found,) = round_trip(tree, tmp_path, [picture])
    assert (found.mode, found.size, found.tobytes()) == ("RGB", (3, 2), picture.tobytes())


def test_values_that_could_only_be_pickled_are_refused(tree: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a pathlib.PosixPath cannot be written without pickle"):
        tree.write(WrittenFiles(tmp_path), tmp_path / "x", {"a": [tmp_path]})
    assert list(tmp_path.iterdir()) == []


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    name=st.sampled_from(["x.msgpack", "x.safetensors"]),
    data=st.binary(max_size=40),
    at=st.integers(0, 200),
    whole=st.booleans(),
)
def test_any_damaged_file_raises_only_checkpoint_error(
    tree: Any, tmp_path: Path, name: str, data: bytes, at: int, whole: bool
) -> None:
    import numpy as np

    tree.write(
        WrittenFiles(tmp_path),
        tmp_path / "x",
        {"a": [np.arange(3), (1, {2: "b"}), np.array(["c"], dtype=object)]},
    )
    file = tmp_path / name
    written = file.read_bytes()
    file.write_bytes(data if whole else written[:at] + data + written[at + len(data) :])
    try:
        tree.read(tmp_path / "x")
    except CheckpointError as error:
        assert "cannot be read" in str(error)
