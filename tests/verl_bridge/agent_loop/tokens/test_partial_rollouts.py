# SPDX-License-Identifier: Apache-2.0
"""Recorded requests are kept with what engines have generated so far, and survive a file."""

from __future__ import annotations

import asyncio
import json
import pickle
from array import array
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from recipe.async_pipeline.core.groups.items import spans_of
from recipe.async_pipeline.errors import CheckpointError
from tests.conftest import Load

pytestmark = pytest.mark.real_engine


class Server:
    """Has written one token of each request; `asked` counts the calls."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked = 0
        self.written = SimpleNamespace(remote=self._written)
        self._error = error

    async def _written(self, names: list[str]) -> dict[str, Any]:
        self.asked += 1
        if self._error is not None:
            raise self._error
        return {name: ([len(name)], [-0.25], [[2, 0]]) for name in names}


def open_at(module: ModuleType, server: Any, name: str, before: Any = None) -> Any:
    return module.Open([1, 2], before, lambda: (server, name))


def test_what_engines_have_written_belongs_to_it(
    module: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    one, other, gone = Server(), Server(), Server(RuntimeError("dead"))
    transcript = module.Transcript(
        [module.RecordedRequest([9], [4], [-1.0], spans_of([[0, 0]]), "completed")]
    )
    begun = module.RecordedRequest([1, 2], [7, 7], [-0.5, -0.5], spans_of([[1, 0]]), None)
    transcript.open = {
        "a": open_at(module, one, "x"),
        "b": open_at(module, one, "yy", begun),
        "c": open_at(module, other, "zzz"),
        "d": open_at(module, gone, "lost"),
        "e": open_at(module, gone, "kept", begun),
        "f": module.Open([1, 2], None, lambda: None),
    }
    found = asyncio.run(module.written_so_far(list(transcript.open.values())))
    assert (one.asked, other.asked) == (1, 1), "each server once"
    (said,) = caplog.messages
    assert said.startswith("2 open requests are not kept: RuntimeError: dead, at ")
    noted = transcript.noted(found)
    transcript.open["a"].prompt_ids.append(3)
    transcript.forget()
    transcript.open = {}
    assert [(list(s.token_ids), list(s.log_probs), tuple(s.spans)) for s in noted.together(2)] == [
        ([1], [-0.25], spans_of([[2, 0]])),
        ([7, 7, 2], [-0.5, -0.5, -0.25], spans_of([[1, 0], [2, 2]])),
        ([3], [-0.25], spans_of([[2, 0]])),
        ([7, 7], [-0.5, -0.5], spans_of([[1, 0]])),
        ([4], [-1.0], spans_of([[0, 0]])),
    ], "and what was not requested again stays"
    assert list(noted.together(2)[0].prompt_ids) == [1, 2], "an agent loop may append to its prompt"


def test_tokens_of_unknown_likelihood_are_generated_again(module: ModuleType) -> None:
    unknown = module.RecordedRequest((), [5], None, spans_of([[2, 0]]), None)
    empty = module.RecordedRequest((), [], [], [], None)
    assert open_at(module, None, "x").with_written(unknown) is None
    assert open_at(module, None, "x").with_written(empty) is None


@pytest.mark.parametrize(
    ("version", "left"), [(5, [5, 6, 7]), (4, [5, 6, 7]), (3, [5, 6]), (2, [5, 6]), (1, [5]), (0, None)]
)
def test_what_later_versions_have_generated_is_left_out(
    module: ModuleType, version: int, left: list[int] | None
) -> None:
    """Training continues while a checkpoint is written."""
    spans = spans_of([[1, 0], [2, 1], [4, 2]])
    one = module.RecordedRequest([1], [5, 6, 7], [-1.0, -2.0, -3.0], spans, "completed")
    found = one.until(version)
    if left is None:
        assert found is None
        return
    assert found.token_ids == left
    assert len(found.log_probs) == len(left)
    assert found.finished == (len(left) == 3)
    assert max(span.version for span in found.spans) <= version
    assert module.Transcript([one]).noted({}).together(version) == [found]


def test_a_prompt_is_recalled_once_and_only_if_it_is_the_same(module: ModuleType) -> None:
    transcript = module.Transcript(
        [module.RecordedRequest([1], [n], [-1.0], spans_of([[0, 0]]), "completed") for n in (5, 6)]
    )
    assert transcript.recall([1, 1]) is None
    assert [transcript.recall([1]).token_ids for _ in range(2)] == [[5], [6]]
    assert transcript.replayed == 2
    assert transcript.recall([1]) is None


def test_a_response_that_is_generated_again_recalls_nothing(module: ModuleType) -> None:
    said = module.RecordedRequest([1], [5], [-1.0], spans_of([[0, 0]]), "completed")
    transcript = module.Transcript([said])
    transcript.said.append(said)
    transcript.forget()
    assert transcript.recall([1]) is None and transcript.noted({}).together(9) == []


@pytest.mark.parametrize(
    ("params", "left"),
    [
        ({}, {"max_tokens": 8}),
        ({"max_tokens": 3, "top_p": 1}, {"max_tokens": 1, "top_p": 1}),
        ({"max_new_tokens": 4, "min_tokens": 1}, {"max_tokens": 2, "min_tokens": 0}),
        ({"max_tokens": 2}, None),
    ],
)
def test_what_is_left_is_as_much_as_verls_server_would_have_allowed(
    module: ModuleType, params: Any, left: Any
) -> None:
    two = module.RecordedRequest([1, 1, 1], [5, 6], [-1.0, -1.0], spans_of([[0, 0]]), None)
    assert module.continued(params, two, prompt_length=4, response_length=10) == left
    later_turn = two._replace(prompt_ids=[1] * 9)
    assert module.continued({}, later_turn, prompt_length=4, response_length=10) == {"max_tokens": 3}, (
        "of the room for all turns"
    )


def test_in_a_file_and_back(module: ModuleType) -> None:
    told = {
        "u": [
            [
                module.RecordedRequest(
                    [1], [2, 3], [-0.5, -0.25], spans_of([[0, 0], [1, 1]]), None, "replica 1"
                )
            ],
            [],
        ]
    }
    assert module.from_plain(json.loads(json.dumps(module.as_plain(told)))) == told
    assert module.tokens_in(told["u"]) == 2


def test_what_cannot_be_repeated_from_numbers_is_not_kept(module: ModuleType) -> None:
    from verl.workers.rollout.replica import TokenOutput

    transcript = module.Transcript()
    spans = {"version_spans": [[0, 0]]}
    for strange in (
        {"routed_experts": object(), "extra_fields": spans},
        {"stop_reason": "aborted", "extra_fields": spans},
        {},
    ):
        transcript.keep([1], TokenOutput(token_ids=[2], log_probs=[-1.0], **strange))
    assert transcript.said == []
    transcript.keep([1], TokenOutput(token_ids=[2], log_probs=[-1.0], extra_fields=spans))
    whole = module.RecordedRequest([1], [2], [-1.0], spans_of([[0, 0]]), "completed", "")
    assert transcript.said == [whole.packed()], "as arrays, which take less memory than lists"


@pytest.mark.parametrize("log_probs", [[-0.1, -1e-9, -700.0], None, [-0.1, None, 0.0]])
def test_a_request_is_written_and_read_as_arrays(
    module: ModuleType, load: Load, tmp_path: Path, log_probs: list[Any] | None
) -> None:
    """And a resumed run gives Python's numbers to agents."""
    store = load("recipe.async_pipeline.checkpoint.store")
    one = module.RecordedRequest([1, 2**40], [3, 4, 5], log_probs, spans_of([(1, 0)]), None, "replica 0")
    packed = pickle.loads(pickle.dumps(one.packed()))
    assert isinstance(packed.token_ids, array)
    assert isinstance(packed.log_probs, array) == (log_probs is not None and None not in log_probs)
    part = store.begin(tmp_path, 2)
    noted = {"u": [module.Transcript([packed]).noted({})], "nothing": [module.Transcript().noted({})]}
    entries = {entry.path: entry for entry in module.write(str(part), "transcripts/rank_0", noted, 1)}
    facts: dict[str, Any] = {"step": 2, "run": "r", "identity": {}, "saved_unix": 0.0}
    folder = store.publish(part, known=entries, epoch=1, record=1, **facts)
    found = module.read(str(folder), ["transcripts/rank_0"])
    assert found == {"u": [[one.packed()]]}
    assert type(found["u"][0][0].token_ids[0]) is int
    (folder / "transcripts/rank_0.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is damaged: transcripts/rank_0.safetensors has 0 bytes"):
        module.read(str(folder), ["transcripts/rank_0"])
