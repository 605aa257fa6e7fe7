# SPDX-License-Identifier: Apache-2.0
"""The engine adapter of a transformer of diffusers: loads versions of all weights, or of a LoRA adapter.

The served tensors have the published names, so a load copies each tensor to the one of its name; the proof
still compares every element, buffers such as position embeddings included. An adapter is a set of tensors and
a way to use them: its scaling, and that it is switched on. Both are checked at each load, since tensors that
are served but not used are how an engine keeps on sampling from the base.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from ..errors import ProofError, WeightSyncError
from ..weight_sync.engine.copy_plan import view_of
from ..weight_sync.engine.engine_adapter import Delivered, Expected
from ..weight_sync.engine.recording_adapter import RecordingAdapter
from ..weight_sync.engine.standby import StagingEnded, ignore
from ..weight_sync.memory.manifest import Manifest, TensorEntry
from ..weight_sync.proof.element_map import Piece, View

NAME = "default"
"""Of the adapter, in the trainer's model and here."""
_PREFIX = "base_model.model."
"""What peft puts in front of the names that are published."""
_LEAVES = (".lora_A.", ".lora_B.")
_NOT_ARGUMENTS = {
    "peft_type",
    "task_type",
    "auto_mapping",
    "peft_version",
    "inference_mode",
    "runtime_config",
}
"""Parts of a published configuration that describe peft or the training, not the layers."""


class TransformerAdapter(RecordingAdapter):
    """One transformer; see `EngineAdapter`. Its weights are replaced in place."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        super().__init__(device)
        self._model = model
        self._described: str | None = None
        """The configuration of the adapter that the model has; None without one."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return all weights and persistent buffers, or an adapter's tensors only: its base never changes."""
        if self._described is None:
            return dict(_weights(self._model))
        return {
            _published_name(name): parameter
            for name, parameter in self._model.named_parameters()
            if any(f"{leaf}{NAME}." in name for leaf in _LEAVES)
        }

    def load(self, pieces: Iterable[Sequence[tuple[str, torch.Tensor]]]) -> None:
        """Copy tensors by name. A tensor that the model does not have is left to the proof."""
        served = self.tensors()
        for name, tensor in chain.from_iterable(pieces):
            if name not in served:
                continue
            if served[name].shape != tensor.shape:
                raise WeightSyncError(
                    f"{name} was published as {tuple(tensor.shape)}, but is served as "
                    f"{tuple(served[name].shape)}; trainer and replicas must have the same model.path"
                )
            served[name].copy_(tensor)

    def finish(self) -> None:
        """Nothing: weights are used as they were loaded."""

    def seal(self) -> None:
        """Nothing, for the same reason."""

    def expected(self, entry: TensorEntry) -> Expected | None:
        """Return the tensor of the same name, by the model's own modules."""
        served = self.tensors().get(entry.name)
        if served is None:
            return None
        return Expected((Piece(View.whole(entry.shape), entry.name, view_of(served)),))

    def prepare(self, manifest: Manifest, ended: StagingEnded = ignore) -> bool:
        return manifest.adapter == self._described and super().prepare(manifest, ended)

    def commit(self, manifest: Manifest, piece_bytes: int) -> Delivered:
        self._wear(manifest)
        delivered = super().commit(manifest, piece_bytes)
        if manifest.adapter is not None:
            self._require_active(manifest.version)
        return delivered

    def _wear(self, manifest: Manifest) -> None:
        """Give the model the layers of the published adapter, if it has none yet."""
        if manifest.adapter == self._described:
            return
        if self._described is not None or self._recorded is not None:
            kinds = [
                "all weights" if one is None else "an adapter" for one in (self._described, manifest.adapter)
            ]
            raise WeightSyncError(
                f"v{manifest.version} brings {kinds[1]} with a configuration other than that of the versions "
                f"before, which brought {kinds[0]}; the replica must restart"
            )
        from peft import LoraConfig, inject_adapter_in_model

        inject_adapter_in_model(LoraConfig(**_arguments(manifest)), self._model, adapter_name=NAME)
        self._model.requires_grad_(False)
        self._described = manifest.adapter

    def _require_active(self, version: int) -> None:
        """Raise ProofError unless each layer with an adapter computes with it."""
        arguments = json.loads(self._described or "{}")
        scaling = arguments["lora_alpha"] / arguments["r"] ** (0.5 if arguments.get("use_rslora") else 1)
        plain = not arguments.get("rank_pattern") and not arguments.get("alpha_pattern")
        for path, module in _adapted(self._model):
            active = list(module.active_adapters) == [NAME] and not module.disable_adapters
            if not active or module.merged:
                raise ProofError(f"v{version}: the adapter of {path} is loaded, but not active")
            if plain and module.scaling[NAME] != scaling:
                raise ProofError(
                    f"v{version}: the adapter of {path} is scaled by {module.scaling[NAME]} "
                    f"instead of {scaling}"
                )


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and persistent buffers themselves, not detached copies of their headers."""
    yield from model.named_parameters(remove_duplicate=False)
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                yield f"{path}.{leaf}" if path else leaf, buffer


def _published_name(name: str) -> str:
    for leaf in _LEAVES:
        name = name.replace(f"{leaf}{NAME}.", leaf)
    return _PREFIX + name


def _arguments(manifest: Manifest) -> dict[str, Any]:
    """Return peft's arguments for the published adapter. Raises WeightSyncError if it is no LoRA adapter."""
    from peft import LoraConfig

    described = json.loads(manifest.adapter or "{}")
    kind = str(described.get("peft_type", "")).rpartition(".")[2]
    if kind != "LORA" or described.get("use_dora"):
        raise WeightSyncError(
            f"v{manifest.version} is a {kind or 'nameless'} adapter; only plain LoRA is loaded"
        )
    known = {field.name for field in dataclasses.fields(LoraConfig)} - _NOT_ARGUMENTS
    simple = (str, int, float, bool, list, dict)
    return {k: v for k, v in described.items() if k in known and isinstance(v, simple) and v not in ({}, [])}


def _adapted(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        if NAME in getattr(module, "lora_A", {}):
            yield path, module
