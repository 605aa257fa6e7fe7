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
from functools import partial
from typing import Any

from ...errors import ConfigError
from ..paths import select
from ..placement import Placement, Pool
from .divisibility import OTHERS, check_divides, divisor_below
from .refusals import check_all, positive

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
_OF_LOGP = "log_prob_max_token_len_per_gpu", "log_prob_micro_batch_size_per_gpu"
MICRO_BATCHES = {
    "train": (DYNAMIC, ACTOR, "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu"),
    "logp": (DYNAMIC, ROLLOUT, *_OF_LOGP),
    "ref_logp": (f"{REF}.log_prob_use_dynamic_bsz", REF, *_OF_LOGP),
    "critic": (
        f"{CRITIC}.use_dynamic_bsz",
        CRITIC,
        "ppo_infer_max_token_len_per_gpu",
        "ppo_micro_batch_size_per_gpu",
    ),
}
"""Of each stage: whether its micro-batches are packed by tokens, and in which section their sizes are."""


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

    Raises ConfigError with everything that is wrong with the sizes of this resolved verl config.
    """
    engines = dict(_engines(config, placement))
    ranks = {role: of for role, (of, _, _) in engines.items()}
    rows: dict[str, tuple[int, str]] = {}
    fitted: dict[str, tuple[int, str]] = {}

    def divide() -> None:
        faults = (fault for engine in engines.values() for fault in _faults_of_mesh(config, *engine))
        if problems := dict.fromkeys(faults):
            raise ConfigError(*problems)
        _check_mini_batches(config, ranks)
        rows.update(_rows(config, ranks))

    def fit(role: str) -> None:
        fitted.update(_fit_micro_batch(config, role, rows.get(role)))

    check_all(
        divide,
        partial(_check_packing, config),
        *(partial(_check_tokens, config, role, of) for role, of in ranks.items()),
        # Without a stage for log-probs, verl asks for their size and does not use it.
        *(partial(fit, role) for role in dict.fromkeys(("train", "logp", *ranks))),
    )
    return fitted


def check_sizes_alone(config: Mapping[str, Any]) -> None:
    """Check the sizes that are wrong on any devices, where wrong devices hid the rest.

    Raises ConfigError.
    """
    batch, path = select(config, BATCH), f"{ACTOR}.ppo_mini_batch_size"

    def check_mini_batch() -> None:
        size = select(config, path)
        if positive(size) and positive(batch) and size > batch:
            raise ConfigError(
                f"{path} must be at most {BATCH}={batch}, got {size}; lower it, or use larger batches"
            )

    check_all(
        check_mini_batch, *(partial(_fit_micro_batch, config, role, None) for role in ("train", "logp"))
    )


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


def _faults_of_megatron(config: Mapping[str, Any], ranks: Ranks, section: str) -> Iterator[str]:
    """Yield a line if the parallel sizes do not divide the devices, or the experts' sizes do not."""
    devices, pool = ranks.pool.devices, ranks.pool.name
    sizes = f"{section}.{{tensor_model,pipeline_model,context}}_parallel_size"
    if devices % ranks.size:
        yield (
            f"{sizes} must together divide the {devices} devices of pool {pool}, got "
            f"{ranks.size}; reduce them"
        )
        return
    pipeline, tensor, expert = (
        _whole(config, f"{section}.{name}_model_parallel_size", least=1, default=1)
        for name in ("pipeline", "tensor", "expert")
    )
    expert_tensor = _whole(config, f"{section}.expert_tensor_parallel_size", least=1, default=tensor)
    if expert > 1 and devices % (pipeline * expert * expert_tensor):
        yield (
            f"{section}.expert_model_parallel_size x expert_tensor_parallel_size x "
            f"pipeline_model_parallel_size must divide the {devices} devices of pool {pool}, got "
            f"{expert} x {expert_tensor} x {pipeline}; reduce them, e.g. set expert_tensor_parallel_size=1"
        )


def _faults_of_mesh(config: Mapping[str, Any], ranks: Ranks, fsdp: str, model: str) -> Iterator[str]:
    """Yield a line for each reason why verl could not lay out the engine's device meshes."""
    if fsdp.endswith(".megatron"):
        yield from _faults_of_megatron(config, ranks, fsdp)
        return
    devices, sequence = ranks.pool.devices, ranks.sequence
    if devices % sequence:
        yield (
            f"{ranks.sequence_path} must divide the {devices} devices of pool {ranks.pool.name}, got "
            f"{sequence}; set it to {divisor_below(devices, sequence)}"
        )
    elif devices % ranks.size:
        yield (
            f"the parallel sizes of {fsdp} must together divide the {devices} devices of pool "
            f"{ranks.pool.name}, got {ranks.size}; reduce them"
        )
    if sequence > 1 and not select(config, f"{model}.use_remove_padding"):
        yield (
            f"{model}.use_remove_padding must be True with {ranks.sequence_path}={sequence}, got False; "
            "set it"
        )
    path = f"{fsdp}.fsdp_size"
    size = _whole(config, path, default=-1)
    if size == 0 or (0 < size < devices and devices % size):
        yield (
            f"{path} must divide the {devices} devices of pool {ranks.pool.name}, got {size}; set it to -1 "
            f"(all of them) or {divisor_below(devices, size)}"
        )


def _check_mini_batches(config: Mapping[str, Any], ranks: Mapping[str, Ranks]) -> None:
    """Raises ConfigError if a mini-batch is larger than the batch, or does not divide over its ranks."""
    batch, n = int(select(config, BATCH)), int(select(config, f"{ROLLOUT}.n"))
    if n < 1:
        return  # `verl_options` refuses it, and a batch below 1

    def check(section: str, name: str, of: Ranks) -> None:
        path = f"{section}.ppo_mini_batch_size"
        size = int(select(config, path))
        most = batch if batch > 0 else size
        fits = _fitting(config, section, of.number, n, min(size, most), most)
        if size > most:
            less = f"set it to {fits}, or " if fits else ""
            raise ConfigError(f"{path} must be at most {BATCH}={batch}, got {size}; {less}use larger batches")
        what = f"a mini-batch ({name}.ppo_mini_batch_size x rollout.n)"
        check_divides(of.pool, size * n, what, of.size, f"set {path} to {fits}" if fits else "")

    def check_batch(devices: int) -> None:
        fsdp = select(config, f"{ACTOR}.strategy") != "megatron"
        if fsdp and not select(config, DYNAMIC) and batch * n % devices:
            # verl's own check, which knows no sequence parallelism.
            unit = devices // math.gcd(devices, n)
            raise ConfigError(
                f"{BATCH} x {ROLLOUT}.n must be divisible by the {devices} training devices, got "
                f"{batch} x {n} = {batch * n}; set {BATCH} to {-(-batch // unit) * unit}, or {DYNAMIC}=True"
            )

    train, critic = ranks["train"], ranks.get("critic")
    check_all(
        partial(check, ACTOR, "actor", train),
        *([partial(check, CRITIC, "critic", critic)] if critic else []),
        partial(check_batch, train.pool.devices),
    )


def _fitting(config: Mapping[str, Any], section: str, ranks: int, n: int, near: int, most: int) -> int:
    """Return a mini-batch of at most `most` prompts that ranks and their micro-batches divide, or 0."""
    micro = select(config, f"{section}.ppo_micro_batch_size_per_gpu")
    packed = select(config, f"{section}.use_dynamic_bsz")
    whole = micro if isinstance(micro, int) and micro > 0 and not packed else 1
    for rows in (ranks * whole, ranks):
        unit = rows // math.gcd(rows, n)
        if unit <= most:
            return max(near // unit, 1) * unit
    return 0


def _rows(config: Mapping[str, Any], ranks: Mapping[str, Ranks]) -> dict[str, tuple[int, str]]:
    """Return the samples that a rank of each stage splits into micro-batches, and what they are.

    Raises ConfigError if a whole batch cannot be split over the ranks that compute log-probs.
    """
    train = ranks["train"]
    mini = int(select(config, f"{ACTOR}.ppo_mini_batch_size")) * int(select(config, f"{ROLLOUT}.n"))
    rows = mini // train.number
    what = (
        f"the {rows} samples that each rank trains in a mini-batch "
        f"(actor.ppo_mini_batch_size x rollout.n / {train.number} ranks)"
    )
    found = {"train": (rows, what)}
    batches = _batches(config, train, ranks.get("critic"))
    forward = {role: ranks[role] for role in ("logp", "ref_logp") if role in ranks}
    check_all(
        *(
            partial(check_divides, of.pool, samples, f"a batch of {role} ({what})", of.size)
            for role, of in forward.items()
            for samples, what in batches.items()
        )
    )
    for role, of in forward.items():
        rows = math.gcd(*batches) // of.number
        found[role] = (
            rows,
            f"the {rows} samples of a batch on each rank of {role} "
            f"({BATCH} x rollout.n / {of.number} ranks, padded to whole mini-batches)",
        )
    return found


def _check_packing(config: Mapping[str, Any]) -> None:
    logp, dynamic = f"{ROLLOUT}.log_prob_use_dynamic_bsz", bool(select(config, DYNAMIC))
    if bool(select(config, logp)) != dynamic:
        raise ConfigError(
            f"{logp} must equal {DYNAMIC}={dynamic}, got {select(config, logp)!r}; leave it out"
        )


def _fit_micro_batch(
    config: Mapping[str, Any], role: str, samples: tuple[int, str] | None
) -> dict[str, tuple[int, str]]:
    """Raises ConfigError if micro-batches have no size, or cannot divide `samples`, as far as known."""
    dynamic, section, _, name = MICRO_BATCHES[role]
    if select(config, dynamic):
        return {}
    rows, what = samples or (None, "")
    path = f"{section}.{name}"
    size = _require_size(config, path, dynamic, rows)
    return {} if rows is None else _fit(path, size, rows, what)


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


def _check_tokens(config: Mapping[str, Any], role: str, ranks: Ranks) -> None:
    """Raises ConfigError if the longest sequence does not fit into a micro-batch that is packed by tokens."""
    dynamic, section, name, _ = MICRO_BATCHES[role]
    path = f"{section}.{name}"
    default = 32768 if role == "critic" else None
    if default is None and not select(config, dynamic):
        return
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
