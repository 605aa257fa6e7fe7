# SPDX-License-Identifier: Apache-2.0
"""AsyncFlow's keys, of verl's collection of recipes: staleness, devices of each stage, rewards.

Its `trainer.{nnodes,n_gpus_per_node}` are the devices of generation; `async_resources` has the others.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ...config.keys.foreign_keys import Document, Outcome, nothing, only
from ...config.paths import OWN, select
from ...errors import ConfigError
from .rules import NODE_DEVICES, Table, TranslatedFile, by_hand, translate
from .verls_keys import SWITCH, VERLS

_ROLLOUT = "actor_rollout_ref.rollout"
STAGES = {"actor_train": "train", "actor_fwd": "logp", "ref_fwd": "ref_logp"}
"""Its roles with devices, and this package's stages."""
DEFAULT_DEVICES = {"actor_train": 4, "actor_fwd": 2, "ref_fwd": 2}
"""Devices of each role in AsyncFlow's own configuration."""


def translate_async_flow(document: Document, variables: Collection[str] = ()) -> TranslatedFile:
    """Translate a document. `variables`: paths that it refers to itself."""
    return translate(document, TABLE, also=SWITCH, variables=variables)


def _count(document: Document, path: str, default: int) -> int:
    value = select(document, path)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{path} must be a whole number >= 0, got {value!r}; correct the file")
    return value


def pools_of(document: Document) -> dict[str, dict[str, Any]]:
    """Return a pool for each stage with devices. Raises ConfigError if a number of devices is wrong.

    The reference has one only if the loss or the reward has a KL term.
    """
    has_reference = any(
        select(document, path) is True
        for path in ("actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward")
    )
    found = {}
    for role, stage in STAGES.items():
        nodes = _count(document, f"async_resources.{role}.nnodes", 1)
        devices = nodes * _count(document, f"async_resources.{role}.n_gpus_per_node", DEFAULT_DEVICES[role])
        if devices and (stage != "ref_logp" or has_reference):
            found[stage] = {"roles": [stage], "devices": devices}
    generate = _count(document, "trainer.nnodes", 1) * _count(
        document, "trainer.n_gpus_per_node", NODE_DEVICES
    )
    return found | {"generate": {"roles": ["generate"], "devices": generate}}


def _resources(value: Any, document: Document) -> Outcome:
    pools = pools_of(document)
    others = sum(pool["devices"] for stage, pool in pools.items() if stage != "generate")
    nodes = -(-others // NODE_DEVICES)
    if others % nodes:
        raise ConfigError(
            f"async_resources must fill {nodes} nodes evenly, got {others} devices in all; change one of them"
        )
    overrides = {
        f"+{OWN}.pools": pools,
        "trainer.nnodes": nodes,
        "trainer.n_gpus_per_node": others // nodes,
    }
    return Outcome(
        "set", overrides, "a pool for each stage; all devices without generation's are the trainer's"
    )


def _rollout_devices(name: str) -> Any:
    def rule(value: Any, document: Document) -> Outcome:
        return Outcome("set", {f"{_ROLLOUT}.{name}": _count(document, f"trainer.{name}", 1)}, "of generation")

    return rule


def _staleness(value: Any, document: Document) -> Outcome:
    """(staleness + 1) batches may be in flight or waiting."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return Outcome("by hand", text=f"+{OWN}.staleness.max_lag is a whole number of versions")
    return Outcome("set", {f"+{OWN}.staleness.max_lag": value}, f"{value + 1} batches in flight or waiting")


def _in_flight(value: Any, document: Document) -> Outcome:
    return Outcome("set", {f"+{OWN}.weight_sync.in_flight_policy": "drain" if value else "keep"})


def _strategy(value: Any, document: Document) -> Outcome:
    """A pool for log-probs loads published weights, which FSDP1 cannot."""
    strategy = "fsdp2" if value == "fsdp" else value
    paths = ("actor_rollout_ref.actor.strategy", "actor_rollout_ref.ref.strategy")
    text = "FSDP2: a pool for log-probs loads published weights" if strategy != value else ""
    return Outcome("set", dict.fromkeys(paths, strategy), text)


_BY_ITEM = "stages take each batch as soon as it is there"
_REWARD = "write the score as a function, and set reward.custom_reward_function.path"

TABLE: Table = (
    ("async_flow.staleness", _staleness),
    ("async_flow.wait_for_inflight_requests", _in_flight),
    ("async_flow.rollout_max_resume_attempts", nothing("an interrupted request is always resumed")),
    ("async_flow.experience_topic", nothing("the sample store has one partition")),
    ("async_flow.ref_experience_count", nothing(_BY_ITEM)),
    ("async_flow.fwd_experience_count", nothing(_BY_ITEM)),
    ("async_flow.reward_experience_count", nothing(_BY_ITEM)),
    ("async_flow._target_", nothing("a class of AsyncFlow")),
    ("async_resources.actor_train.nnodes", _resources),
    ("async_resources.actor_train.n_gpus_per_node", _resources),
    ("async_resources.actor_fwd.nnodes", _resources),
    ("async_resources.actor_fwd.n_gpus_per_node", _resources),
    ("async_resources.ref_fwd.nnodes", _resources),
    ("async_resources.ref_fwd.n_gpus_per_node", _resources),
    ("async_resources.advantage.*", nothing("advantages are computed in the trainer's process")),
    ("async_resources._target_", nothing("a class of AsyncFlow")),
    ("trainer.nnodes", _rollout_devices("nnodes")),
    ("trainer.n_gpus_per_node", _rollout_devices("n_gpus_per_node")),
    ("actor_rollout_ref.rollout.nnodes", nothing("trainer.nnodes says it")),
    ("actor_rollout_ref.rollout.n_gpus_per_node", nothing("trainer.n_gpus_per_node says it")),
    (
        "actor_rollout_ref.rollout.agent.default_agent_loop",
        nothing("verl's agent loops resume requests here"),
    ),
    ("actor_rollout_ref.actor.strategy", _strategy),
    ("reward_model.enable", only(False, "it is off", "set reward.reward_model")),
    ("reward_model.*", by_hand("set reward.reward_model, if the run has one")),
    ("rule_reward.*", by_hand(_REWARD)),
    *VERLS,
)
