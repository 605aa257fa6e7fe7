# SPDX-License-Identifier: Apache-2.0
"""Nested Python values with tensors, stored as two files that cannot run code when they are read.

`NAME.safetensors` holds the tensors, `NAME.msgpack` the rest. Only tensors, arrays, images and the types of
msgpack are accepted; pickle would accept more, and run arbitrary code when the file is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import _TYPES, load_file

from ..errors import CheckpointError
from .hashed_file import HashedFile, WrittenFiles

_DTYPES = {kind: name for name, kind in _TYPES.items()}
_TUPLE, _TENSOR, _ARRAY, _OBJECTS, _MAPPING, _PICTURE = (
    "~tuple",
    "~tensor",
    "~array",
    "~objects",
    "~mapping",
    "~picture",
)


def write(files: WrittenFiles, path: Path, value: Any) -> None:
    """Write `value` to the two files of `path`, which has no suffix.

    Raises CheckpointError if a value could only be pickled; nothing is written then.
    """
    tensors: dict[str, torch.Tensor] = {}
    plain = _flatten(value, tensors)
    with files.create(path.with_suffix(".safetensors")) as file:
        _write_tensors(file, tensors)
    with files.create(path.with_suffix(".msgpack")) as file:
        file.write(msgspec.msgpack.encode(plain))


def _write_tensors(file: HashedFile, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the format of safetensors: the length of a header, the header, and the bytes of all tensors.

    The library hashes nothing, and would need a copy of all tensors to return bytes. As it does, larger
    elements come first, so that each tensor is aligned.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }

    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little"))
    file.write(encoded)
    for _, tensor in ordered:
        if tensor.numel():
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def read(path: Path) -> Any:
    """Read a value that `write` wrote. Raises CheckpointError if the files are missing or malformed."""
    try:
        tensors = load_file(path.with_suffix(".safetensors"))
        return _unflatten(msgspec.msgpack.decode(path.with_suffix(".msgpack").read_bytes()), tensors)
    except (OSError, SafetensorError, msgspec.MsgspecError, LookupError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__} {error}") from error


def _flatten(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Return `value` with plain types only; its tensors are added to `tensors`."""
    for kind, flatten in _KINDS.items():
        if isinstance(value, kind):
            return flatten(value, tensors)
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    raise CheckpointError(
        f"a {type(value).__module__}.{type(value).__qualname__} cannot be written without pickle"
    )


def _flatten_array(value: np.ndarray[Any, Any], tensors: dict[str, torch.Tensor]) -> Any:
    if value.dtype.kind in "OUS":
        return {_OBJECTS: _flatten(value.reshape(-1).tolist(), tensors), "shape": list(value.shape)}
    return {_ARRAY: _keep(torch.from_numpy(np.ascontiguousarray(value)), tensors), "shape": list(value.shape)}


def _flatten_dict(value: dict[Any, Any], tensors: dict[str, torch.Tensor]) -> Any:
    if all(isinstance(key, str) and not key.startswith("~") for key in value):
        return {key: _flatten(one, tensors) for key, one in value.items()}
    return {_MAPPING: [[_flatten(key, tensors), _flatten(one, tensors)] for key, one in value.items()]}


_KINDS: Mapping[type, Callable[[Any, dict[str, torch.Tensor]], Any]] = {
    torch.Tensor: lambda value, tensors: {_TENSOR: _keep(value.detach().cpu(), tensors)},
    np.generic: lambda value, tensors: _flatten(value.item(), tensors),
    np.ndarray: _flatten_array,
    dict: _flatten_dict,
    tuple: lambda value, tensors: {_TUPLE: [_flatten(one, tensors) for one in value]},
    list: lambda value, tensors: [_flatten(one, tensors) for one in value],
    Image.Image: lambda value, tensors: {
        _PICTURE: value.tobytes(),
        "mode": value.mode,
        "size": list(value.size),
    },
}


def _keep(tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> str:
    """Add a tensor to `tensors`; return its name."""
    name = str(len(tensors))
    # Copy: rows of one batch share memory, which safetensors cannot represent.
    tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
    return name


def _unflatten(plain: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Rebuild the value that `_flatten` took apart."""
    if isinstance(plain, list):
        return [_unflatten(one, tensors) for one in plain]
    if not isinstance(plain, dict):
        return plain

    if _TENSOR in plain:
        return tensors[plain[_TENSOR]]
    if _TUPLE in plain:
        return tuple(_unflatten(plain[_TUPLE], tensors))
    if _ARRAY in plain:
        return tensors[plain[_ARRAY]].numpy().reshape(plain["shape"])
    if _PICTURE in plain:
        return Image.frombytes(plain["mode"], tuple(plain["size"]), plain[_PICTURE])

    if _OBJECTS in plain:
        array = np.empty(len(plain[_OBJECTS]), dtype=object)
        for index, one in enumerate(plain[_OBJECTS]):
            array[index] = _unflatten(one, tensors)
        return array.reshape(plain["shape"])

    if _MAPPING in plain:
        return {_unflatten(key, tensors): _unflatten(one, tensors) for key, one in plain[_MAPPING]}
    return {key: _unflatten(one, tensors) for key, one in plain.items()}
