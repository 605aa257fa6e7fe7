# SPDX-License-Identifier: Apache-2.0
"""Compute the plan of a run: placement, groups in flight, staleness and memory.

Pure arithmetic on a resolved verl config; `async-pipeline explain` prints it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ...config.checks.batch_sizes import training_ranks
from ...config.checks.rollout_correction import describe_correction
from ...config.derived.adapters import (
    adapter_rank,
    arena_bytes,
    model_parameters,
    published_parameters,
    publishes_adapters,
    version_bytes,
)
from ...config.derived.sample_store import StoreBudget, store_budget
from ...config.derived.scheduling import OpenRequests, read_before_update
from ...config.knobs.schema import AsyncPipelineConfig
from ...config.paths import select
from ...config.placement import Placement
from ...core.groups.message_queue import share_of
from .episode_plan import describe_episodes
from .strategy_order import order_of
from .training import describe_loss, describe_teachers, describe_training

_ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run before it starts: a resolved verl config with its knobs, and figures that follow from them."""

    config: Mapping[str, Any]
    knobs: AsyncPipelineConfig
    placement: Placement
    old_logp: str
    engine_version: str | None
    """Of the rollout engine on this machine; None if it is not installed."""

    oldest_groups: int
    """Groups of a step that may have the full lag."""
    load_staging: str
    reward_model_devices: int
    """Devices of the reward model, in addition to the pools."""
    train_devices: int
    replicas: int
    tensor_parallel: int
    groups_per_step: int
    responses_per_group: int
    mini_batches_per_step: int
    responses_per_mini_batch_and_rank: float
    padding_per_step: int
    """Empty samples that fill the last mini-batch."""
    groups_at_once: int
    """Upper bound for groups in flight or finished but not yet trained."""
    responses_at_once: int
    engine_slots: int
    """Responses that the replicas generate concurrently; others wait, see `config.derived.scheduling`."""
    open_requests: int
    """Requests that may be open on one replica."""
    store: StoreBudget
    """What the sample store holds."""
    parameters: int | None
    """Parameters of the model; None if it is not on this machine."""
    published_parameters: int | None
    """Parameters of a version: the model's, or its adapters'."""
    arena_bytes: int | None
    """Host memory of the trainer's node."""
    spare_bytes: int | None
    """Memory of the standby copy on each device of a replica, in addition to the weights."""

    @property
    def episodes(self) -> list[str]:
        """Facts about episodes in environments, of agents or with tools; empty without them."""
        return list(describe_episodes(self.knobs.agentic, self.config, self.knobs.weight_sync.reuse_prefixes))

    @property
    def loss(self) -> str:
        return describe_loss(self.config, self.old_logp, self.mini_batches_per_step)

    @property
    def correction(self) -> str:
        """How the age of responses is corrected; starts with `none` if it is not."""
        oldest = self.knobs.staleness.max_lag - (self.oldest_groups == 0)
        return describe_correction(self.config, self.old_logp, oldest)


def plan_of(
    config: Mapping[str, Any],
    knobs: AsyncPipelineConfig,
    placement: Placement,
    old_logp: str,
    engine_version: str | None = None,
) -> Plan:
    """Compute the plan of a resolved verl config, with the placement and old log-probs of its checks.

    `engine_version`: of the engine on this machine, if it is installed.
    """

    def number(path: str) -> int:
        return int(select(config, path))

    batch, n = number("data.train_batch_size"), number(f"{_ROLLOUT}.n")
    tp = number(f"{_ROLLOUT}.tensor_model_parallel_size")
    train, generate = (pool.devices for role in ("train", "generate") if (pool := placement.pool_of(role)))
    mini = min(batch, number("actor_rollout_ref.actor.ppo_mini_batch_size"))
    depth = knobs.staleness.batches_ahead
    oldest = share_of(knobs.staleness.oldest_share, batch)

    # Engines of text take adapters at once; only `DiffusersEngine` prepares them.
    at_once = publishes_adapters(config) and select(config, f"{_ROLLOUT}.name") != "diffusers"
    staging = "host" if at_once else knobs.weight_sync.load_staging
    parameters, nbytes = model_parameters(config), version_bytes(config)

    return Plan(
        config=config,
        knobs=knobs,
        placement=placement,
        old_logp=old_logp,
        engine_version=engine_version,
        oldest_groups=oldest,
        load_staging=staging,
        reward_model_devices=_reward_model_devices(config),
        train_devices=train,
        replicas=generate // tp,
        tensor_parallel=tp,
        groups_per_step=batch,
        responses_per_group=n,
        mini_batches_per_step=-(-batch // mini),
        responses_per_mini_batch_and_rank=mini * n / training_ranks(config, train).number,
        padding_per_step=-batch % mini * n,
        groups_at_once=batch * depth + oldest,
        responses_at_once=(batch * depth + oldest) * (n + knobs.agentic.redundancy),
        engine_slots=generate // tp * number(f"{_ROLLOUT}.max_num_seqs"),
        open_requests=OpenRequests.of(
            knobs,
            engine_slots=number(f"{_ROLLOUT}.max_num_seqs") * number(f"{_ROLLOUT}.data_parallel_size"),
            workers=number(f"{_ROLLOUT}.agent.num_workers"),
            groups_per_step=batch,
            responses_per_group=n + knobs.agentic.redundancy,
        ).per_replica,
        store=store_budget(config, knobs),
        parameters=parameters,
        published_parameters=published_parameters(config),
        arena_bytes=arena_bytes(config),
        spare_bytes=_spare_bytes(config, staging, parameters, nbytes),
    )


def _spare_bytes(
    config: Mapping[str, Any], staging: str, parameters: int | None, nbytes: int | None
) -> int | None:
    if staging != "device":
        return 0
    if select(config, f"{_ROLLOUT}.quantization") == "fp8":
        return parameters  # a byte each, of whole tensors
    return None if nbytes is None else nbytes // int(select(config, f"{_ROLLOUT}.tensor_model_parallel_size"))


def _reward_model_devices(config: Mapping[str, Any]) -> int:
    model = select(config, "reward.reward_model") or {}
    return int(model["nnodes"]) * int(model["n_gpus_per_node"]) if model.get("enable") else 0


def _validation(config: Mapping[str, Any], knobs: AsyncPipelineConfig) -> str:
    every = int(select(config, "trainer.test_freq") or 0)
    first = select(config, "trainer.val_before_train")
    when = ["before the first step"] if first is None or first else []
    when += [f"every {_count(every, 'step')}" if every > 1 else "after every step"] if every > 0 else []
    if not when:
        return "never"
    how = {"parallel": "in parallel with training", "pause": "prompts for training wait meanwhile"}
    return f"{' and '.join(when)}; {how[knobs.validation]}"


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the figures of `explain --json`."""
    config, knobs = plan.config, plan.knobs
    sources = ("config", "knobs", "placement", "train_devices", "store")
    figures = {item.name: getattr(plan, item.name) for item in fields(plan) if item.name not in sources}
    return figures | {
        "store": asdict(plan.store),
        "strategy": knobs.strategy,
        "max_lag": knobs.staleness.max_lag,
        "order": order_of(knobs.strategy),
        "straggler": knobs.staleness.straggler,
        "weight_sync_every": knobs.weight_sync.every,
        "in_flight_policy": knobs.weight_sync.in_flight_policy,
        "delta": knobs.weight_sync.delta,
        "engine": select(config, f"{_ROLLOUT}.name"),
        "training": describe_training(config, plan.train_devices),
        "adapter_rank": adapter_rank(config),
        "adapters_alone": publishes_adapters(config),
        "custom_stages": list(knobs.custom_stages),
        "validation": _validation(config, knobs),
        "placement": plan.placement.as_list(),
        "loss": plan.loss,
        "distillation": describe_teachers(config),
        "correction": plan.correction,
        "episodes": plan.episodes,
        "redundancy": knobs.agentic.redundancy,
    }


def describe_plan(plan: Plan) -> list[str]:
    """Return the plan as lines of text."""
    config, knobs, engine = plan.config, plan.knobs, str(select(plan.config, f"{_ROLLOUT}.name"))
    staleness, sync, lag = knobs.staleness, knobs.weight_sync, knobs.staleness.max_lag
    lines = [
        f"strategy        {knobs.strategy}: each step trains groups {order_of(knobs.strategy)}",
        f"lag             at most {lag}: step s starts from version s-1 and trains responses of "
        f"version s-{lag + 1}{' or newer' if lag else ''}",
    ]
    if plan.oldest_groups == 0 < lag:
        lines.append(
            f"                but none of a step's {plan.groups_per_step} groups has lag {lag}, "
            "because oldest_share is less than one group"
        )
    elif plan.oldest_groups < plan.groups_per_step:
        lines.append(
            f"                and at most {plan.oldest_groups} of a step's {plan.groups_per_step} groups "
            f"have lag {lag}"
        )
    if (floor := staleness.ess_floor) is not None:
        lines.append(
            f"                less while a step's effective sample size is below {floor:.0%} of its size"
        )
    if staleness.straggler != "wait" and lag > 0:
        what = {
            "drop": "given up",
            "regenerate": "generated again with newer weights",
            "mask": "trained later without its tokens that are too old by then",
        }[staleness.straggler]
        lines.append(f"                an unfinished group that holds up a step is {what}")

    every = "every step" if sync.every == 1 else f"every {sync.every} steps"
    if knobs.custom_stages:
        lines.append(f"custom stages   {', '.join(knobs.custom_stages)}")
    lines += [
        f"training        {describe_training(config, plan.train_devices)}",
        f"engine          {_ENGINES.get(engine, engine)}{_version(plan)}, {_parallel(plan)}",
        *_adapters(plan),
        f"weights         updated {every}; requests in flight during an update: {sync.in_flight_policy}",
        f"                staged {_STAGED[plan.load_staging]}{_DELTA if sync.delta else ''}",
        f"validation      {_validation(config, knobs)}",
        f"old log-probs   {_OLD_LOGP[plan.old_logp]}{_reader(plan)}",
        f"loss            {plan.loss}",
        *(f"{'' if i else 'distillation':16}{text}" for i, text in enumerate(describe_teachers(config))),
        f"correction      {plan.correction}",
        *_devices(plan),
        f"step            {plan.groups_per_step} prompts x {plan.responses_per_group} responses = "
        f"{plan.groups_per_step * plan.responses_per_group} samples in "
        f"{_count(plan.mini_batches_per_step, 'mini-batch', 'mini-batches')}; "
        f"{plan.responses_per_mini_batch_and_rank:g} per mini-batch and training rank{_padding(plan)}",
        f"in flight       at most {plan.groups_at_once} groups = {plan.responses_at_once} responses, for "
        f"{plan.engine_slots} engine slots{_slots(plan)}",
        *_redundancy(plan),
        f"sample store    at most {plan.store.rows} rows{_capacity(plan)}{_store_memory(plan)}",
        *(f"{'' if i else 'episodes':16}{text}" for i, text in enumerate(plan.episodes)),
        f"host memory     {_size(plan.arena_bytes, _unknown(plan))} for two copies of the "
        f"{'adapters' if publishes_adapters(config) else 'weights'} on the trainer's node",
    ]
    if plan.spare_bytes is None or plan.spare_bytes > 0:
        lines.append(f"device memory   {_size(plan.spare_bytes)} on each rollout device for a standby copy")
    return lines


_ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "diffusers": "diffusers"}
_STAGED = {
    "host": "in host memory; an engine copies them between two of its steps",
    "device": "on the devices during generation; an engine exchanges them between two of its steps",
}
_DELTA = "; other hosts get differences where they are smaller"


def _reader(plan: Plan) -> str:
    """Name what needs a forward pass for old log-probs, if the default would do without."""
    if plan.old_logp != "trainer" or plan.knobs.training.old_logp != "auto":
        return ""
    reader = read_before_update(plan.config)
    return "" if reader is None else f", by a separate forward pass ({reader})"


_OLD_LOGP = {
    "update": "of version s-1, by the forward pass of the update itself",
    "trainer": "step s uses version s-1, the trainer's policy before the step",
    "logp_pool": "step s uses version s-2 (or the last weight update before it), computed during step s-1",
    "rollout": "recorded by the engines during generation; none are computed",
}


def _version(plan: Plan) -> str:
    return "" if plan.engine_version is None else f" {plan.engine_version}"


def _parallel(plan: Plan) -> str:
    size, pool = plan.tensor_parallel, plan.placement.pool_of("generate")
    if size == 1 or pool is None:
        return "one device for each replica"
    nodes = -(-size // max(pool.per_node))
    return f"tensor parallelism over {size} devices" + (f" of {nodes} nodes" if nodes > 1 else "")


def _adapters(plan: Plan) -> Iterator[str]:
    rank = adapter_rank(plan.config)
    if not rank:
        return
    published = (
        "published alone; the engine reads their base from the model's files"
        if publishes_adapters(plan.config)
        else "merged, and whole weights are published"
    )
    yield f"adapters        LoRA of rank {rank}, {published}"


def _devices(plan: Plan) -> Iterator[str]:
    head, *lines = drawing(plan.placement)
    yield f"devices         {head}"
    yield from (f"                {line}" for line in lines)
    yield (
        f"                generate: {_count(plan.replicas, 'replica')} of "
        f"{_count(plan.tensor_parallel, 'device')}; train also gathers the weights"
    )
    if plan.reward_model_devices:
        yield (
            f"                and {plan.reward_model_devices} more for the reward model, which scores during "
            "generation"
        )


def _redundancy(plan: Plan) -> Iterator[str]:
    if more := plan.knobs.agentic.redundancy:
        yield (
            f"redundancy      {plan.responses_per_group + more} responses are begun for each group; the "
            f"first {plan.responses_per_group} to finish are trained, which favours short ones"
        )


def _padding(plan: Plan) -> str:
    return f"; the last is padded with {plan.padding_per_step} empty samples" if plan.padding_per_step else ""


def _capacity(plan: Plan) -> str:
    capacity = plan.store.capacity
    return "" if capacity is None else f" of {capacity}"


def _store_memory(plan: Plan) -> str:
    nbytes = plan.store.nbytes
    return "" if nbytes is None else f"; {_size(nbytes)} of host memory if all have their full length"


def _count(number: int, singular: str, plural: str = "") -> str:
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def _slots(plan: Plan) -> str:
    if plan.responses_at_once > plan.engine_slots:
        return (
            f"; the others wait, up to {plan.open_requests} open requests on a replica in its queue, more in "
            "the workers (rollout.max_open_requests)"
        )
    return ""


def _unknown(plan: Plan) -> str:
    """Return why the size of a version is not known."""
    if plan.parameters is None:
        return "the model is not on this machine"
    return "adapters of a mixture of experts are not counted"


def _size(nbytes: int | None, unknown: str = "the model is not on this machine") -> str:
    if nbytes is None:
        return f"(unknown: {unknown})"
    for unit, scale in (("GB", 10**9), ("MB", 10**6)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes / 1000:.1f} kB"


def drawing(placement: Placement) -> list[str]:
    """Draw stages down and devices across, with a mark where a stage computes. Returns lines."""
    total = placement.devices
    scale = max(1, -(-total // 64))
    names = [role for pool in placement.pools for role in pool.roles]
    width = max(len("device"), *(len(name) for name in names))

    lines, at = [], 0
    last = f"{total - 1}"
    ruler = "0" + " " * max(0, -(-total // scale) - 1 - len(last)) + (last if total > 1 else "")
    lines.append(f"{'device':<{width}}  {ruler}" + (f"   (one mark is {scale} devices)" if scale > 1 else ""))

    for pool in placement.pools:
        before, marks = at // scale, max(1, (at + pool.devices) // scale - at // scale)
        for role in pool.roles:
            lines.append(f"{role:<{width}}  {' ' * before}{'#' * marks}")
        at += pool.devices
    return lines
