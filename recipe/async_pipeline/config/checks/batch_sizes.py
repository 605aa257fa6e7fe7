# SPDX-License-Identifier: Apache-2.0
"""Check that batches divide evenly over data-parallel ranks and into micro-batches, as verl 0.9.1 requires.

verl computes these sizes in its workers, minutes after the start; a wrong one ends the run there.

    batch            data.train_batch_size x rollout.n, padded to whole mini-batches and ranks
    rows of a rank   batch / data-parallel ranks, in micro-batches of a fixed size or of a number of tokens
    ranks            devices of the pool / devices of one rank: with FSDP the Ulysses sequence parallel size
                     (its sharding changes nothing), with Megatron tensor x pipeline x context parallel size

The critic's sizes differ: verl 0.9.1 always packs its micro-batches by tokens. Pure arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError
from ..paths import select
from ..placement import Placement, Pool
from .divisibility import check_divides, divisor_below
from .training_engine import OTHERS

ACTOR, REF, ROLLOUT, CRITIC = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.ref",
    "actor_rollout_ref.rollout",
    "critic",
)
BATCH = "data.train_batch_size"
DYNAMIC = f"{ACTOR}.use_dynamic_bsz"
_OF_ACTOR = f"{ACTOR}.ulysses_sequence_parallel_size", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"
"""The deprecated and the present key."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The data-parallel ranks of one engine."""

    pool: Pool
    sequence_path: str
    """The key of `sequence`."""
    sequence: int
    """Devices that share one sequence (Ulysses, context parallelism)."""
    model: int = 1
    """Devices that each hold a part of the model and see whole sequences (Megatron)."""

    @property
    def size(self) -> int:
        """Devices of one data-parallel rank."""
        return self.sequence * self.model

    @property
    def number(self) -> int:
        return self.pool.devices // self.size


def fit_batch_sizes(config: Mapping[str, Any], placement: Placement) -> dict[str, tuple[int, str]]:
    """Return a smaller micro-batch, which changes no result, for each that does not divide its samples, with
    why.

    Raises ConfigError if a batch or a mini-batch of this resolved verl config cannot be divided.
    """
    engines = dict(_engines(config, placement))
    for ranks, prefix, model in engines.values():
        _check_mesh(config, ranks, prefix, model)

    train, critic = engines["train"][0], engines["critic"][0] if "critic" in engines else None
    _check_mini_batches(config, train, critic)
    fitted = _fit_training(config, train)

    batches = _batches(config, train, critic)
    if "logp" in engines:
        fitted |= _fit_forward(config, "logp", ROLLOUT, engines["logp"][0], batches)
    elif not select(config, DYNAMIC):
        # verl asks for the size and does not use it.
        _require_size(config, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", DYNAMIC)
    if "ref_logp" in engines:
        fitted |= _fit_forward(config, "ref_logp", REF, engines["ref_logp"][0], batches)
    if critic is not None:
        _check_critic(config, critic)
    return fitted


def _engines(config: Mapping[str, Any], placement: Placement) -> Iterator[tuple[str, tuple[Ranks, str, str]]]:
    """Yield stages that compute on devices, with their ranks, FSDP section and model section."""
    ref = (f"{REF}.ulysses_sequence_parallel_size", f"{REF}.fsdp_config.ulysses_sequence_parallel_size")
    critic = f"{CRITIC}.fsdp.ulysses_sequence_parallel_size"
    actor, policy = _OF_ACTOR, "actor_rollout_ref.model"

    logp = actor, f"{ACTOR}.fsdp_config"
    if placement.own_pool_of("logp") is not None:
        # Workers of a pool for logp take verl's settings of the reference, with the actor's sizes.
        logp = (ref[0], actor[1]), f"{REF}.fsdp_config"
    for role, (deprecated, path), fsdp, model in (
        ("train", actor, f"{ACTOR}.fsdp_config", policy),
        ("logp", *logp, policy),
        ("ref_logp", ref, f"{REF}.fsdp_config", policy),
        ("critic", (critic, critic), f"{CRITIC}.fsdp", f"{CRITIC}.model"),
    ):
        pool = placement.pool_of(role)
        if pool is None:
            continue
        # A pool for logp has the actor's engine.
        section = ACTOR if role == "logp" else fsdp.rpartition(".")[0]
        engine = str(select(config, f"{section}.strategy"))
        prefix = f"{section}.{engine}" if engine in ("megatron", *OTHERS) else fsdp
        yield role, (_ranks(config, pool, section, (deprecated, path)), prefix, model)


def training_ranks(config: Mapping[str, Any], devices: int) -> Ranks:
    """Return the ranks of the engine that trains the policy on this many devices."""
    return _ranks(config, Pool("train", ("train",), (devices,)), ACTOR, _OF_ACTOR)


def _ranks(config: Mapping[str, Any], pool: Pool, section: str, ulysses: tuple[str, str]) -> Ranks:
    engine = str(select(config, f"{section}.strategy"))
    if engine == "megatron":
        return _megatron_ranks(config, pool, f"{section}.megatron")
    if engine in OTHERS:
        first, *others = (f"{section}.{path}" for path in OTHERS[engine])
        sizes = [_whole(config, path, least=1, default=1) for path in others]
        sequence = _whole(config, first, least=1, default=1)
        return Ranks(pool=pool, sequence_path=first, sequence=sequence, model=math.prod(sizes))
    # verl lets the deprecated key win where it is above 1.
    deprecated, path = ulysses
    at = deprecated if _whole(config, deprecated, least=1, default=1) > 1 else path
    return Ranks(pool=pool, sequence_path=at, sequence=_whole(config, at, least=1, default=1))


def _megatron_ranks(config: Mapping[str, Any], pool: Pool, section: str) -> Ranks:
    tensor, pipeline = (
        _whole(config, f"{section}.{name}_model_parallel_size", least=1, default=1)
        for name in ("tensor", "pipeline")
    )
    path = f"{section}.context_parallel_size"
    context = _whole(config, path, least=1, default=1)
    return Ranks(pool=pool, sequence_path=path, sequence=context, model=tensor * pipeline)


def _check_megatron_mesh(config: Mapping[str, Any], ranks: Ranks, section: str) -> None:
    """Raises ConfigError if the parallel sizes do not divide the devices, or the experts' sizes do not."""
    devices, pool = ranks.pool.devices, ranks.pool.name
    sizes = f"{section}.{{tensor_model,pipeline_model,context}}_parallel_size"
    if devices % ranks.size:
        raise ConfigError(
            f"{sizes} must together divide the {devices} devices of pool {pool}, got "
            f"{ranks.size}; reduce them"
        )
    pipeline, tensor, expert = (
        _whole(config, f"{section}.{name}_model_parallel_size", least=1, default=1)
        for name in ("pipeline", "tensor", "expert")
    )
    expert_tensor = _whole(config, f"{section}.expert_tensor_parallel_size", least=1, default=tensor)
    if expert > 1 and devices % (pipeline * expert * expert_tensor):
        raise ConfigError(
            f"{section}.expert_model_parallel_size x expert_tensor_parallel_size x "
            f"pipeline_model_parallel_size must divide the {devices} devices of pool {pool}, got "
            f"{expert} x {expert_tensor} x {pipeline}; reduce them, e.g. set expert_tensor_parallel_size=1"
        )


def _check_mesh(config: Mapping[str, Any], ranks: Ranks, fsdp: str, model: str) -> None:
    """Raises ConfigError if verl could not lay out the engine's device meshes."""
    if fsdp.endswith(".megatron"):
        _check_megatron_mesh(config, ranks, fsdp)
        return
    devices, sequence = ranks.pool.devices, ranks.sequence
    if devices % sequence:
        raise ConfigError(
            f"{ranks.sequence_path} must divide the {devices} devices of pool {ranks.pool.name}, got "
            f"{sequence}; set it to {divisor_below(devices, sequence)}"
        )
    if devices % ranks.size:
        raise ConfigError(
            f"the parallel sizes of {fsdp} must together divide the {devices} devices of pool "
            f"{ranks.pool.name}, got {ranks.size}; reduce them"
        )
    if sequence > 1 and not select(config, f"{model}.use_remove_padding"):
        raise ConfigError(
            f"{model}.use_remove_padding must be True with {ranks.sequence_path}={sequence}, got False; "
            "set it"
        )
    path = f"{fsdp}.fsdp_size"
    size = _whole(config, path, default=-1)
    if size == 0 or (0 < size < devices and devices % size):
        raise ConfigError(
            f"{path} must divide the {devices} devices of pool {ranks.pool.name}, got {size}; set it to -1 "
            f"(all of them) or {divisor_below(devices, size)}"
        )


def _check_mini_batches(config: Mapping[str, Any], train: Ranks, critic: Ranks | None) -> None:
    """Raises ConfigError if a mini-batch is larger than the batch, or does not divide over its ranks."""
    batch, n = int(select(config, BATCH)), int(select(config, f"{ROLLOUT}.n"))
    sections = [(ACTOR, train, "actor")] + ([(CRITIC, critic, "critic")] if critic else [])
    for section, _, _ in sections:
        path = f"{section}.ppo_mini_batch_size"
        if (size := int(select(config, path))) > batch:
            raise ConfigError(
                f"{path} must be at most {BATCH}={batch}, got {size}; set it to {batch}, or use larger "
                "batches"
            )
    for section, ranks, name in sections:
        samples = int(select(config, f"{section}.ppo_mini_batch_size")) * n
        check_divides(
            ranks.pool, samples, f"a mini-batch ({name}.ppo_mini_batch_size x rollout.n)", ranks.size
        )
    fsdp = select(config, f"{ACTOR}.strategy") != "megatron"
    if fsdp and not select(config, DYNAMIC) and batch * n % train.pool.devices:
        # verl's own check, which knows no sequence parallelism.
        unit = train.pool.devices // math.gcd(train.pool.devices, n)
        raise ConfigError(
            f"{BATCH} x {ROLLOUT}.n must be divisible by the {train.pool.devices} training devices, got "
            f"{batch} x {n} = {batch * n}; set {BATCH} to {-(-batch // unit) * unit}, or {DYNAMIC}=True"
        )


def _fit_training(config: Mapping[str, Any], train: Ranks) -> dict[str, tuple[int, str]]:
    """Raises ConfigError if a mini-batch of a training rank cannot be split into micro-batches."""
    fitted: dict[str, tuple[int, str]] = {}
    if select(config, DYNAMIC):
        _check_tokens(config, f"{ACTOR}.ppo_max_token_len_per_gpu", train)
    else:
        mini = int(select(config, f"{ACTOR}.ppo_mini_batch_size")) * int(select(config, f"{ROLLOUT}.n"))
        rows = mini // train.number
        path = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
        size = _require_size(config, path, DYNAMIC, rows)
        what = (
            f"the {rows} samples that each rank trains in a mini-batch "
            f"(actor.ppo_mini_batch_size x rollout.n / {train.number} ranks)"
        )
        fitted = _fit(path, size, rows, what)
    logp = f"{ROLLOUT}.log_prob_use_dynamic_bsz"
    dynamic = bool(select(config, DYNAMIC))
    if bool(select(config, logp)) != dynamic:
        raise ConfigError(
            f"{logp} must equal {DYNAMIC}={dynamic}, got {select(config, logp)!r}; leave it out"
        )
    return fitted


def _fit(path: str, size: int, rows: int, what: str) -> dict[str, tuple[int, str]]:
    """Return the largest micro-batch that divides `rows`, if `size` does not and is not twice as large.

    Raises ConfigError if it is; so small a micro-batch may be much slower than the user expects.
    """
    fits = divisor_below(rows, min(size, rows))
    if fits == size:
        return {}
    if min(size, rows) > 2 * fits:
        raise ConfigError(f"{path} must divide {what}, got {size}; use {DYNAMIC}=True, or set it to {fits}")
    return {path: (fits, f"{size} does not divide {what}")}


def _fit_forward(
    config: Mapping[str, Any], role: str, prefix: str, ranks: Ranks, batches: Mapping[int, str]
) -> dict[str, tuple[int, str]]:
    """Raises ConfigError if a whole batch cannot be split over the ranks that compute log-probs."""
    for samples, what in batches.items():
        check_divides(ranks.pool, samples, f"a batch of {role} ({what})", ranks.size)
    if select(config, f"{prefix}.log_prob_use_dynamic_bsz"):
        _check_tokens(config, f"{prefix}.log_prob_max_token_len_per_gpu", ranks)
        return {}
    rows = math.gcd(*batches) // ranks.number
    path = f"{prefix}.log_prob_micro_batch_size_per_gpu"
    size = _require_size(config, path, f"{prefix}.log_prob_use_dynamic_bsz", rows)
    what = (
        f"the {rows} samples of a batch on each rank of {role} "
        f"({BATCH} x rollout.n / {ranks.number} ranks, padded to whole mini-batches)"
    )
    return _fit(path, size, rows, what)


def _batches(config: Mapping[str, Any], train: Ranks, critic: Ranks | None) -> dict[int, str]:
    """Return the samples of a batch as verl pads it, with the formula; there are two with `critic_warmup`."""
    n = int(select(config, f"{ROLLOUT}.n"))
    samples = int(select(config, BATCH)) * n
    unit = train.number
    if critic is not None:
        unit = math.lcm(unit, int(select(config, f"{CRITIC}.ppo_mini_batch_size")) * n)
    both = math.lcm(unit, int(select(config, f"{ACTOR}.ppo_mini_batch_size")) * n)
    what = "data.train_batch_size x rollout.n"
    # Steps that train only the critic are not padded to the actor's mini-batches.
    units = [unit, both] if int(select(config, "trainer.critic_warmup") or 0) > 1 else [both]
    padded = (-(-samples // unit) * unit for unit in units)
    return {size: what if size == samples else f"{what}, padded to mini-batches" for size in padded}


def _check_critic(config: Mapping[str, Any], critic: Ranks) -> None:
    """Raises ConfigError if verl would refuse the critic's settings."""
    if not select(config, f"{CRITIC}.use_dynamic_bsz"):
        # As above.
        _require_size(config, f"{CRITIC}.ppo_micro_batch_size_per_gpu", f"{CRITIC}.use_dynamic_bsz")
    _check_tokens(config, f"{CRITIC}.ppo_infer_max_token_len_per_gpu", critic, default=32768)


def _check_tokens(config: Mapping[str, Any], path: str, ranks: Ranks, default: int | None = None) -> None:
    """Raises ConfigError if the longest sequence does not fit into a micro-batch."""
    most = _whole(config, path, least=1, default=default) * ranks.sequence
    longest = sum(_whole(config, f"{ROLLOUT}.{name}_length", least=1) for name in ("prompt", "response"))
    if most < longest:
        times = "" if ranks.sequence == 1 else f" x {ranks.sequence_path}={ranks.sequence}"
        raise ConfigError(
            f"{path}{times} must be at least the longest sequence, {longest} tokens "
            f"({ROLLOUT}.prompt_length + response_length), got {most}; set it to "
            f"{-(-longest // ranks.sequence)}"
        )


def _require_size(config: Mapping[str, Any], path: str, dynamic: str, rows: int | None = None) -> int:
    """Return a micro-batch size. Raises ConfigError if it is missing; `rows` is what it must divide."""
    value = select(config, path)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        example = "" if rows is None else f" to a divisor of {rows}, the samples of a rank"
        raise ConfigError(f"{path} must be >= 1, got {value!r}; set it{example}, or {dynamic}=True")
    return value


def _whole(
    config: Mapping[str, Any], path: str, *, least: int | None = None, default: int | None = None
) -> int:
    value = select(config, path)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        bound = "a whole number" if least is None else f">= {least}"
        raise ConfigError(f"{path} must be {bound}, got {value!r}; correct it")
    return value
