# SPDX-License-Identifier: Apache-2.0
"""Provide prompts in the order of the dataset, and restore the prompts that an earlier process had drawn.

Prompts are drawn in whole batches, as verl does, and wait here until they are admitted. A prompt is
identified by its place: the number of its batch and its row. A checkpoint contains places instead of prompts
(which may include images) and the dataloader's state before the oldest of their batches. A resumed run draws
the same rows again from there; a fingerprint of each row detects changed data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash
from tensordict import NonTensorStack

from ...core.fates import Settlement
from ...core.items import Prompt
from ...errors import CheckpointError
from ..agent_loop.partial_rollouts import RecordedRequest, resumed_in, with_resumed, without_resumed


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

    def __init__(self, next_batch: Callable[[], Any], loader: Any) -> None:
        """`loader` is a stateful dataloader; `next_batch` draws a batch from it."""
        self._next_batch, self._loader = next_batch, loader
        self._drawn = 0
        self._undealt: deque[Prompt] = deque()
        self._places: dict[str, PromptPosition] = {}
        self._states: dict[int, Any] = {0: None}
        """Dataloader states after each batch with a remaining prompt, and after the one before the oldest."""
        self._found: dict[str, Prompt] = {}
        """Prompts that were in flight in an earlier process, until their generation begins here."""

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
        return Drawn(number, rows, [fingerprint(row) for row in rows], self._loader.state_dict())

    def add(self, drawn: Drawn) -> None:
        """Add a drawn batch, and forget dataloader states that no checkpoint can need."""
        self._drawn = drawn.number
        for number, row in enumerate(drawn.rows):
            uid = str(row["uid"])
            self._places[uid] = PromptPosition(drawn.number, number, drawn.fingerprints[number])
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

    def settled(self, settled: Settlement) -> None:
        """Forget prompts that have a fate. Called by the register of fates."""
        for uid in settled.uids:
            del self._places[uid]
            self._found.pop(uid, None)

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

    def restore(
        self,
        state: PromptSourceState,
        loader: Any,
        responses: Mapping[str, Sequence[Sequence[RecordedRequest]]],
    ) -> None:
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
        for uid in (*state.undealt, *state.in_flight):
            place = state.places[uid]
            if redrawn.get(uid) != place:
                raise CheckpointError(
                    f"the prompt in row {place.row} of batch {place.batch} differs from the one in the "
                    "checkpoint; restore data.train_files, data.seed and data.shuffle"
                )

        prompts = {prompt.uid: prompt for prompt in self._undealt}
        self._undealt = deque(prompts[uid] for uid in state.undealt)
        self._found = {uid: with_resumed(prompts[uid], responses.get(uid, ())) for uid in state.in_flight}

    def find(self, uids: Sequence[str]) -> list[Prompt]:
        """Return prompts that were in flight in the earlier process, by uid."""
        return [self._found[uid] for uid in uids]

    def begin(self, prompt: Prompt) -> dict[str, Any]:
        """Return the row to generate from.

        Only the first attempt continues the responses of an earlier process: a further attempt means that
        they were discarded.
        """
        first = self._found.pop(prompt.uid, None) is not None
        return prompt.payload if first else without_resumed(prompt.payload)

    def resumed(self, uid: str) -> list[list[RecordedRequest]]:
        """Return the requests that an earlier process recorded for a prompt, until its generation begins."""
        return resumed_in(self._found[uid].payload) if uid in self._found else []


def rows_of(batch: Any) -> list[dict[str, Any]]:
    """Return the rows of verl's TensorDict, which takes milliseconds to slice and to pickle row by row."""
    columns = {}
    for name in batch.keys():
        # A stack of values becomes a list; a value that all rows share stays as it is.
        values = batch[name]
        shared = not isinstance(values, torch.Tensor) and not isinstance(batch.get(name), NonTensorStack)
        columns[name] = [values] * len(batch) if shared else list(values)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def fingerprint(row: Mapping[str, Any]) -> str:
    """Return a hash of a prompt's text and numbers; of other values, such as images, only of their type."""
    names = ("raw_prompt", "index", "data_source", "reward_model")
    # Lists, because the prompts of older checkpoints were batches of one row.
    content = {name: [row[name]] for name in names if name in row}
    return xxhash.xxh3_64_hexdigest(
        msgspec.json.encode(content, enc_hook=lambda value: type(value).__name__, order="sorted")
    )
