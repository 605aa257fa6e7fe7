# SPDX-License-Identifier: Apache-2.0
"""This package's parts of SGLang with the real classes of the SGLang that is first on the path; no engine.

Run as a script; prints one JSON object. With SGLANG_USE_PICKLE_IPC=0, messages are msgpack, if SGLang can.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import zmq

from recipe.async_pipeline.verl_bridge.rollout.sglang import scheduler
from recipe.async_pipeline.verl_bridge.rollout.sglang.calls import (
    SchedulerCall,
    SchedulerCalls,
    SchedulerReply,
    message,
    sender,
)
from recipe.async_pipeline.verl_bridge.rollout.sglang.engine import SGLangEngine
from recipe.async_pipeline.verl_bridge.rollout.sglang.rank import EngineRank

# isort: split
from sglang.srt.managers import io_struct
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams

RECEIVE = getattr(io_struct, "sock_recv", lambda socket: socket.recv_pyobj())
SEND = getattr(io_struct, "sock_send", lambda socket, content: socket.send_pyobj(content))


class Tokenized:
    """A tokenized request, as far as sending it goes."""

    def __init__(self, rid: str) -> None:
        self.rid, self.mm_inputs, self.time_stats = rid, None, MagicMock()
        self.input_ids = self.http_worker_ipc = None

    def wrap_pickle_fields(self) -> None:
        pass


class Partly:
    """Mixed into a class of SGLang of which only a part is made: the rest is mocked."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        mock = MagicMock()
        self.__dict__[name] = mock
        return mock


def request(rid: str, tokens: int, log_probs: bool = True) -> Any:
    params = SamplingParams(max_new_tokens=50)
    made: Any = Req(rid, "", [1, 2, 3], params, return_logprob=log_probs, extra_key="v1")
    made.output_ids.extend(range(tokens))
    if log_probs:
        getattr(made, "logprob", made).output_token_logprobs_val.extend([0.5] * tokens)
    return made


def batch(*requests: Any, extend: bool = False) -> Any:
    made = MagicMock()
    made.reqs = list(requests)
    made.forward_mode.is_extend = lambda: extend
    return made


def a_scheduler() -> Any:
    """Return the scheduler with this package's calls, requests wherever they can be, and a step in flight."""
    base: Any = type("PartlyScheduler", (Partly, Scheduler), {})
    made: Any = object.__new__(scheduler.pipeline_scheduler(base))
    for settings in ("get_parallel", "get_disagg", "get_memory"):
        vars(sys.modules[Scheduler.__module__])[settings] = MagicMock()
    made.init_request_dispatcher()
    made.init_running_status()
    decoding, waiting, silent = request("a", 3), request("b", 0), request("c", 2, log_probs=False)
    chunk = request("d", 0)
    for counter in ("is_chunked", "inflight_middle_chunks"):
        if hasattr(chunk, counter):
            setattr(chunk, counter, 1)
    made.running_batch.reqs = [decoding, silent]
    made.waiting_queue, made.chunked_req = [waiting], chunk
    made.grammar_manager.grammar_queue = []
    made.last_batch = batch(decoding, chunk, extend=True)
    made.result_queue = [(made.last_batch, None)]
    made.tp_cpu_group.size = lambda: 1
    made._rank = EngineRank(made, MagicMock(), made._gather)
    return made


def called(made: Any, *call: Any) -> Any:
    """Return the reply of the scheduler; both messages go through a socket."""
    context: Any = zmq.Context.instance()
    ends = [context.socket(kind) for kind in (zmq.PUSH, zmq.PULL)]
    ends[1].bind(f"inproc://{call[0]}")
    ends[0].connect(f"inproc://{call[0]}")
    SEND(ends[0], message(SchedulerCall(*call)))
    SEND(ends[0], made._request_dispatcher(RECEIVE(ends[1])))
    reply = RECEIVE(ends[1])
    for end in ends:
        end.close()
    assert isinstance(reply, SchedulerReply), reply
    assert reply.failure is None, reply.failure
    return reply.value


async def sent_when() -> list[str]:
    """Return in which order a request is sent and noted as sent."""
    events: list[str] = []
    base: Any = type("PartlyManager", (Partly, TokenizerManager), {})
    manager: Any = object.__new__(base)
    manager.tokenizer_ipc_name = None
    manager.send_to_scheduler.send_pyobj = manager.send_to_scheduler.send = lambda *content, **options: (
        events.append("sent")
    )
    manager.rid_to_state, manager.encoder_dispatch_ready = {}, {}
    transport = manager.cuda_vmm_feature_transport
    transport.prepare_for_dispatch_async = AsyncMock(return_value=[])
    vars(sys.modules[TokenizerManager.__module__])["wrap_shm_features"] = lambda tokenized: tokenized
    if hasattr(io_struct, "msgpack_encode"):
        vars(io_struct)["msgpack_encode"] = lambda content: b""
    engine = SGLangEngine(manager, SchedulerCalls(sender(manager)), {})
    engine._sent["r"] = lambda: events.append("noted")
    sending = manager._send_one_request(Tokenized("r"))
    if sending is not None:
        assert events == []
        await sending
    return events


if __name__ == "__main__":
    made = a_scheduler()
    found = {
        "progress": dict(made._rank._progress()),
        "written": called(made, 1, "written", (["a", "b", "c"],)),
        "frozen": [called(made, 2, "freeze", (True,)), made._engine_paused],
        "events": asyncio.run(sent_when()),
        "pickled": getattr(io_struct, "_USE_PICKLE_IPC", True),
    }
    sys.stdout.write("\nREPORT " + json.dumps(found) + "\n")
