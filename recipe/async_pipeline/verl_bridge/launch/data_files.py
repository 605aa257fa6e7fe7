# SPDX-License-Identifier: Apache-2.0
"""Check the files of verl's own data set before Ray starts; of large ones, only a part is read."""

from __future__ import annotations

import glob
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ...config.checks.batch_sizes import BATCH
from ...config.checks.refusals import UNREADABLE
from ...config.knobs.agentic import AGENT_LOOP_OF_AGENTS, ENVIRONMENT_LOOP, VERLS_AGENT_LOOP
from ...config.paths import hint, select
from ..rules.model_rules import description_of
from .chat_check import in_a_line
from .light_verl import registered_agent_loops, uses_default, verl_knows

SOURCE, TRUTH, AGENT = "data_source", "reward_model", "agent_name"
"""Columns: what the reward function of a row is, what it compares with, and the agent loop."""
SCORER = "set reward.custom_reward_function.path"
MODEL_ON = "reward_model.enable"
PROMPT_KEY = "data.prompt_key"
READS_PICTURES = "qwen_vl_utils"
AGENT_LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"
MEDIA = ("image", "video")
BLIND = {ENVIRONMENT_LOOP: MEDIA[1:], AGENT_LOOP_OF_AGENTS: MEDIA}
"""What agent loops do not give to the engine of a prompt."""
FILES = {"train": "data.train_files", "val": "data.val_files"}
FORMATS = (".parquet", ".json", ".jsonl")
"""What verl's data set reads."""
WHOLE_JSON_BYTES = 64 << 20
"""A larger JSON file that is one array is not read here."""
LAST_BYTES = 4 << 20
"""The end of a file of JSON lines that is read: its last line, if that is not longer."""


class InputFault(NamedTuple):
    """What a run could not read."""

    problem: str
    """The line of an error."""
    absent: str = ""
    """What is missing here but may exist where the run will be; empty if the fault is in the thing itself."""


def each(*parts: Iterable[InputFault]) -> Iterator[InputFault]:
    """Yield the faults of all parts. A part that cannot read a value hides no other; its error comes last."""
    unreadable: Exception | None = None
    for part in parts:
        try:
            yield from part
        except UNREADABLE as error:
            unreadable = error
    if unreadable is not None:
        raise unreadable


class _Contents(NamedTuple):
    name: str
    rows: int | None
    columns: Sequence[str] | None
    sources: Sequence[str] = ()
    """Values of the column `data_source`; of a JSON file, the first one."""
    texts: Sequence[str] = ()
    """Columns of texts."""


def faults_of_data(config: Mapping[str, Any], *, scored: bool) -> Iterator[InputFault]:
    """Check the files of verl's own data set; a custom one may take anything."""
    if select(config, "data.custom_cls.path"):
        return
    batch = int(select(config, BATCH))
    for kind, key in FILES.items():
        files = _files_of(config, key)
        if files is None:
            value = select(config, key)
            yield InputFault(f"{key} must be a file or a list of files, got {value!r}; name at least one")
            continue
        read = [_contents_of(key, file, batch) for file in files]
        found = [one for one in read if isinstance(one, _Contents)]
        yield from (one for one in read if isinstance(one, InputFault))
        if len(found) == len(read) and (rows := _rows_in(config, kind, found)) is not None:
            yield from _faults_of_size(key, kind, rows, batch)
        yield from _faults_of_columns(key, config, found)
        yield from _faults_of_pictures(key, config, found)
        if not scored and (kind == "train" or _validates(config)):
            yield from _faults_of_rows(key, config, found)


def rows_of(config: Mapping[str, Any], kind: str) -> int | None:
    """Return the rows of the files of "train" or "val", or None if they cannot be counted here.

    verl may drop some of them.
    """
    files = None if select(config, "data.custom_cls.path") else _files_of(config, FILES[kind])
    read = [_contents_of(FILES[kind], file, sys.maxsize) for file in files or ()]
    found = [one for one in read if isinstance(one, _Contents)]
    return _rows_in(config, kind, found) if files and len(found) == len(read) else None


def _files_of(config: Mapping[str, Any], key: str) -> list[str] | None:
    """Return the names of all files, or None if the key has none or another value."""
    value = select(config, key)
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(n, str) and n for n in names):
        return None
    return [file for name in names for file in ([name] if "://" in name else _expanded(name))]


def _rows_in(config: Mapping[str, Any], kind: str, found: Sequence[_Contents]) -> int | None:
    """Return how many rows verl takes from files, or None if one file could not be counted."""
    rows = [contents.rows for contents in found if contents.rows is not None]
    most = select(config, f"data.{kind}_max_samples")
    total = min(sum(rows), most) if isinstance(most, int) and most > 0 else sum(rows)
    return total if len(rows) == len(found) else None


def _validates(config: Mapping[str, Any]) -> bool:
    return bool(select(config, "trainer.val_before_train")) or (select(config, "trainer.test_freq") or 0) > 0


def _faults_of_columns(
    key: str, config: Mapping[str, Any], found: Sequence[_Contents]
) -> Iterator[InputFault]:
    prompt = str(select(config, PROMPT_KEY) or "prompt")
    for name, _, columns, *_ in found:
        if columns is not None and prompt not in columns:
            yield InputFault(
                f"{PROMPT_KEY} must be a column of {key}, got {prompt!r}{hint(prompt, columns)}; "
                f"{name} has {', '.join(columns) or 'none'}"
            )


def _faults_of_pictures(
    key: str, config: Mapping[str, Any], found: Sequence[_Contents]
) -> Iterator[InputFault]:
    """Check that an agent loop can show the pictures of a file to a model that takes them.

    What messages contain, or a custom data set gives, is not known before: such a prompt is bad data.
    """
    loop, model = select(config, AGENT_LOOP), "actor_rollout_ref.model"
    path = select(config, f"{model}.hf_config_path") or select(config, f"{model}.path")
    readable, hidden = find_spec(READS_PICTURES) is not None, BLIND.get(str(loop), ())
    if (readable and not hidden) or "vision_config" not in description_of(str(path)):
        return
    seen = [
        (kind, f"the column {name!r} in {one.name}")
        for one in found
        for kind in MEDIA
        if (name := str(select(config, f"data.{kind}_key") or f"{kind}s")) in (one.columns or ())
    ]
    unshown = next((column for kind, column in seen if kind in hidden), None)
    if unshown:
        shows = " and ".join(f"{kind}s" for kind in hidden)
        yield InputFault(
            f"{AGENT_LOOP} must be one of verl's for prompts with {shows}, got {loop!r} with {unshown}; use "
            f"{VERLS_AGENT_LOOP}, or leave the column out"
        )
    elif seen and not readable:
        yield InputFault(
            f"{key} must have no pictures where {READS_PICTURES} cannot be imported, got {seen[0][1]}; "
            "install qwen-vl-utils, with which verl reads them",
            "the package qwen-vl-utils, which is not installed here",
        )


def _faults_of_rows(key: str, config: Mapping[str, Any], found: Sequence[_Contents]) -> Iterator[InputFault]:
    """Check that verl's agent loops can use the data, and that its reward function knows it if it scores."""
    if select(config, AGENT_LOOP) not in registered_agent_loops():
        return
    prompt, scores = str(select(config, PROMPT_KEY) or "prompt"), uses_default(config)
    managed = not any(select(config, f"reward.{name}") for name in ("reward_manager.module.path", MODEL_ON))
    for contents in found:
        if AGENT in (contents.columns or ()):
            continue
        if prompt in contents.texts:
            yield InputFault(
                f"{PROMPT_KEY} must be a column of lists of messages, got {prompt!r}, which has texts in "
                f'{key}; write [{{"role": "user", "content": TEXT}}] instead'
            )
        columns = contents.columns
        missing = [
            name for name in (SOURCE, TRUTH) if managed and columns is not None and name not in columns
        ]
        if missing:
            remedy = f"{SCORER}, and add the column" if scores and SOURCE in missing else "add it"
            yield InputFault(
                f"{key} must have the column {missing[0]}, which verl's reward managers read, got none; "
                f"{remedy}"
            )
            return
        if scores and (unknown := [one for one in contents.sources if not verl_knows(one)]):
            yield InputFault(
                f"{key} must have data sources that verl's reward function knows, got "
                f"{', '.join(map(repr, unknown))}; {SCORER}"
            )
            return


def _faults_of_size(key: str, kind: str, rows: int, batch: int) -> Iterator[InputFault]:
    if kind == "train" and rows < batch:
        yield InputFault(
            f"{key} must have at least {BATCH}={batch} rows, with data.train_max_samples, got {rows}; "
            "lower the batch size, or add data: a run would end after 0 steps"
        )
    if kind == "val" and not rows:
        yield InputFault(f"{key} must have a row, got 0; validate on other data")


def _expanded(name: str) -> list[str]:
    """Return the files that a pattern stands for, or the name if it is none or nothing matches."""
    return sorted(glob.glob(name)) or [name] if glob.has_magic(name) and not Path(name).exists() else [name]


def _contents_of(key: str, name: str, enough: int) -> _Contents | InputFault:
    """Return the rows (at least, if there are `enough`) and columns of a data file, or its fault."""
    if not name.endswith(FORMATS):
        return InputFault(f"{key} must end in {', '.join(FORMATS)}, got {name!r}; convert it")
    if "://" in name:
        return _Contents(name, None, None)
    path = Path(name)
    if not path.is_file():
        what = "a folder" if path.is_dir() else "no file"
        home = "; write the home folder out" if name.startswith("~") else "; correct the path"
        return InputFault(
            f"{key} must name files, got {name!r}, where there is {what}{home}",
            f"{key}={name}, which is not on this machine",
        )
    try:
        return _read_parquet(path) if name.endswith(".parquet") else _read_json(path, enough)
    except (OSError, ValueError) as error:  # Arrow's errors are among them
        return InputFault(f"{key} cannot be read: {name}: {in_a_line(error)}; make the file again")


def _read_parquet(path: Path) -> _Contents:
    from pyarrow import parquet, types

    with parquet.ParquetFile(path) as file:
        rows, schema = file.metadata.num_rows, file.schema_arrow
    sources = list[str]()
    if SOURCE in schema.names:
        with parquet.ParquetFile(path, read_dictionary=[SOURCE]) as file:
            chunks = file.read([SOURCE])[SOURCE].chunks
        values = (getattr(chunk, "dictionary", chunk).to_pylist() for chunk in chunks)
        sources = list(dict.fromkeys(map(str, chain.from_iterable(values))))
    texts = [
        field.name for field in schema if types.is_string(field.type) or types.is_large_string(field.type)
    ]
    return _Contents(str(path), rows, schema.names, sources, texts)


def _read_json(path: Path, enough: int) -> _Contents:
    with path.open("rb") as file:
        if file.read(1) == b"[":
            if path.stat().st_size > WHOLE_JSON_BYTES:
                return _Contents(str(path), None, None)
            rows = json.loads(path.read_bytes())
            return _like(path, rows[0] if rows else None, len(rows))
        file.seek(0)
        lines = (line for line in file if line.strip())
        first = next(lines, b"")
        rest = sum(1 for line, _ in zip(lines, range(enough), strict=False))
        file.seek(max(0, path.stat().st_size - LAST_BYTES))
        end = file.read().rstrip().rpartition(b"\n")
        try:
            json.loads(end[2] if end[1] else b"{}")
        except ValueError:
            raise ValueError("its last line is not JSON, perhaps cut off by a copy") from None
        return _like(path, json.loads(first), 1 + rest) if first else _Contents(str(path), 0, None)


def _like(path: Path, row: Any, rows: int) -> _Contents:
    """Return the contents of a file whose first row is `row`."""
    if not isinstance(row, Mapping):
        return _Contents(str(path), rows, None)
    sources = [str(row[SOURCE])] if SOURCE in row else []
    return _Contents(
        str(path), rows, list(row), sources, [name for name in row if isinstance(row[name], str)]
    )
