# SPDX-License-Identifier: Apache-2.0
"""verl's own keys in the files of systems that are built on verl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ...config.keys.foreign_keys import Document, Outcome, nothing, only, to
from ...config.knobs.agentic import AgenticConfig
from ...config.paths import OWN, select
from ...installed.verl import has
from .rules import Became, Table, TranslatedFile, as_it_is

SWITCH = {"+async_pipeline": True}
_OWN_TRAINER = "+async_pipeline=True chooses this package's trainer"
_OWN_TRANSFER = "this package transfers the weights"


def _every(value: Any, document: Document) -> Outcome:
    if select(document, "trainer.v1.trainer_mode") != "separate_async":
        return Outcome("nothing to do", text="trainer_mode is another one")
    if value == 1:
        return Outcome("nothing to do", text="weights are updated every step")
    # With the lag that it needs, as for the key of this name in verl's fully asynchronous trainer.
    return Outcome("set", {"+trigger_parameter_sync_step": value})


VERLS: Table = (
    ("hydra.*", nothing("hydra's own: verl's launcher has its folder and its log")),
    ("trainer.use_v1", nothing(_OWN_TRAINER)),
    ("trainer.use_legacy_worker_impl", nothing("verl has no other workers any more")),
    ("trainer.v1.trainer_mode", nothing(_OWN_TRAINER)),
    ("trainer.v1.separate_async.parameter_sync_step", _every),
    ("trainer.v1.separate_async.num_warmup_batches", nothing("staleness.max_lag bounds what is ahead")),
    ("trainer.v1.colocate_async.*", nothing(_OWN_TRAINER)),
    ("trainer.v1.sync.*", nothing(_OWN_TRAINER)),
    (
        "trainer.device",
        only("cuda", "as here", "this package was never run on such devices: leave it out on GPUs"),
    ),
    ("transfer_queue.enable", nothing("this package always has a sample store")),
    ("actor_rollout_ref.hybrid_engine", nothing("engines have separate devices here")),
    ("actor_rollout_ref.rollout.mode", only("async", "as here", "rollouts are asynchronous here")),
    ("actor_rollout_ref.rollout.checkpoint_engine.backend", nothing(_OWN_TRANSFER)),
    ("actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs", nothing(_OWN_TRANSFER)),
    ("actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.*", nothing(_OWN_TRANSFER)),
    (
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
        to(f"+{OWN}.weight_sync.gather_bucket_size_mb"),
    ),
    (
        "actor_rollout_ref.actor.megatron.grad_offload",
        nothing("verl has no such key any more: gradients are offloaded with the parameters"),
    ),
    ("data.gen_batch_size", nothing("the lag bounds what is generated ahead")),
    ("model_engine", as_it_is),
    ("actor_rollout_ref.*", as_it_is),
    ("algorithm.*", as_it_is),
    ("critic.*", as_it_is),
    ("data.*", as_it_is),
    ("global_profiler.*", nothing("the pipeline profiles no steps")),
    ("ray_kwargs.*", as_it_is),
    ("reward.*", as_it_is),
    ("trainer.*", as_it_is),
    ("transfer_queue.*", as_it_is),
)
"""Keys of verl, which stay as they are unless this package has another one."""


GROUPS = ("model_engine",)
"""Choices of verl's files, which hydra does not add."""


_ADDED = "verl's configuration has no such key: `explain` says whether any code reads it"


def with_agent(found: TranslatedFile) -> TranslatedFile:
    """Return a translation that asks for an environment or an agent, if the file has settings of episodes."""
    prefix = f"+{AgenticConfig.PATH}."
    episodes = any(path.startswith(prefix) for path in found.overrides)
    if not episodes or found.overrides.keys() & {f"{prefix}environment", f"{prefix}agent"}:
        return found
    return replace(
        found, missing=(*found.missing, f"{prefix}environment or {prefix}agent: see docs/agents.md")
    )


def with_plus(found: TranslatedFile, trees: Iterable[Mapping[str, Any]]) -> TranslatedFile:
    """Return a translation that adds the keys that verl's configurations do not have, for hydra."""
    known = list(trees)

    def spelled(path: str) -> str:
        if path.startswith("+") or path in GROUPS or not known or all(has(tree, path) for tree in known):
            return path
        return f"++{path}"

    def of_key(one: Became) -> Became:
        values = {spelled(path): value for path, value in one.outcome.overrides.items()}
        names = [path.removeprefix("++") for path in values if path.startswith("++")]
        nowhere = bool(names) and not any(has(tree, name) for name in names for tree in known)
        text = one.outcome.text or (_ADDED if nowhere else "")
        return one._replace(outcome=one.outcome._replace(overrides=values, text=text))

    overrides = {spelled(path): value for path, value in found.overrides.items()}
    return replace(found, keys=tuple(map(of_key, found.keys)), overrides=overrides)
