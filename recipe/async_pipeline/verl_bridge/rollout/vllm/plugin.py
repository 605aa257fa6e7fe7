# SPDX-License-Identifier: Apache-2.0
"""A `vllm.general_plugins` entry point: adds a load to vLLM's engine core, and names its shared memory.

The engine core can load a version and report, between the same two steps, how far each request is. Only
the engine core knows which requests are still alive.

vLLM loads this module in each of its processes, so it imports nothing that they do not import anyway.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Sequence
from typing import Any

from ....weight_sync.memory.segment_names import name_segments_of_engine
from ... import replaced

IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Run the engine core as its own worker. Named by its class: on CPU vLLM replaces `uni` by `mp`, because
the number of threads is fixed when a process starts. run_scripts/cpu_env.sh has set it, and a second
process costs both cores and time.
"""


CORE_NAMES = ("EngineCore", "EngineCore_DP")
"""How the name of an engine core's process begins, without and with data parallelism."""


def register() -> None:
    """Add the load to the engine core; let segments of cores and ranks be swept if these are killed.

    vLLM calls this before it builds an executor. No effect elsewhere.
    """
    if multiprocessing.parent_process() is not None:
        name_segments_of_engine()
    if multiprocessing.current_process().name.startswith(CORE_NAMES):
        replaced.apply("vLLM's engine core")


def load_snapshot(
    core: Any, manifest: bytes, piece_bytes: int, timeout_s: float, salts: Sequence[str] | None
) -> tuple[list[dict[str, float]], dict[str, int]]:
    """Load a version. Returns each rank's report, and the output tokens of each live request.

    `salts` are the fields of `Salts`, or None if requests have no salts. Raises ProofError if the ranks
    together do not serve all that was published.
    """
    answers = core.collective_rpc("load_snapshot", timeout_s, (manifest, piece_bytes))
    if salts is not None:
        keep_prefixes_apart(core.scheduler.requests.values(), salts)
    shares = [share for _, share in answers if share is not None]
    if shares:
        from ....weight_sync.memory.manifest import decode
        from ....weight_sync.proof.map_check import check_union

        check_union(decode(manifest).version, shares)
    return [report for report, _ in answers], output_tokens(core)


def output_tokens(core: Any) -> dict[str, int]:
    """Return the output tokens of each live request, with the ones that the scheduler has not received yet.

    Under async scheduling a step is in flight between two steps of the engine core. The workers ran it before
    anything that the core asks of them now. Only its output has the right number: the scheduler's
    placeholders include drafts that may be rejected, and a preempted request has none. Waits for that step.
    """
    # vLLM's own `CompletionOutput.weight_versions` (since 0.32) would not do: a step gets the version that is
    # set when its output arrives, so the step in flight would count for the new version.
    tokens = {name: request.num_output_tokens for name, request in core.scheduler.requests.items()}
    for future, *_ in core.batch_queue or ():
        output = future.result()
        if output is None:
            continue  # The step has failed; the engine core raises its error next.
        # A step that only reads prompts has no tokens at all.
        for name, sampled in zip(output.req_ids, output.sampled_token_ids, strict=False):
            if name in tokens:
                tokens[name] += len(sampled)
    return tokens


def keep_prefixes_apart(requests: Iterable[Any], salts: Sequence[str]) -> None:
    """Have requests that wait for their first step use prefixes of the new version only."""
    from ....weight_sync.engine.versioned_engine import Salts

    for request in requests:
        if request.num_computed_tokens or request.num_output_tokens:
            continue
        salt = Salts(*salts).renewed(request.cache_salt)
        if salt != request.cache_salt:
            request.cache_salt, request.block_hashes = salt, []
            request.update_block_hashes()
