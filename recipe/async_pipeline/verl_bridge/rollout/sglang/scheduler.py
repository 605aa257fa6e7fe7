# SPDX-License-Identifier: Apache-2.0
"""SGLang's child processes; the scheduler takes this package's calls.

SGLang spawns a process for each of the two functions, which finds it by name. So this package is imported
before SGLang, and `cpu_stubs.py` is ready when it is needed.
"""

from __future__ import annotations

from typing import Any

from ....processes import end_with_parent
from ....weight_sync.memory.segment_names import name_segments_of_engine
from ... import replaced
from . import cpu_stubs, on_cpu
from .calls import SchedulerCall, SchedulerFailure, SchedulerReply


def run_scheduler_process(*args: Any, **kwargs: Any) -> None:
    """Run a scheduler until its process ends."""
    from sglang.srt.managers import scheduler

    name_segments_of_engine()
    if on_cpu():
        cpu_stubs.without_pinning()
        cpu_stubs.angles_by_length()
    replaced.apply("SGLang's scheduler")
    scheduler.run_scheduler_process(*args, **kwargs)


def run_detokenizer_process(*args: Any, **kwargs: Any) -> None:
    """Run a detokenizer until its process ends."""
    end_with_parent()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*args, **kwargs)


def pipeline_scheduler(scheduler_class: Any) -> Any:
    """Return SGLang's scheduler class with this package's calls."""
    import torch
    from sglang.utils import TypeBasedDispatcher

    from ....weight_sync.engine.serving_rank import ServingRank
    from .adapter import SGLangAdapter
    from .calls import message, ranks
    from .rank import EngineRank

    class PipelineScheduler(scheduler_class):  # type: ignore[misc]
        _rank: EngineRank | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # SGLang leaves room for five tokens after a prompt. A response that a load has stopped is sent
            # again with all its tokens, so one must do.
            self.max_req_input_len = self.max_req_len - 1
            if self.server_args.skip_tokenizer_init:
                # verl's default. Grammars, for answers that must have a form, need a tokenizer here.
                self.grammar_manager.grammar_backend = self._grammars()

        def _grammars(self) -> Any:
            from sglang.srt.constrained.base_grammar_backend import create_grammar_backend
            from sglang.srt.utils.hf_transformers_utils import get_tokenizer

            given, model = self.server_args, self.model_config
            path = given.tokenizer_path or given.model_path
            tokenizer = get_tokenizer(path, trust_remote_code=given.trust_remote_code)
            return create_grammar_backend(given, tokenizer, model.vocab_size, model.hf_eos_token_id)

        def init_request_dispatcher(self) -> None:
            super().init_request_dispatcher()
            self._request_dispatcher += TypeBasedDispatcher([(SchedulerCall, self._called)])

        def _called(self, call: SchedulerCall) -> Any:
            try:
                self._rank = self._rank or self._new_rank()
                reply = SchedulerReply(call.number, getattr(self._rank, call.method)(*call.arguments))
            except Exception as error:  # noqa: BLE001 - it is raised in the server
                reply = SchedulerReply(call.number, None, SchedulerFailure.of(error))
            return message(reply)

        def _new_rank(self) -> EngineRank:
            runner = self.tp_worker.model_runner
            manager = runner.lora_manager if self.enable_lora else None
            adapter = SGLangAdapter(runner.model, torch.device(runner.device), manager)
            serving = ServingRank(adapter, ranks=ranks(self), node=self.server_args.node_rank)
            return EngineRank(self, serving, self._gather)

        def _gather(self, mine: Any) -> list[Any]:
            everyone: list[Any] = [None] * ranks(self)
            if len(everyone) == 1:
                return [mine]
            torch.distributed.all_gather_object(everyone, mine, group=self.tp_cpu_group)
            return everyone

    return PipelineScheduler
