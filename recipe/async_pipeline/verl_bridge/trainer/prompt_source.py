# SPDX-License-Identifier: Apache-2.0
"""Deals prompts out in the order of the dataset, and finds those again that an earlier process had drawn.

Prompts are drawn in whole batches, as verl does, and wait here until they are admitted. A prompt is known by
its place:
the number of its batch and its row there. A checkpoint holds places instead of prompts, which may be
pictures, and the
dataloader's state from before the oldest batch that one of them is in. Who goes on draws from there anew, and
gets the
same rows; a fingerprint of each says whether the data is still the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import xxhash
from verl.utils import tensordict_utils as tu

from ...core.fates import Settlement
from ...core.items import Prompt
from ...errors import CheckpointError
from ..agent_loop.partial_rollouts import RecordedRequest, resumed_in, with_resumed, without_resumed


class Place(NamedTuple):
    """Where a prompt comes from."""

    batch: int
    """Counts the batches that were drawn, from 1."""
    row: int
    fingerprint: str


class Drawn(NamedTuple):
    """A batch of prompts."""

    number: int
    rows: Any
    """verl's TensorDict."""
    fingerprints: Sequence[str]
    loader: Any
    """The dataloader's state after it."""


class PromptSourceState(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds of it, beside the dataloader's state after batch `before`."""

    before: int
    drawn: int
    """Batches."""
    places: Mapping[str, Place]
    """Of the prompts that are not trained yet, by uid."""
    undealt: Sequence[str]
    in_flight: Sequence[str]


class PromptSource:
    """Belongs to the event loop, but for `draw`."""

    def __init__(self, next_batch: Callable[[], Any], loader: Any) -> None:
        """`loader`: a dataloader with a state; `next_batch` draws from it."""
        self._next_batch, self._loader = next_batch, loader
        self._drawn = 0
        self._undealt: deque[Prompt] = deque()
        self._places: dict[str, Place] = {}
        self._states: dict[int, Any] = {0: None}
        """The dataloader's states after each batch that is still about, and after the one before the
        oldest of those.
        """
        self._found: dict[str, Prompt] = {}
        """Prompts that were in flight in an earlier process, until their generation begins here."""

    @property
    def loader_state(self) -> Any:
        """The dataloader's, after what was drawn."""
        return self._states[self._drawn]

    def lacks(self, prompts: int) -> bool:
        """Has a batch to be drawn before so many can be dealt out?"""
        return len(self._undealt) < prompts

    def draw(self) -> Drawn:
        """The next batch; blocks. Nothing changes here but the dataloader, until it is added."""
        number = self._drawn + 1
        rows = self._next_batch()
        tu.assign_non_tensor_data(rows, "global_steps", number)
        prints = [fingerprint(rows[row : row + 1]) for row in range(len(rows))]
        return Drawn(number, rows, prints, self._loader.state_dict())

    def add(self, drawn: Drawn) -> None:
        """A batch was drawn."""
        self._drawn = drawn.number
        for row, uid in enumerate(map(str, drawn.rows["uid"])):
            self._places[uid] = Place(drawn.number, row, drawn.fingerprints[row])
            self._undealt.append(Prompt(uid=uid, step=drawn.number, payload=drawn.rows[row : row + 1]))
        self._states[drawn.number] = drawn.loader
        oldest = min(place.batch for place in self._places.values())
        self._states = {number: state for number, state in self._states.items() if number >= oldest - 1}

    def deal(self, prompts: int) -> tuple[Prompt, ...]:
        return tuple(self._undealt.popleft() for _ in range(prompts))

    def place(self, uid: str) -> Place:
        """Where a prompt that is not forgotten comes from; in the order of the dataset."""
        return self._places[uid]

    def settled(self, settled: Settlement) -> None:
        """Forget prompts that have a fate. Subscribes to the register."""
        for uid in settled.uids:
            del self._places[uid]
            self._found.pop(uid, None)

    # Checkpoints.

    def state(self, in_flight: Sequence[str], finished: Iterable[str]) -> tuple[PromptSourceState, Any]:
        """With the dataloader's state. Both are prompts that were dealt out and are not trained."""
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
        """Draw anew what was drawn and is not answered; blocks. Raises CheckpointError: the data is not
        the same.
        """
        if loader is not None:
            self._loader.load_state_dict(loader)
        self._drawn, self._states = state.before, {state.before: loader}
        uids = {(place.batch, place.row): uid for uid, place in state.places.items()}
        for number in range(state.before + 1, state.drawn + 1):
            drawn = self.draw()
            names = [uids.get((number, row), uid) for row, uid in enumerate(map(str, drawn.rows["uid"]))]
            tu.assign_non_tensor_stack(drawn.rows, "uid", names)
            self.add(drawn)
        drawn_anew, self._places = self._places, dict(state.places)
        for uid in (*state.undealt, *state.in_flight):
            place = state.places[uid]
            if drawn_anew.get(uid) != place:
                raise CheckpointError(
                    f"the prompt in row {place.row} of batch {place.batch} is not the one that was drawn "
                    "before; "
                    "data.train_files, data.seed or data.shuffle have changed since the checkpoint"
                )
        prompts = {prompt.uid: prompt for prompt in self._undealt}
        self._undealt = deque(prompts[uid] for uid in state.undealt)
        self._found = {uid: with_resumed(prompts[uid], responses.get(uid, ())) for uid in state.in_flight}

    def found(self, uids: Sequence[str]) -> list[Prompt]:
        """Return prompts that were in flight in the earlier process."""
        return [self._found[uid] for uid in uids]

    def begin(self, prompt: Prompt) -> Any:
        """Return the row to generate from.

        Only the first attempt continues what an earlier process generated; a further attempt follows from a
        decision to discard it.
        """
        first = self._found.pop(prompt.uid, None) is not None
        return prompt.payload if first else without_resumed(prompt.payload)

    def resumed(self, uid: str) -> list[list[RecordedRequest]]:
        """Return what an earlier process generated for a prompt whose generation has not begun here."""
        return resumed_in(self._found[uid].payload) if uid in self._found else []


def fingerprint(row: Any) -> str:
    """Of what a prompt says; of what is neither text nor number, such as a picture, only that it is there."""
    said = {
        name: list(row[name])
        for name in ("raw_prompt", "index", "data_source", "reward_model")
        if name in row.keys()
    }
    return xxhash.xxh3_64_hexdigest(
        msgspec.json.encode(said, enc_hook=lambda value: type(value).__name__, order="sorted")
    )
