# SPDX-License-Identifier: Apache-2.0
"""Values round-trip, and values that could run code are not written."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from functools import partial
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipe.async_pipeline.checkpoint.hashed_file import WrittenFiles, entry_of
from recipe.async_pipeline.errors import CheckpointError
from tests.conftest import Load

pytestmark = pytest.mark.real_engine


def round_trip(module: Any, path: Path, value: Any) -> Any:
    files = WrittenFiles(path)
    module.write(files, path / "x", value)
    assert files.entries == {name: entry_of(path, path / name) for name in files.entries}
    assert {p.name for p in path.iterdir()} == {"x.safetensors", "x.msgpack"}
    return module.read(path / "x")


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
def test_plain_values_round_trip(module: Any, tmp_path: Path, value: Any) -> None:
    assert round_trip(module, tmp_path, value) == value


def test_nan_round_trips(module: Any, tmp_path: Path) -> None:
    assert math.isnan(round_trip(module, tmp_path, float("nan")))


def test_tensors_keep_shape_and_type(module: Any, tmp_path: Path) -> None:
    import torch

    base = torch.arange(12).reshape(3, 4)
    value = {
        "rows": list(base.unbind(0)),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "none": torch.zeros(0, 3),
        "one": torch.tensor(True),
        "turned": base.t(),
    }
    found = round_trip(module, tmp_path, value)
    for name in ("half", "none", "one", "turned"):
        assert found[name].dtype == value[name].dtype and torch.equal(found[name], value[name])
    assert all(torch.equal(a, b) for a, b in zip(found["rows"], value["rows"], strict=True))


def test_every_type_of_tensor_round_trips(module: Any, tmp_path: Path) -> None:
    import torch

    made = {str(kind): torch.ones(3, dtype=torch.float32).to(kind) for kind in module.DTYPES}
    found = round_trip(module, tmp_path, made)
    for name, tensor in made.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()


def test_arrays_round_trip(module: Any, tmp_path: Path) -> None:
    import numpy as np

    value = {
        "n": np.arange(6.0).reshape(2, 3)[:, ::-1],
        "s": np.array(["a", "bc"]),
        "o": np.array([[1], {"k": (2,)}, None], dtype=object),
        "i": np.int64(7),
    }
    found = round_trip(module, tmp_path, value)
    np.testing.assert_array_equal(found["n"], value["n"])
    assert found["s"].tolist() == ["a", "bc"] and found["o"].dtype == object
    assert found["o"].tolist() == [[1], {"k": (2,)}, None]
    assert found["i"] == 7 and type(found["i"]) is int


def test_images_round_trip(module: Any, tmp_path: Path) -> None:
    images = pytest.importorskip("PIL.Image")
    picture = images.new("RGB", (3, 2), (10, 20, 30))
    (found,) = round_trip(module, tmp_path, [picture])
    assert (found.mode, found.size, found.tobytes()) == ("RGB", (3, 2), picture.tobytes())


STANDARD = [
    10**30,
    -(2**63) - 1,
    [1, 10**30, None],
    2**64 - 1,
    1 + 2j,
    Decimal("1.10"),
    Fraction(1, 3),
    datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=timezone(timedelta(hours=2))),
    date(2026, 1, 2),
    time(3, 4),
    timedelta(days=-1, microseconds=5),
    Path("/data/ü"),
    PurePosixPath("a"),
    UUID(int=7),
    {1, "a", (2, 3)},
    frozenset({Decimal(1)}),
    [1.5, Decimal(2), {"a": {date(2026, 1, 2): {4}}}],
]


@pytest.mark.parametrize("value", STANDARD, ids=str)
def test_values_of_the_standard_library_round_trip(module: Any, tmp_path: Path, value: Any) -> None:
    found = round_trip(module, tmp_path, {"a": value})["a"]
    assert found == value and type(found) is type(value)
    assert module.storable(value) == value


def test_times_of_numpy_round_trip(module: Any, tmp_path: Path) -> None:
    import numpy as np

    value = {"one": np.datetime64("2026-01-02T03:04:05.123456789"), "all": np.arange(3).astype("m8[h]")}
    found = round_trip(module, tmp_path, value)
    assert found["one"] == value["one"] and found["one"].dtype == value["one"].dtype
    np.testing.assert_array_equal(found["all"], value["all"])
    assert round_trip(module, tmp_path, np.longdouble(1.5)) == 1.5


class Colour(Enum):
    RED = 1


@dataclass
class Verdict:
    why: str


class Level(IntEnum):
    HIGH = 3


FOREIGN = [Colour.RED, Verdict("x"), object(), type, len, memoryview(b"x"), range(3), "\ud800", "a\udfff"]


@pytest.mark.parametrize("value", FOREIGN, ids=repr)
def test_values_that_could_only_be_pickled_are_refused(module: Any, tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match="cannot be written"):
        module.write(WrittenFiles(tmp_path), tmp_path / "x", {"a": [value]})
    assert list(tmp_path.iterdir()) == []


def test_the_keys_of_a_refused_value_are_named(module: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="k: extra: a builtins.object cannot be written without pickle"):
        module.write(WrittenFiles(tmp_path), tmp_path / "x", {"k": {"extra": [object()]}})


@pytest.mark.parametrize("value", FOREIGN, ids=repr)
def test_any_value_is_made_storable_as_its_text(module: Any, tmp_path: Path, value: Any) -> None:
    import numpy as np

    told: list[str] = []
    array = np.array([value, 1], dtype=object)
    made = module.storable(
        {"k": {"deep": [value, 1], "set": {Level.HIGH}, "o": array}}, lambda keys, kind: told.append(keys)
    )
    text = str(value).encode("utf-8", "backslashreplace").decode()
    found = round_trip(module, tmp_path, made)["k"]
    assert found["deep"] == [text, 1] and found["set"] == {3} and found["o"].tolist() == [text, 1]
    assert told == ([] if isinstance(value, str) else ["k.deep", "k.o"])


def test_tensors_are_not_copied_to_be_made_storable(module: Any) -> None:
    import numpy as np
    import torch

    row = {"t": torch.ones(2), "n": np.ones(2), "times": np.ones(2, dtype="M8[s]")}
    made = module.storable(row)
    assert all(made[name] is row[name] for name in row)
    assert module.storable({"sparse": torch.ones(2).to_sparse()})["sparse"].startswith("tensor(")


def test_the_header_does_not_grow_with_the_tensors(module: Any, tmp_path: Path) -> None:
    import torch

    value = [torch.full((2,), i) for i in range(2000)] + [torch.tensor(0.5)]
    found = round_trip(module, tmp_path, value)
    assert all(torch.equal(a, b) for a, b in zip(found, value, strict=True))
    with (tmp_path / "x.safetensors").open("rb") as file:
        assert int.from_bytes(file.read(8), "little") < 200


def test_small_and_large_tensors_keep_their_order(module: Any, tmp_path: Path) -> None:
    import torch

    sizes = [3, module.SMALL_BYTES // 4, 0, 5, module.SMALL_BYTES, 1, module.SMALL_BYTES // 4 - 1, 7]
    value = [torch.full((size,), number, dtype=torch.int32) for number, size in enumerate(sizes)]
    found = round_trip(module, tmp_path, value)
    assert all(torch.equal(a, b) for a, b in zip(found, value, strict=True))


def test_a_checkpoint_with_a_name_for_each_tensor_is_read(module: Any, tmp_path: Path) -> None:
    import msgspec
    import torch
    from safetensors.torch import save_file

    save_file({"0": torch.ones(2, 2), "1": torch.arange(6)}, tmp_path / "x.safetensors")
    plain = {"t": {"~tensor": "0"}, "n": {"~array": "1", "shape": [2, 3]}}
    (tmp_path / "x.msgpack").write_bytes(msgspec.msgpack.encode(plain))
    found = module.read(tmp_path / "x")
    assert torch.equal(found["t"], torch.ones(2, 2)) and found["n"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_token_costs_less_than_a_call(module: Any, tmp_path: Path) -> None:
    """A call of Python per token would hold the interpreter for minutes: 2.3 us each, measured."""
    import sys

    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    value = {"uid": [{"tokens": list(range(5000)), "logprobs": [-0.5] * 5000}]}
    sys.setprofile(count)
    try:
        module.write(WrittenFiles(tmp_path), tmp_path / "x", value)
    finally:
        sys.setprofile(None)
    assert calls < 1000
    assert module.read(tmp_path / "x") == value


@settings(
    max_examples=80,
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
    module: Any, tmp_path: Path, name: str, data: bytes, at: int, whole: bool
) -> None:
    import numpy as np

    module.write(
        WrittenFiles(tmp_path),
        tmp_path / "x",
        {"a": [np.arange(3), (1, {2: "b"}), np.array(["c"], dtype=object)]},
    )
    file = tmp_path / name
    written = file.read_bytes()
    file.write_bytes(data if whole else written[:at] + data + written[at + len(data) :])
    try:
        module.read(tmp_path / "x")
    except CheckpointError as error:
        assert "cannot be read" in str(error)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Evil:
    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.where),))

    def __init__(self, where: Path) -> None:
        self.where = where


def test_a_file_that_would_run_code_is_refused(module: ModuleType, tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2), "rng": Evil(tmp_path / "it_ran")}, tmp_path / "evil.pt")
    with pytest.raises(
        CheckpointError, match=r"the_folder holds more than tensors and plain values, and was not loaded"
    ):
        with module.weights_only(Path("the_folder")):
            torch.load(tmp_path / "evil.pt", weights_only=False)
    assert not (tmp_path / "it_ran").exists()
    torch.load(tmp_path / "evil.pt", weights_only=False)
    assert (tmp_path / "it_ran").exists(), "outside of weights_only the code runs"
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


def test_everything_that_a_rank_saves_can_be_loaded(
    module: ModuleType, load: Load, one_rank: None, tmp_path: Path
) -> None:
    """Load what verl's FSDP checkpoint manager writes: sharded states, scheduler and random state."""
    manager = load("verl.utils.checkpoint.checkpoint_manager").BaseCheckpointManager
    model = torch.nn.Linear(4, 3)
    torch.distributed.fsdp.fully_shard(
        model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(max, 1))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    saved = {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "extra": {"lr_scheduler": scheduler.state_dict(), "rng": manager.get_rng_state()},
    }
    for name, state in saved.items():
        torch.save(state, tmp_path / f"{name}.pt")
    following = random.random(), float(np.random.random()), torch.rand(1).item()
    with module.weights_only(tmp_path):
        found = {name: torch.load(tmp_path / f"{name}.pt", weights_only=False) for name in saved}
    assert torch.equal(found["model"]["weight"].to_local(), saved["model"]["weight"].to_local())
    assert found["optim"].keys() == saved["optim"].keys()
    manager.load_rng_state(found["extra"]["rng"])
    assert (random.random(), float(np.random.random()), torch.rand(1).item()) == following
    scheduler.load_state_dict(found["extra"]["lr_scheduler"])
