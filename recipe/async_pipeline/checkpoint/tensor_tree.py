# SPDX-License-Identifier: Apache-2.0
"""Nested Python values with tensors, stored as two files that cannot run code when they are read.

`NAME.safetensors` holds the elements of all tensors of a type as one tensor, named by the type; the library
refuses headers above 100 MB, which a tensor for each value reaches at 150,000 rows. `NAME.msgpack` holds the
rest. Only tensors, arrays, images, the types of msgpack and some of the standard library (`_TEXTS`) are
accepted; pickle would accept more, and run arbitrary code when the file is read. `storable` makes any value
acceptable.
"""

from __future__ import annotations

import array
import datetime
import decimal
import fractions
import os
import pathlib
import pickle
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import _TYPES, load_file

from ..errors import CheckpointError
from .hashed_file import FileEntry, HashedFile, WrittenFiles

DTYPES = {kind: name for name, kind in _TYPES.items()}
_TUPLE, _TENSOR, _ARRAY, _OBJECTS, _MAPPING, _PICTURE, _SET, _TEXT, _TIMES = (
    "~tuple",
    "~tensor",
    "~array",
    "~objects",
    "~mapping",
    "~picture",
    "~set",
    "~text",
    "~times",
)
_PLAIN = frozenset((type(None), bool, float, str, bytes))
"""Types that are written as they are. Integers may be too large."""
SMALL_BYTES = 1 << 20
"""Tensors below this size are written together."""
_NUMBERS = _PLAIN - {str} | {int}
"""Types without text, which may have characters that msgpack refuses."""
_SEQUENCES = (tuple, set, frozenset)
_LEAST, _MOST = -(2**63), 2**64 - 1
"""The integers of msgpack."""
_TEXTS: Mapping[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    # Python refuses to convert very long decimals.
    "int": (int, hex, lambda text: int(text, 16)),
    "complex": (complex, str, complex),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "fraction": (fractions.Fraction, str, fractions.Fraction),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "timedelta": (
        datetime.timedelta,
        lambda value: f"{value.days} {value.seconds} {value.microseconds}",
        lambda text: datetime.timedelta(*map(int, text.split())),
    ),
    "path": (type(Path()), str, Path),
    "pure path": (pathlib.PurePosixPath, str, pathlib.PurePosixPath),
    "uuid": (uuid.UUID, str, uuid.UUID),
}
"""Types of the standard library that are written as text, how, and how they are read. Not their subclasses,
which may have texts that cannot be read, such as the one of pandas.NaT.
"""
_TEXT_KINDS = {kind: name for name, (kind, _, _) in _TEXTS.items()}


class Tensors:
    """The tensors of a value, by the safetensors name of their type."""

    def __init__(self) -> None:
        self.by_type: dict[str, list[torch.Tensor]] = {}
        self._elements: dict[str, int] = {}

    def keep(self, tensor: torch.Tensor) -> list[Any]:
        """Add a tensor, which must not change until it is written. Returns its place: type, first element,
        shape.

        Raises CheckpointError if safetensors does not know its type.
        """
        name = DTYPES.get(tensor.dtype)
        if name is None or tensor.layout != torch.strided:
            raise CheckpointError(f"a tensor of {tensor.dtype}, {tensor.layout} cannot be written")
        first = self._elements.get(name, 0)
        self._elements[name] = first + tensor.numel()
        self.by_type.setdefault(name, []).append(tensor.contiguous())
        return [name, first, *tensor.shape]


def write(files: WrittenFiles, path: Path, value: Any) -> None:
    """Write `value` to the two files of `path`, which has no suffix.

    Raises CheckpointError if a value could only be pickled, and names its keys; nothing is written then.
    """
    tensors = Tensors()
    plain = _flatten(value, tensors)
    try:
        encoded = msgspec.msgpack.encode(plain)
    except (UnicodeEncodeError, OverflowError) as error:
        raise CheckpointError(f"{path.name} cannot be written: {error}") from None
    with files.create(path.with_suffix(".safetensors")) as file:
        _write_tensors(file, tensors.by_type)
    with files.create(path.with_suffix(".msgpack")) as file:
        file.write(encoded)


def write_shard(root: str, name: str, value: Any) -> list[FileEntry]:
    """Write `value` to a shard of a checkpoint, in the process that has it. Returns its files.

    Raises as `write`, and CheckpointError if the folder of the checkpoint is not on this host.
    """
    folder = Path(root)
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder.parent} is another folder on {socket.gethostname()}; with several hosts, set "
            "trainer.default_local_dir to a file system that all of them share"
        )
    files = WrittenFiles(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    write(files, folder / name, value)
    return list(files.entries.values())


def _write_tensors(file: HashedFile, tensors: Mapping[str, Sequence[torch.Tensor]]) -> None:
    """Write the format of safetensors: the length of a header, the header, and the bytes of all tensors.

    The library hashes nothing, and would need a copy of all tensors to return bytes. As it does, larger
    elements come first, so that each tensor is aligned.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1][0].element_size())
    header: dict[str, Any] = {}
    end = 0
    for name, parts in ordered:
        elements = sum(part.numel() for part in parts)
        begin, end = end, end + elements * parts[0].element_size()
        header[name] = {"dtype": name, "shape": [elements], "data_offsets": [begin, end]}

    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little"))
    file.write(encoded)
    # A row has many small tensors, and each write is a call of the system.
    waiting = bytearray()
    for _, parts in ordered:
        for part in parts:
            data = part.reshape(-1).view(torch.uint8).numpy().data if part.numel() else b""
            if len(data) < SMALL_BYTES:
                waiting += data
            if len(waiting) >= SMALL_BYTES or len(data) >= SMALL_BYTES:
                file.write(waiting)
                waiting.clear()
            if len(data) >= SMALL_BYTES:
                file.write(data)
    file.write(waiting)


def read(path: Path) -> Any:
    """Read a value that `write` wrote. Raises CheckpointError if the files are missing or malformed."""
    try:
        tensors = load_file(path.with_suffix(".safetensors"))
        return _unflatten(msgspec.msgpack.decode(path.with_suffix(".msgpack").read_bytes()), tensors)
    except (
        OSError,
        SafetensorError,
        msgspec.MsgspecError,
        LookupError,
        ValueError,
        TypeError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__} {error}") from error


def storable(value: Any, changed: Callable[[str, type], object] = lambda keys, kind: None) -> Any:
    """Return `value` with each object that `write` refuses replaced by its text.

    `changed(keys, kind)` is called for each of them; `keys` lead to it, joined by dots.
    """
    return _storable(value, "", changed)


def _storable(value: Any, keys: str, changed: Callable[[str, type], object]) -> Any:
    kind = type(value)
    if kind is str:
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if kind in _PLAIN or kind in _TEXT_KINDS or isinstance(value, Image.Image):
        return value
    if isinstance(value, dict):
        return {
            _storable(key, keys, changed): _storable(one, f"{keys}.{key}" if keys else str(key), changed)
            for key, one in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        if kind in (list, *_SEQUENCES) and not set(map(type, value)) - _NUMBERS:
            return value
        items = [_storable(one, keys, changed) for one in value]
        return items if isinstance(value, list) else kind(items) if kind in _SEQUENCES else tuple(items)
    if _is_kept(value):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind == "O":
        made = np.empty(value.shape, dtype=object)
        for place in np.ndindex(value.shape):
            made[place] = _storable(value[place], keys, changed)
        return made
    try:
        _flatten(value, Tensors())
    except CheckpointError:
        changed(keys, kind)
        return _storable(str(value), keys, changed)
    return value


def _is_kept(value: Any) -> bool:
    """Return whether `_flatten` takes this tensor or array, without the copy that it makes."""
    if isinstance(value, torch.Tensor):
        return value.dtype in DTYPES and value.layout == torch.strided
    return isinstance(value, np.ndarray) and value.dtype.kind in "biufmM" and value.dtype.itemsize <= 8


def _flatten(value: Any, tensors: Tensors) -> Any:
    """Return `value` with plain types only; its tensors are added to `tensors`."""
    kind = type(value)
    if kind in _PLAIN or (kind is int and _LEAST <= value <= _MOST):
        return value
    if kind in _TEXT_KINDS:
        name = _TEXT_KINDS[kind]
        return {_TEXT: [name, _TEXTS[name][1](value)]}
    for known, flatten in _KINDS.items():
        if isinstance(value, known):
            return flatten(value, tensors)
    raise CheckpointError(f"a {kind.__module__}.{kind.__qualname__} cannot be written without pickle")


def _flatten_list(values: Any, tensors: Tensors) -> list[Any]:
    # Transcripts hold millions of tokens: a check of each of them would hold the interpreter for minutes.
    kinds = set(map(type, values))
    if not kinds - _PLAIN or (kinds == {int} and _LEAST <= min(values) and max(values) <= _MOST):
        return list(values)
    return [_flatten(one, tensors) for one in values]


def _flatten_array(value: np.ndarray[Any, Any], tensors: Tensors) -> Any:
    kind = value.dtype.kind
    if kind in "OUS":
        return {_OBJECTS: _flatten_list(value.reshape(-1).tolist(), tensors), "shape": list(value.shape)}
    whole = np.ascontiguousarray(value)
    if kind in "mM":
        numbers = torch.from_numpy(whole.reshape(-1).view(np.int64))
        return {_TIMES: tensors.keep(numbers), "shape": list(value.shape), "dtype": value.dtype.str}
    try:
        elements = torch.from_numpy(whole)
    except TypeError as error:
        raise CheckpointError(f"an array of {value.dtype} cannot be written: {error}") from None
    return {_ARRAY: tensors.keep(elements), "shape": list(value.shape)}


def _flatten_number(value: np.generic, tensors: Tensors) -> Any:
    if value.dtype.kind in "mM":
        return _flatten_array(np.asarray(value), tensors)
    if value.dtype.kind == "V":
        raise CheckpointError(f"a number of {value.dtype} cannot be written")
    item = value.item()
    if isinstance(item, np.generic):
        # Its type has more digits than any of Python.
        item = complex(item) if value.dtype.kind == "c" else float(item)
    return _flatten(item, tensors)


def _flatten_dict(value: dict[Any, Any], tensors: Tensors) -> Any:
    if all(type(key) is str and not key.startswith("~") for key in value):
        return {key: _flatten_at(key, one, tensors) for key, one in value.items()}
    return {
        _MAPPING: [[_flatten(key, tensors), _flatten_at(key, one, tensors)] for key, one in value.items()]
    }


def _flatten_at(key: Any, value: Any, tensors: Tensors) -> Any:
    try:
        return _flatten(value, tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}") from None


_KINDS: Mapping[type, Callable[[Any, Tensors], Any]] = {
    torch.Tensor: lambda value, tensors: {_TENSOR: tensors.keep(value.detach().cpu())},
    np.generic: _flatten_number,
    np.ndarray: _flatten_array,
    array.array: lambda value, tensors: _flatten_array(np.asarray(value), tensors),
    dict: _flatten_dict,
    tuple: lambda value, tensors: {_TUPLE: _flatten_list(value, tensors)},
    list: _flatten_list,
    set: lambda value, tensors: {_SET: _flatten_list(value, tensors)},
    frozenset: lambda value, tensors: {_SET: _flatten_list(value, tensors), "frozen": True},
    Image.Image: lambda value, tensors: {
        _PICTURE: value.tobytes(),
        "mode": value.mode,
        "size": list(value.size),
    },
    # Subclasses, such as enum.IntEnum.
    int: lambda value, tensors: _flatten(int(value), tensors),
    float: lambda value, tensors: float(value),
    str: lambda value, tensors: str.__str__(value),
    bytes: lambda value, tensors: bytes(value),
}


def _tensor_at(place: Any, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a tensor by its place. A checkpoint of an earlier version has a name instead."""
    if isinstance(place, str):
        return tensors[place]
    name, first, *shape = place
    elements = 1
    for size in shape:
        elements *= size
    return tensors[name][first : first + elements].reshape(shape)


def _unflatten(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Rebuild the value that `_flatten` took apart."""
    if isinstance(plain, list):
        if not set(map(type, plain)) - _NUMBERS:
            return plain
        return [_unflatten(one, tensors) for one in plain]
    if not isinstance(plain, dict):
        return plain

    for mark, rebuild in _REBUILT.items():
        if mark in plain:
            return rebuild(plain, tensors)
    return {key: _unflatten(one, tensors) for key, one in plain.items()}


def _objects(plain: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> np.ndarray[Any, Any]:
    found = np.empty(len(plain[_OBJECTS]), dtype=object)
    for index, one in enumerate(plain[_OBJECTS]):
        found[index] = _unflatten(one, tensors)
    made: np.ndarray[Any, Any] = found.reshape(plain["shape"])
    return made


def _times(plain: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    numbers = _tensor_at(plain[_TIMES], tensors).numpy()
    found = numbers.view(np.dtype(plain["dtype"])).reshape(plain["shape"])
    return found if found.ndim else found[()]


_REBUILT: Mapping[str, Callable[[dict[str, Any], Mapping[str, torch.Tensor]], Any]] = {
    _TENSOR: lambda plain, tensors: _tensor_at(plain[_TENSOR], tensors),
    _TUPLE: lambda plain, tensors: tuple(_unflatten(plain[_TUPLE], tensors)),
    _ARRAY: lambda plain, tensors: _tensor_at(plain[_ARRAY], tensors).numpy().reshape(plain["shape"]),
    _TIMES: _times,
    _PICTURE: lambda plain, tensors: Image.frombytes(plain["mode"], tuple(plain["size"]), plain[_PICTURE]),
    _OBJECTS: _objects,
    _SET: lambda plain, tensors: (frozenset if "frozen" in plain else set)(_unflatten(plain[_SET], tensors)),
    _TEXT: lambda plain, tensors: _TEXTS[plain[_TEXT][0]][2](plain[_TEXT][1]),
    _MAPPING: lambda plain, tensors: {
        _unflatten(key, tensors): _unflatten(one, tensors) for key, one in plain[_MAPPING]
    },
}


_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""torch's own switch; it overrides the `weights_only` argument of `torch.load`."""
_RANDOM_STATE_TYPES = [np.zeros(0).__reduce__()[0], np.ndarray, np.dtype, type(np.dtype(np.uint32))]


@contextmanager
def weights_only(folder: Path) -> Iterator[None]:
    """Restrict `torch.load` to tensors and plain values. `folder` is named in errors.

    Raises CheckpointError if a file holds other objects; none of their code has run.

    verl has `torch.load` unpickle arbitrary objects; the checkpoints that it writes do not need that.
    """
    import torch.distributed.tensor  # noqa: F401  makes its classes known to the unpickler

    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"

    try:
        with torch.serialization.safe_globals(_RANDOM_STATE_TYPES):
            yield
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{folder} holds more than tensors and plain values, and was not loaded: "
            f"{str(error).splitlines()[0]}"
        ) from error
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before
