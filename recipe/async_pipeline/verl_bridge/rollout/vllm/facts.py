# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's many paths an engine has taken: its model runner, attention and executor."""

from __future__ import annotations

from enum import Enum
from typing import Any


def engine_facts(worker: Any) -> dict[str, str]:
    """Return the facts of one rank, as plain values. `worker` is vLLM's; its model must be built."""
    runner, config = worker.model_runner, worker.vllm_config
    # The classes of both runners have the same name; only the second one keeps requests in states.
    generation = "V2" if hasattr(runner, "req_states") else "V1"
    attention = {
        _name_of(module.attn_backend) for module in runner.model.modules() if hasattr(module, "attn_backend")
    }
    executor = config.parallel_config.distributed_executor_backend
    return {
        "model runner": f"{generation} ({type(runner).__module__}.{type(runner).__qualname__})",
        "attention": ", ".join(sorted(attention)) or "unknown",
        "executor": executor if isinstance(executor, str) else getattr(executor, "__qualname__", "unknown"),
        "CUDA graphs": "off" if config.model_config.enforce_eager else "on",
    }


def _name_of(backend: Any) -> str:
    """Return the name of an attention: a class in a language model, or a member of an enumeration in a vision
    tower.
    """
    return _of_member(backend) if isinstance(backend, Enum) else str(backend.get_name())


def _of_member(member: Enum) -> str:
    return member.name


def engine_line(version: str, facts: dict[str, str]) -> str:
    """Return the facts as one line of a run's output."""
    return f"engine: vLLM {version}, {', '.join(f'{name} {fact}' for name, fact in facts.items())}"
