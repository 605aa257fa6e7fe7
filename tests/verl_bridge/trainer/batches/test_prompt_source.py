# SPDX-License-Identifier: Apache-2.0
"""A resumed source has the same prompts, in any batch of any epoch, and rejects changed data."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from recipe.async_pipeline.core.groups.fates import Settlement
from recipe.async_pipeline.core.groups.items import Prompt
from recipe.async_pipeline.errors import CheckpointError, ConfigError
from tests.conftest import Load

pytestmark = [pytest.mark.real_engine, pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")]
BATCH = 4


@pytest.fixture(scope="module")
def make(load: Load) -> Any:
    """Return a factory of sources like the trainer's, over a small dataset that each epoch shuffles."""
    module = load("recipe.async_pipeline.verl_bridge.trainer.batches.prompt_source")
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import RandomSampler
    from verl.utils import tensordict_utils as tu

    def source(rows: int = 10, seed: int = 1, text: str = "prompt") -> Any:
        data = [{"raw_prompt": [{"role": "user", "content": f"{text} {i}"}], "index": i} for i in range(rows)]
        generator = torch.Generator()
        generator.manual_seed(seed)
        loader = StatefulDataLoader(
            data,
            batch_size=BATCH,
            drop_last=True,
            collate_fn=list,
            sampler=RandomSampler(data, generator=generator),
        )
        place: dict[str, Any] = {"iterator": None, "drawn": 0}

        def next_batch() -> Any:
            """Return a batch as verl's `_fetch_one_gen_batch` does."""
            place["iterator"] = place["iterator"] or iter(loader)
            try:
                batch = next(place["iterator"])
            except StopIteration:
                place["iterator"] = iter(loader)
                batch = next(place["iterator"])
            place["drawn"] += 1
            uids = [f"{id(place)}.{place['drawn']}.{i}" for i in range(BATCH)]
            return tu.get_tensordict(
                {**{name: [row[name] for row in batch] for name in batch[0]}, "uid": uids}
            )

        return module.PromptSource(next_batch, loader)

    return source


def deal(source: Any, prompts: int) -> tuple[Prompt, ...]:
    while source.lacks(prompts):
        source.add(source.draw())
    dealt: tuple[Prompt, ...] = source.deal(prompts)
    return dealt


def texts(prompts: Sequence[Prompt]) -> list[str]:
    return [prompt.payload["raw_prompt"][0]["content"] for prompt in prompts]


def written_and_read(state: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(state), type=type(state))


@pytest.mark.parametrize("dealt", [0, 1, 3, 4, 9, 13, 22])
@pytest.mark.parametrize("every", [0, 1, 2])
def test_a_resumed_source_continues_with_the_same_prompts(make: Any, dealt: int, every: int) -> None:
    before = make()
    prompts = list(deal(before, dealt)) if dealt else []
    # Every `every`-th prompt is trained; one other is finished.
    trained = {p.uid for i, p in enumerate(prompts) if every and i % every == 0}
    before.settled(Settlement(fate="trained", uids=tuple(trained), step=1))
    left = [p for p in prompts if p.uid not in trained]
    finished, in_flight = [p.uid for p in left[:1]], [p.uid for p in left[1:]]
    state, loader = before.state(in_flight, finished)

    after = make()
    after.restore(written_and_read(state), loader)
    found = after.find(in_flight)
    assert [p.uid for p in found] == in_flight
    assert texts(found) == texts(left[1:])
    assert [p.step for p in found] == [p.step for p in left[1:]]
    assert [after.place(uid) for uid in (*finished, *in_flight)] == [
        before.place(uid) for uid in (*finished, *in_flight)
    ]
    for number in (1, 5, 2, 8):
        resumed, undisturbed = deal(after, number), deal(before, number)
        assert texts(resumed) == texts(undisturbed)
        assert [p.step for p in resumed] == [p.step for p in undisturbed]
        assert all(p.payload["uid"] == p.uid for p in resumed)


def with_pictures(load: Load, flawed: str) -> Any:
    """Return a source of four prompts, of which the second has a picture and the third is none."""
    module = load("recipe.async_pipeline.verl_bridge.trainer.batches.prompt_source")
    rows = [row(uid=str(number), index=number) for number in range(4)]
    content = [{"type": "image", "bytes": b"png", "path": None}, {"type": "text", "text": "what?"}]
    rows[1]["raw_prompt"] = [{"role": "user", "content": content}]
    rows = [{**one, module.ROW: i, module.FLAW: flawed if i == 2 else ""} for i, one in enumerate(rows)]
    batch = {name: [one[name] for one in rows] for name in rows[0]}
    tensordict = load("verl.utils.tensordict_utils").get_tensordict(batch)
    loader = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    return module.PromptSource(lambda: tensordict, loader, put=lambda row: ("stored", row))


def test_pictures_wait_in_the_object_store_and_a_row_without_a_prompt_has_its_reason(load: Load) -> None:
    source = with_pictures(load, "row 2: broken")
    text, seen, flawed, _ = deal(source, 4)
    assert text.payload.keys() == {*row(), "global_steps"}
    stored, whole = seen.payload.pop("__stored__")
    assert stored == "stored" and whole["raw_prompt"][0]["content"][0]["bytes"] == b"png"
    assert seen.payload == {"uid": "1", "global_steps": 1} and whole.keys() == text.payload.keys()
    assert flawed.payload == {"uid": "2", "global_steps": 1, "__flaw__": "row 2: broken"}

    state, loader = source.state([one.uid for one in (text, seen, flawed)], [])
    resumed = with_pictures(load, "row 2: another error")
    resumed.restore(written_and_read(state), loader)
    assert [resumed.identity(uid) for uid in "012"] == [source.identity(uid) for uid in "012"]
    assert resumed.identity("finished") == "finished", "an earlier process has generated it"
    with pytest.raises(CheckpointError, match="row 2 of batch 1 differs"):
        with_pictures(load, "").restore(written_and_read(state), loader)


def test_identities_are_computed_when_a_batch_is_drawn(
    make: Any, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which a thread does; the event loop only adds them."""
    source = make()
    drawn = source.draw()
    monkeypatch.setattr(module, "identity", None)
    source.add(drawn)
    assert all(source.identity(prompt.uid) for prompt in source.deal(BATCH))


def test_a_source_can_be_resumed_repeatedly(make: Any) -> None:
    undisturbed = texts(deal(make(), 60))
    source, seen = make(), []
    for _ in range(10):
        seen += texts(deal(source, 6))
        state, loader = source.state([], [])
        source = make()
        source.restore(written_and_read(state), loader)
    assert seen == undisturbed


def test_only_states_that_a_checkpoint_may_need_are_kept(make: Any) -> None:
    source = make(rows=100)
    for _ in range(20):
        for prompt in deal(source, BATCH):
            source.settled(Settlement(fate="expired", uids=(prompt.uid,)))
    assert len(source._states) <= 3


@pytest.mark.parametrize("change", [{"seed": 2}, {"text": "another"}])
def test_changed_data_is_rejected(make: Any, change: dict[str, Any]) -> None:
    before = make()
    prompts = deal(before, 3)
    state, loader = before.state([p.uid for p in prompts], [])
    with pytest.raises(
        CheckpointError, match="row 3 of batch 1 differs from the one in the checkpoint; restore data.train_"
    ):
        make(**change).restore(state, loader)


def test_prompts_know_how_many_tokens_an_earlier_process_has_generated(make: Any) -> None:
    before = make()
    uids = [prompt.uid for prompt in deal(before, 3)]
    state, loader = before.state(uids, [])
    after = make()
    after.restore(written_and_read(state), loader)
    after.keep({uids[0]: 2, "another": 3})
    assert [prompt.kept_tokens for prompt in after.find(uids)] == [2, 0, 0]


def test_rows_have_what_verls_worker_would_separate(make: Any, load: Load) -> None:
    """Compare with the loop of verl's `generate_sequences`, for each kind of column."""
    module = load("recipe.async_pipeline.verl_bridge.trainer.batches.prompt_source")
    import torch
    from tensordict import NonTensorStack
    from verl.utils import tensordict_utils as tu

    batch = tu.get_tensordict(
        {
            "dummy_tensor": torch.arange(6).reshape(3, 2),
            "uid": ["a", "b", "c"],
            "raw_prompt": [[{"role": "user", "content": str(i)}] for i in range(3)],
            "reward_model": [{"ground_truth": str(i)} for i in range(3)],
            "empty": [{}, [], None],
        },
        non_tensor_dict={"temperature": 0.5, "names": "shared text"},
    )
    expected = [
        {
            name: value[i]
            if isinstance(value, torch.Tensor)
            else value[i].data
            if isinstance(value, NonTensorStack)
            else value.data
            for name, value in batch.items()
        }
        for i in range(3)
    ]

    found = module.rows_of(batch)
    for row, same in zip(found, expected, strict=True):
        assert torch.equal(row.pop("dummy_tensor"), same.pop("dummy_tensor"))
        assert row == same


def test_the_fingerprint_of_a_row_is_as_in_older_checkpoints(load: Load) -> None:
    module = load("recipe.async_pipeline.verl_bridge.trainer.batches.prompt_source")
    row = {"raw_prompt": [{"role": "user", "content": "1+2="}], "index": 3, "data_source": "toy", "uid": "x"}
    assert module.fingerprint(row) == "b01198ec74f66e8c"


def test_another_picture_is_another_row(load: Load) -> None:
    """Data sets of Hugging Face have pictures without a file."""
    module = load("recipe.async_pipeline.verl_bridge.trainer.batches.prompt_source")

    def row(*colours: str) -> dict[str, Any]:
        parts = [{"type": "image", "image": Image.new("RGB", (2, 2), colour)} for colour in colours]
        return {"raw_prompt": [{"role": "user", "content": parts}], "index": 3}

    red, again, blue = (module.fingerprint(row(colour)) for colour in ("red", "red", "blue"))
    assert red == again != blue


def test_a_data_set_without_a_batch_is_refused(load: Load) -> None:
    require = load("recipe.async_pipeline.verl_bridge.trainer.batches.prompt_source").require_a_batch
    data = {"train_batch_size": 16, "max_prompt_length": 8}
    require(16, data)
    with pytest.raises(
        ConfigError, match="must have at least data.train_batch_size=16 prompts .* got 15; lower"
    ):
        require(15, data)


# What identifies a prompt.


def row(**changes: Any) -> dict[str, Any]:
    return {
        "uid": "u1",
        "index": 0,
        "raw_prompt": [{"role": "user", "content": "1+1="}],
        "data_source": "toy",
        "reward_model": {"ground_truth": "2"},
        "extra_info": {"split": "train"},
        **changes,
    }


def picture(load: Load, colour: int) -> Any:
    return load("PIL.Image").new("RGB", (8, 8), (colour, 0, 0))


def test_a_prompt_is_the_same_in_every_epoch(load: Load) -> None:
    identity = load("recipe.async_pipeline.verl_bridge.trainer.batches.prompt_source").identity

    def with_picture() -> str:
        content = [{"type": "image", "image": picture(load, 3)}, {"type": "text", "text": "what?"}]
        found: str = identity(row(raw_prompt=[{"role": "user", "content": content}], tool=object()))
        return found

    assert identity(row()) == identity(row(uid="u2", index=7, global_steps=9))
    assert with_picture() == with_picture(), "its address is another one"
    whole = np.array([{"role": "user", "content": "1+1="}], dtype=object)
    assert identity(row(raw_prompt=whole)) == identity(row())
    assert identity(row(reward_model={"ground_truth": object()})) == identity(
        row(reward_model={"ground_truth": object()})
    )


def test_prompts_that_differ_in_anything_that_counts_are_different(load: Load) -> None:
    identity = load("recipe.async_pipeline.verl_bridge.trainer.batches.prompt_source").identity
    import torch

    different = [
        row(),
        row(raw_prompt=[{"role": "user", "content": "1+2="}]),
        row(raw_prompt=[{"role": "system", "content": "1+1="}]),
        row(reward_model={"ground_truth": "3"}),
        row(data_source="other"),
        row(extra_info={"seed": 1}),
        row(extra_info={"seed": 2}),
        row(extra_info={"task": 2}),
        row(images=[picture(load, 1)]),
        row(images=[picture(load, 2)]),
        row(images=[{"bytes": b"a"}]),
        row(images=[{"bytes": b"b"}]),
        row(images=[np.zeros((2, 3))]),
        row(images=[np.zeros((3, 2))]),
        row(images=[np.zeros((3, 2), dtype=np.int64)]),
        row(images=[torch.zeros(1000)]),
        row(images=[torch.cat([torch.zeros(500), torch.ones(1), torch.zeros(499)])]),
        row(images=np.array([{"bytes": b"c"}], dtype=object)),
    ]
    assert len({identity(one) for one in different}) == len(different)


def test_a_source_knows_the_identities_of_its_prompts_until_they_are_settled(make: Any) -> None:
    before = make()
    prompts = deal(before, 6)
    identities = [before.identity(one.uid) for one in prompts]
    assert len(set(identities)) == 6
    state, loader = before.state([one.uid for one in prompts], [])
    after = make()
    after.restore(written_and_read(state), loader)
    assert [after.identity(one.uid) for one in prompts] == identities
    after.settled(Settlement(fate="trained", uids=(prompts[0].uid,), step=1))
    assert after.identity(prompts[0].uid) == prompts[0].uid, "it is forgotten"


@pytest.mark.parametrize("value", ["\ud800", {(1, 2): 3}, {None: 1}, {1, 2}, 10**30, 1j, object(), b"\xff"])
def test_a_row_may_hold_any_value(module: Any, value: Any) -> None:
    odd = row(reward_model={"ground_truth": value})
    for digest in (module.fingerprint, module.identity):
        assert digest(odd) == digest(odd) != digest(row())
