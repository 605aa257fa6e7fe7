# SPDX-License-Identifier: Apache-2.0
"""Which tokens a model has, and which of them end a turn, as the engines read both from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from omegaconf import DictConfig
from transformers import AutoConfig
from verl.utils.fs import copy_to_local
from verl.utils.model import get_generation_config


class ModelTokens(NamedTuple):
    """The tokens of a model."""

    vocabulary: int
    """How many ids have an embedding; the tokenizer may know fewer."""
    ends: frozenset[int]
    """Engines always stop at these: the end token of the tokenizer and all of `generation_config.json`."""


def tokens_of(config: DictConfig, tokenizer: Any) -> ModelTokens:
    """Return the tokens of the model of a run; of the tokenizer only if the run names no model."""
    model = config.actor_rollout_ref.get("model") or {}
    path = model.get("hf_config_path") or model.get("path")
    size, ends = (0, frozenset()) if path is None else _of_folder(path, bool(model.get("trust_remote_code")))
    return ModelTokens(size or len(tokenizer), ends | ids(tokenizer.eos_token_id))


def ids(found: Any) -> frozenset[int]:
    """Return ids as configs have them, none, one or a list, as a set."""
    return frozenset([] if found is None else [found] if isinstance(found, int) else found)


def turn_ends(model: ModelTokens, sampling_params: Mapping[str, Any]) -> frozenset[int]:
    """Return the ids after which a turn is whole with these sampling parameters."""
    return model.ends | ids(sampling_params.get("stop_token_ids"))


@lru_cache
def _of_folder(path: str, trusted: bool) -> tuple[int, frozenset[int]]:
    local = copy_to_local(path)
    try:
        config = AutoConfig.from_pretrained(local, trust_remote_code=trusted).get_text_config()
        size = getattr(config, "vocab_size", None) or 0
    except ValueError:
        # An engine may know a type of model that transformers does not.
        size = 0
    generation = get_generation_config(local, trust_remote_code=trusted)
    return size, ids(None if generation is None else generation.eos_token_id)
