# SPDX-License-Identifier: Apache-2.0
"""Provide prompts in the order of the dataset, and restore the prompts that an earlier process had drawn.

Prompts are drawn in whole batches, as verl does, and wait here until they are admitted. A prompt is
identified by its place: the number of its batch and its row. A checkpoint contains places instead of prompts
(which may include images) and the dataloader's state before the oldest of their batches. A resumed run draws
the same rows again from there; a fingerprint of each row detects changed data.

Rows with pictures wait in Ray's object store, and only a reference to them in this process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import ray
import torch
import xxhash
from PIL import Image
from tensordict import NonTensorStack

from ....core.groups.fates import Settlement
from ....core.groups.items import Prompt
from ....errors import CheckpointError, ConfigError
from ...agent_loop.prompt_pictures import STORED, has_media
from .data_rows import FLAW, ROW


def require_a_batch(prompts: int, data: Mapping[str, Any]) -> None:
    """Raises ConfigError if a data set does not have the prompts of one batch; `data` is verl's section.

    The files were counted before the run began. Since then verl has dropped prompts that are too long, or
    that the chat template refused.
    """
    batch = data["train_batch_size"]
    if prompts < batch:
        raise ConfigError(
            f"data.train_files must have at least data.train_batch_size={batch} prompts of at most "
            f"data.max_prompt_length={data['max_prompt_length']} tokens, got {prompts}; lower the batch "
            "size, raise the length, or read in run.log why prompts were dropped"
        )


class PromptPosition(NamedTuple):
    """The place of a prompt in the dataset."""

    batch: int
    """Number of the drawn batch, counted from 1."""
    row: int
    fingerprint: str


class Drawn(NamedTuple):
    """A batch of prompts."""

    number: int
    rows: Sequence[dict[str, Any]]
    fingerprints: Sequence[str]
    identities: Sequence[str]
    loader: Any
    """The dataloader's state after the batch."""


class PromptSourceState(msgspec.Struct, frozen=True, kw_only=True):
    """The state in a checkpoint, in addition to the dataloader's state after batch `before`."""

    before: int
    drawn: int
    """Number of drawn batches."""
    places: Mapping[str, PromptPosition]
    """Uid to the place of each prompt that is not trained."""
    undealt: Sequence[str]
    in_flight: Sequence[str]


class PromptSource:
    """The source of prompts. Call all methods but `draw` and `restore` on the event loop."""

    def __init__(
        self, next_batch: Callable[[], Any], loader: Any, put: Callable[[Any], Any] = ray.put
    ) -> None:
        """`loader` is a stateful dataloader; `next_batch` draws a batch from it. `put` stores a row with
        pictures, and returns its reference.
        """
        self._next_batch, self._loader, self._put = next_batch, loader, put
        self._drawn = 0
        self._undealt: deque[Prompt] = deque()
        self._places: dict[str, PromptPosition] = {}
        self._identities: dict[str, str] = {}
        self._states: dict[int, Any] = {0: None}
        """Dataloader states after each batch with a remaining prompt, and after the one before the oldest."""
        self._found: dict[str, Prompt] = {}
        """Prompts that were in flight in an earlier process, until `find`."""

    @property
    def loader_state(self) -> Any:
        """The dataloader's state after the last added batch."""
        return self._states[self._drawn]

    def lacks(self, prompts: int) -> bool:
        """Return whether fewer than this many prompts are available, so that a batch must be drawn."""
        return len(self._undealt) < prompts

    def draw(self) -> Drawn:
        """Draw the next batch; blocks. Only the dataloader changes until the batch is added."""
        number = self._drawn + 1
        rows = [{**row, "global_steps": number} for row in rows_of(self._next_batch())]
        # Here, in a thread: a row may hold pictures.
        known = [{"raw_prompt": f"row {row[ROW]}"} if row.get(FLAW) else row for row in rows]
        fingerprints, identities = [fingerprint(row) for row in known], [identity(row) for row in known]
        rows = [self._payload(row) for row in rows]
        return Drawn(number, rows, fingerprints, identities, self._loader.state_dict())

    def _payload(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return what waits for a worker: with a reference if there are pictures, or with FLAW."""
        if row.get(FLAW):
            return {name: row[name] for name in ("uid", "global_steps", FLAW)}
        kept = {name: value for name, value in row.items() if name not in (ROW, FLAW)}
        if has_media(row.get("raw_prompt")):
            return {"uid": row["uid"], "global_steps": row["global_steps"], STORED: self._put(kept)}
        return kept

    def add(self, drawn: Drawn) -> None:
        """Add a drawn batch, and forget dataloader states that no checkpoint can need."""
        self._drawn = drawn.number
        for number, row in enumerate(drawn.rows):
            uid = str(row["uid"])
            self._places[uid] = PromptPosition(drawn.number, number, drawn.fingerprints[number])
            self._identities[uid] = drawn.identities[number]
            self._undealt.append(Prompt(uid=uid, step=drawn.number, payload=row))

        self._states[drawn.number] = drawn.loader
        oldest = min(place.batch for place in self._places.values())
        self._states = {number: state for number, state in self._states.items() if number >= oldest - 1}

    def deal(self, prompts: int) -> tuple[Prompt, ...]:
        """Return the next prompts in the order of the dataset."""
        return tuple(self._undealt.popleft() for _ in range(prompts))

    def place(self, uid: str) -> PromptPosition:
        """Return the place of a prompt without a fate; places sort in the order of the dataset."""
        return self._places[uid]

    def identity(self, uid: str) -> str:
        """Return what identifies the prompt of a uid in every epoch; of a group that an earlier process has
        finished, its uid.
        """
        return self._identities.get(uid, uid)

    def settled(self, settled: Settlement) -> None:
        """Forget prompts that have a fate. Called by the register of fates."""
        for uid in settled.uids:
            del self._places[uid]
            self._identities.pop(uid, None)

    # Checkpoints.

    def state(self, in_flight: Sequence[str], finished: Iterable[str]) -> tuple[PromptSourceState, Any]:
        """Return the state for a checkpoint, and the dataloader's state after batch `before`.

        `in_flight` and `finished` are the uids of dealt prompts that are not trained.
        """
        undealt = [prompt.uid for prompt in self._undealt]
        before = min((self._places[uid].batch for uid in (*in_flight, *undealt)), default=self._drawn + 1) - 1
        places = {uid: self._places[uid] for uid in (*in_flight, *undealt, *finished)}
        state = PromptSourceState(
            before=before, drawn=self._drawn, places=places, undealt=undealt, in_flight=in_flight
        )
        return state, self._states[before]

    def restore(self, state: PromptSourceState, loader: Any) -> None:
        """Draw the prompts of a checkpoint again; blocks. Raises CheckpointError if the data has changed."""
        if loader is not None:
            self._loader.load_state_dict(loader)
        self._drawn, self._states = state.before, {state.before: loader}

        uids = {(place.batch, place.row): uid for uid, place in state.places.items()}
        for number in range(state.before + 1, state.drawn + 1):
            drawn = self.draw()
            rows = [
                {**row, "uid": uids.get((number, place), row["uid"])} for place, row in enumerate(drawn.rows)
            ]
            self.add(drawn._replace(rows=rows))

        redrawn, self._places = self._places, dict(state.places)
        self._identities = {uid: self._identities[uid] for uid in self._places if uid in self._identities}
        for uid in (*state.undealt, *state.in_flight):
            place = state.places[uid]
            if redrawn.get(uid) != place:
                raise CheckpointError(
                    f"the prompt in row {place.row} of batch {place.batch} differs from the one in the "
                    "checkpoint; restore data.train_files, data.seed and data.shuffle"
                )

        prompts = {prompt.uid: prompt for prompt in self._undealt}
        self._undealt = deque(prompts[uid] for uid in state.undealt)
        self._found = {uid: prompts[uid] for uid in state.in_flight}

    def keep(self, tokens: Mapping[str, int]) -> None:
        """Note how many tokens an earlier process has generated for prompts, by uid."""
        self._found = {
            uid: replace(prompt, kept_tokens=tokens.get(uid, 0)) for uid, prompt in self._found.items()
        }

    def find(self, uids: Sequence[str]) -> list[Prompt]:
        """Return prompts that were in flight in the earlier process, once, by uid."""
        return [self._found.pop(uid) for uid in uids]


def rows_of(batch: Any) -> list[dict[str, Any]]:
    """Return the rows of verl's TensorDict, which takes milliseconds to slice and to pickle row by row."""
    columns = {}
    for name in batch.keys():
        # A stack of values becomes a list; a value that all rows share stays as it is.
        values = batch[name]
        shared = not isinstance(values, torch.Tensor) and not isinstance(batch.get(name), NonTensorStack)
        columns[name] = [values] * len(batch) if shared else list(values)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


IDENTIFYING = ("raw_prompt", "data_source", "reward_model", "images", "videos", "audios")
"""Columns that make a prompt what it is: its text and media, and what its responses are scored by."""
OF_ENVIRONMENT = ("seed", "task")
"""Keys of `extra_info` from which an environment makes the prompt."""


def identity(row: Mapping[str, Any]) -> str:
    """Return a hash of a prompt, its media and its ground truth, which is the same in every epoch. Blocks."""
    content = {name: row[name] for name in IDENTIFYING if row.get(name) is not None}
    info = row.get("extra_info")
    if isinstance(info, Mapping):
        content |= {name: info[name] for name in OF_ENVIRONMENT if info.get(name) is not None}
    digest = xxhash.xxh3_128()
    _digest(content, digest)
    return digest.hexdigest()


def _digest(value: Any, digest: xxhash.xxh3_128) -> None:
    """Add a value to a digest; another object counts as its text, or as its type if that has an address."""
    if isinstance(value, torch.Tensor):
        value = value.numpy(force=True)
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.tolist()
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    if isinstance(value, Mapping):
        digest.update(b"{%d" % len(value))
        for key in sorted(value, key=str):
            _digest((key, value[key]), digest)
    elif isinstance(value, list | tuple):
        digest.update(b"[%d" % len(value))
        for one in value:
            _digest(one, digest)
    elif isinstance(value, bytes | bytearray | memoryview):
        digest.update(b"b")
        digest.update(value)
    elif callable(getattr(value, "tobytes", None)):
        # A picture of PIL, or an array.
        shape = getattr(value, "shape", None) or getattr(value, "size", "")
        digest.update(f"{shape}{getattr(value, 'dtype', '')}{getattr(value, 'mode', '')}".encode())
        digest.update(value.tobytes())
    else:
        text = repr(value)
        digest.update((type(value).__name__ if " at 0x" in text else text).encode("utf-8", "replace"))
    digest.update(b",")


def fingerprint(row: Mapping[str, Any]) -> str:
    """Return a hash of a prompt's text, numbers and pictures; of other values, only of their type."""
    names = ("raw_prompt", "index", "data_source", "reward_model")
    # Lists, because the prompts of older checkpoints were batches of one row.
    content = {name: [row[name]] for name in names if name in row}
    try:
        plain = msgspec.json.encode(content, enc_hook=_in_short, order="sorted")
    except (TypeError, ValueError):
        # Keys that are not text, or a text that is not Unicode.
        digest = xxhash.xxh3_128()
        _digest(content, digest)
        return digest.hexdigest()
    return xxhash.xxh3_64_hexdigest(plain)


def _in_short(value: Any) -> Any:
    """Return what stands for a value that is no JSON in a fingerprint."""
    if isinstance(value, Image.Image):
        return [value.mode, value.size, xxhash.xxh3_64_hexdigest(value.tobytes())]
    return type(value).__name__
