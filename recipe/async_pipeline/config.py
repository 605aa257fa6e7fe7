# SPDX-License-Identifier: Apache-2.0
"""Reads our keys out of a verl config once, checks them, and translates those of other systems.

Pure: takes plain mappings, imports neither verl nor ray. Every complaint is one line:
path, rule, value, remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import ConfigError
from .loss_names import LOSS_OF_VARIANT

OWN = "trainer.v1.async_pipeline"
SWITCHES = ("async_pipeline", "actor_rollout_ref.async_pipeline")
STRATEGY_LAG: Mapping[str, int | None] = {"on_policy": 0, "one_step_off": 1, "n_step_ahead": None, "fully_async": None}
"""Strategies by name, with the lag that they imply; None: `max_lag` says."""
STRATEGY_ALIASES = {"naive": "on_policy"}
DEFAULT_STRATEGY = "one_step_off"
IN_FLIGHT = ("keep", "abort", "drain")
"""What may become of requests in flight when a replica loads; see `weight_sync.versioned_engine`."""
STAGES = ("host", "device")
"""Where a version waits for its load; see `weight_sync.spare`."""
STALE = ("wait", "resume", "drop")
"""What may become of a group that holds a step up; see `core.message_queue`."""
DEFAULT_AHEAD = 3
"""max_lag of n_step_ahead and fully_async when nothing names one."""


@dataclass(frozen=True, kw_only=True)
class AsyncPipelineConfig:
    """The knobs of the pipeline, under `trainer.v1.async_pipeline`."""

    strategy: str = DEFAULT_STRATEGY
    """on_policy, one_step_off, n_step_ahead, fully_async, or `module:Class` of one's own."""
    max_lag: int = 1
    """Hard bound: versions that a trajectory may be older than the trainer. Implied by the first two."""
    depth: int | None = None
    """Batches that may be on their way beside the one that trains; default max_lag. Less leaves time for stragglers."""
    oldest_share: float = 1.0
    """Share of each batch that may have the full max_lag; the rest is at least one version younger."""
    stale: str = "wait"
    """An unfinished group that holds a step up: wait for it, resume (answer it again with newer weights), or drop it."""
    single_mini_batch: bool = False
    """One optimizer update a step, over the whole batch; else one for each `actor.ppo_mini_batch_size` prompts."""
    sync_every: int = 1
    """Optimizer steps from one publication of weights to the next; versions count steps all the same."""
    wait_timeout_s: float = 1800.0
    """Deadline of each wait of a role for items, room, a lease or a version."""
    publish_timeout_s: float = 600.0
    """Deadline for one replica to load and prove one version."""
    proof_tensors: int = 16
    """Tensors compared with the trainer's after each load; a rotating sample covers all in turn."""
    preduce_bucket_size_mb: int = 512
    """Size of the host buckets that the trainer gathers into."""
    consume_bucket_size_mb: int = 128
    """Bytes that a replica loads at a time; bounds the extra device memory of a load."""
    in_flight: str = "keep"
    """Requests being answered when a replica loads: keep (go on), abort (start again from what they have), drain."""
    stage: str = "host"
    """device: copy a version to the replica's devices first, beside generation; costs the weights' memory there."""
    reuse_prefixes: bool = False
    """New requests may hit prefixes that earlier versions cached, so their answers mix versions unseen."""
    run_dir: str | None = None
    """Where events, metrics and the summary go; default outputs/<project_name>/<experiment_name>."""
    custom_roles: tuple[str, ...] = ()
    """Roles of one's own to insert, each as `module:Class@after->before`."""

    def __post_init__(self) -> None:
        _require(self.max_lag >= 0, "max_lag", "must be >= 0", self.max_lag, "use 0 for on-policy")
        for name in ("wait_timeout_s", "publish_timeout_s"):
            value = getattr(self, name)
            _require(value > 0, name, "must be > 0 seconds", value, "leave it out for the default")
        for name in ("sync_every", "proof_tensors", "preduce_bucket_size_mb", "consume_bucket_size_mb"):
            value = getattr(self, name)
            _require(value >= 1, name, "must be >= 1", value, "leave it out for the default")
        for name, choices in (("in_flight", IN_FLIGHT), ("stage", STAGES), ("stale", STALE)):
            value = getattr(self, name)
            _require(value in choices, name, f"must be one of {', '.join(choices)}", value, f"{choices[0]} is the default")
        for spec in self.custom_roles:
            ok = spec.count("@") == 1 and spec.count("->") == 1 and ":" in spec.split("@")[0]
            _require(ok, "custom_roles", "entries must read module:Class@after->before", spec, "see the README")
        self._check_ages()
        implied = STRATEGY_LAG.get(self.strategy)
        if implied is not None and implied != self.max_lag:
            raise ConfigError(
                f"{OWN}.max_lag must be {implied} with strategy {self.strategy}, got {self.max_lag}; "
                "use strategy n_step_ahead for another lag"
            )

    def _check_ages(self) -> None:
        share = self.oldest_share
        if self.depth is not None:
            ok = 0 <= self.depth <= self.max_lag
            _require(ok, "depth", f"must be from 0 to max_lag, {self.max_lag}", self.depth, "leave it out for max_lag")
        _require(0 < share <= 1, "oldest_share", "must be above 0 and at most 1", share, "1 is the default")
        if self.max_lag == 0:
            _require(share == 1, "oldest_share", "must be 1 with max_lag 0", share, "leave it out, or raise max_lag")
        depth = self.max_lag if self.depth is None else self.depth
        longest = depth + (share == 1)
        _require(
            self.sync_every <= longest,
            "sync_every",
            f"must be at most {longest} with a depth of {depth} and oldest_share {share:g}, or prompts would wait for "
            "weights that wait for them",
            self.sync_every,
            f"set max_lag (and depth) to {self.sync_every - (share == 1)} or more",
        )


@dataclass(frozen=True)
class Translation:
    """The resolved config and one line for each key of another system that shaped it."""

    config: AsyncPipelineConfig
    notes: tuple[str, ...]
    foreign_paths: tuple[str, ...]
    """Paths in the verl config that verl itself does not know and that must be removed."""
    verl: Mapping[str, Any] = field(default_factory=dict)
    """What keys of verl's own get, by their paths."""


@dataclass(frozen=True)
class ForeignKey:
    """A key of another system: where it may stand and what it says here."""

    paths: tuple[str, ...]
    apply: Callable[[Any, _Draft], str]
    supported: bool = True


@dataclass
class _Draft:
    """Values proposed so far, each with the key that proposed it."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def propose(self, name: str, value: Any, source: str) -> None:
        """Raises ConfigError: another key said something else."""
        if name in self.values and self.values[name] != value:
            raise ConfigError(
                f"{source} asks for {name}={value} but {self.sources[name]} for {self.values[name]}; keep one of them"
            )
        self.values[name] = value
        self.sources.setdefault(name, source)


def is_enabled(raw: Mapping[str, Any]) -> bool:
    """Does this config ask for the pipeline? Raises ConfigError: the switch is not a boolean, or they disagree."""
    found = {path: value for path in SWITCHES if (value := select(raw, path)) is not None}
    for path, value in found.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{path} must be True or False, got {value!r}; the knobs live under {OWN}")
    if len(set(found.values())) > 1:
        raise ConfigError(f"{' and '.join(found)} disagree; keep one of them")
    return any(found.values())


def resolve(raw: Mapping[str, Any]) -> Translation:
    """The pipeline's config out of a whole verl config. Raises ConfigError."""
    _reject_misplaced(raw)
    own = _own_section(raw)
    _reject_unknown(own)
    draft, notes = _Draft(), []
    for name in ("strategy", "max_lag"):
        if own.get(name) is not None:
            value = canonical_strategy(own.pop(name), f"{OWN}.strategy") if name == "strategy" else own.pop(name)
            draft.propose(name, value, f"{OWN}.{name}")
        else:
            own.pop(name, None)
    foreign = []
    for key in FOREIGN:
        for path in key.paths:
            value = select(raw, path)
            if value is not None:
                foreign.append(path)
                notes.append(f"{path}={value} -> {key.apply(value, draft)}")
    notes += _quota(draft)
    _adopt(own, draft)
    own["strategy"], own["max_lag"] = _strategy_and_lag(draft)
    own = {k: v for k, v in own.items() if v is not None}
    _check_types(own)
    if "custom_roles" in own:
        own["custom_roles"] = tuple(own["custom_roles"])
    return Translation(AsyncPipelineConfig(**own), tuple(notes), (*SWITCHES, *foreign), _verls_own(raw, draft))


def _verls_own(raw: Mapping[str, Any], draft: _Draft) -> dict[str, Any]:
    """Raises ConfigError: verl's own key names another loss."""
    own, found = _own_section(raw), {}
    batches, batch = draft.values.get("require_batches"), select(raw, _BATCH)
    if batches is not None:
        batch = found[_BATCH] = batches * int(select(raw, _MINI_BATCH) or 1)
    if own.get("single_mini_batch") is True:
        if batches not in (None, 1):
            raise ConfigError(
                f"{OWN}.single_mini_batch=True is one mini-batch a step, but {draft.sources['require_batches']} asks for "
                f"{batches}; keep one of them"
            )
        found[_MINI_BATCH] = batch
    return found | _loss(raw, draft)


def _loss(raw: Mapping[str, Any], draft: _Draft) -> dict[str, Any]:
    mode = draft.values.get("loss_mode")
    if mode is None:
        return {}
    own = select(raw, f"{_POLICY_LOSS}.loss_mode")
    if own not in (None, "vanilla", mode):
        raise ConfigError(
            f"{draft.sources['loss_mode']} asks for the loss {mode} but {_POLICY_LOSS}.loss_mode for {own}; keep one of them"
        )
    # ROLL's default, where verl has none.
    tau = {f"{_POLICY_LOSS}.dro_beta": 0.1} if mode == "dro" and not select(raw, f"{_POLICY_LOSS}.dro_beta") else {}
    return {f"{_POLICY_LOSS}.loss_mode": mode, **tau}


def _adopt(own: dict[str, Any], draft: _Draft) -> None:
    """Take over what keys of other systems say. Raises ConfigError: our own key says something else.

    A value that is the default may have come from our own file instead of from the user, so it gives way.
    """
    defaults = {f.name: f.default for f in dataclasses.fields(AsyncPipelineConfig)}
    for name, value in draft.values.items():
        if name in defaults and name not in ("strategy", "max_lag"):
            if own.get(name) not in (None, defaults[name], value):
                raise ConfigError(
                    f"{draft.sources[name]} asks for {name}={value} but {OWN}.{name} for {own[name]}; keep one of them"
                )
            own[name] = value


def canonical_strategy(value: Any, path: str) -> str:
    """`one-step-off` and `naive` in our spelling. Raises ConfigError: no such strategy."""
    text = str(value)
    if ":" in text:
        return text
    name = text.replace("-", "_").lower()
    name = STRATEGY_ALIASES.get(name, name)
    if name not in STRATEGY_LAG:
        raise ConfigError(
            f"{path} must be one of {', '.join(STRATEGY_LAG)} or module:Class, got {text!r}{_hint(name, STRATEGY_LAG)}"
        )
    return name


def is_strategy(name: str) -> bool:
    """Is this trainer mode one of ours or, written `module:Class`, somebody's own?"""
    return name in STRATEGY_LAG or ":" in name


def select(raw: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, or None."""
    node: Any = raw
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return None
        node = node[part]
    return node


def _own_section(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of what stands under `trainer.v1.async_pipeline`. Raises ConfigError: it is not a section."""
    own = select(raw, OWN)
    if own is not None and not isinstance(own, Mapping):
        raise ConfigError(f"{OWN} must be a section of knobs, got {own!r}; the switch is +async_pipeline=True")
    return dict(own or {})


def _strategy_and_lag(draft: _Draft) -> tuple[str, int]:
    strategy, lag = draft.values.get("strategy"), draft.values.get("max_lag")
    if lag is not None and (isinstance(lag, bool) or not isinstance(lag, int)):
        raise ConfigError(f"{draft.sources['max_lag']} must be a whole number, got {lag!r}; use 0 for on-policy")
    if strategy is None:
        whole = draft.values.get("oldest_share", 1) == 1
        by_lag = {0: "on_policy", 1: "one_step_off"} if whole else {}
        strategy = DEFAULT_STRATEGY if lag is None else by_lag.get(lag, "n_step_ahead")
    implied = STRATEGY_LAG.get(strategy)
    if implied is not None and lag is not None and implied != lag:
        raise ConfigError(
            f"{draft.sources['strategy']}={strategy} means max_lag {implied} but {draft.sources['max_lag']} asks for "
            f"{lag}; use n_step_ahead for another lag or drop one of the two"
        )
    if lag is None:
        lag = DEFAULT_AHEAD if implied is None else implied
    return strategy, lag


def _generate_ahead(value: Any, draft: _Draft) -> str:
    path = "trainer.generate_ahead_steps"
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{path} must be a whole number >= 1, got {value!r}; 1 is on-policy, 2 is one-step-off")
    draft.propose("max_lag", value - 1, path)
    return f"max_lag={value - 1}"


def _generation_ratio(value: Any, draft: _Draft) -> str:
    path = "async_generation_ratio"
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"{path} must be a number >= 0, got {value!r}; 0 is on-policy, 1 is one batch ahead")
    return _propose_lag(float(value), draft, path)


def _propose_lag(batches_ahead: float, draft: _Draft, path: str) -> str:
    """A fraction lets that share of a batch be one version older."""
    whole, share = divmod(round(batches_ahead, 9), 1)
    if share == 0:
        draft.propose("max_lag", int(whole), path)
        return f"max_lag={int(whole)}"
    draft.propose("max_lag", int(whole) + 1, path)
    draft.propose("oldest_share", share, path)
    return f"max_lag={int(whole) + 1}, oldest_share={share:g}"


def _quota_key(path: str, name: str, least: float, *, whole: bool) -> Callable[[Any, _Draft], str]:
    def apply(value: Any, draft: _Draft) -> str:
        number = isinstance(value, int) or (isinstance(value, float) and not whole)
        if isinstance(value, bool) or not number or not least <= value < math.inf:
            what = "a whole number" if whole else "a number"
            raise ConfigError(f"{path} must be {what} >= {least}, got {value!r}; it belongs to fully_async")
        draft.propose(name, value, path)
        draft.propose("strategy", "fully_async", path)
        return "strategy=fully_async"

    return apply


def _quota(draft: _Draft) -> list[str]:
    """The lag that a staleness threshold and a number of steps between publications come down to together.

    verl lets (1 + threshold) x steps x batch groups be in flight or wait; that is one batch more than the lag.
    """
    threshold, every = draft.values.get("staleness_threshold"), draft.values.get("sync_every")
    if threshold is None and (every is None or "max_lag" in draft.values):
        return []
    source = draft.sources["sync_every" if threshold is None else "staleness_threshold"]
    batches = (1 + (threshold or 0)) * (every or 1)
    lag = _propose_lag(batches - 1, draft, source)
    return [f"{batches:g} batches in flight or waiting, by {source} -> {lag}"]


def _partial_rollout(path: str) -> Callable[[Any, _Draft], str]:
    def apply(value: Any, draft: _Draft) -> str:
        if not isinstance(value, bool):
            raise ConfigError(f"{path} must be True or False, got {value!r}; False drains requests before a load")
        draft.propose("in_flight", "keep" if value else "drain", path)
        return f"in_flight={'keep' if value else 'drain'}"

    return apply


def _strategy_key(path: str) -> Callable[[Any, _Draft], str]:
    def apply(value: Any, draft: _Draft) -> str:
        name = canonical_strategy(value, path)
        draft.propose("strategy", name, path)
        return f"strategy={name}"

    return apply


def _size_mb(path: str, name: str) -> Callable[[Any, _Draft], str]:
    def apply(value: Any, draft: _Draft) -> str:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{path} must be a whole number of MB >= 1, got {value!r}; leave it out for the default")
        draft.propose(name, value, path)
        return f"{name}={value}"

    return apply


def _pg_variant(path: str) -> Callable[[Any, _Draft], str]:
    def apply(value: Any, draft: _Draft) -> str:
        if value not in LOSS_OF_VARIANT:
            raise ConfigError(
                f"{path} must be one of {', '.join(LOSS_OF_VARIANT)}, got {value!r}{_hint(value, LOSS_OF_VARIANT)}; "
                f"verl's other losses are named by {_POLICY_LOSS}.loss_mode"
            )
        draft.propose("loss_mode", LOSS_OF_VARIANT[value], path)
        return f"{_POLICY_LOSS}.loss_mode={LOSS_OF_VARIANT[value]}"

    return apply


def _require_batches(path: str) -> Callable[[Any, _Draft], str]:
    def apply(value: Any, draft: _Draft) -> str:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{path} must be a whole number >= 1, got {value!r}; a step takes as many mini-batches")
        draft.propose("require_batches", value, path)
        return f"{_BATCH}={value} x {_MINI_BATCH}"

    return apply


def _must_be(path: str, wanted: Any, meaning: str, remedy: str) -> Callable[[Any, _Draft], str]:
    def apply(value: Any, draft: _Draft) -> str:
        if value != wanted:
            raise ConfigError(f"{path} must be {wanted!r} with this pipeline, got {value!r}; {remedy}")
        return meaning

    return apply


def _not_yet(path: str) -> Callable[[Any, _Draft], str]:
    def apply(value: Any, draft: _Draft) -> str:
        raise ConfigError(f"{path} is known but not supported yet, got {value!r}; remove it")

    return apply


_ROLLOUT = "actor_rollout_ref.rollout"
_POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
_BATCH, _MINI_BATCH = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
FOREIGN: tuple[ForeignKey, ...] = (
    *(ForeignKey((p,), _strategy_key(p)) for p in ("async_strategy", "actor_rollout_ref.async_strategy")),
    ForeignKey(("trainer.generate_ahead_steps",), _generate_ahead),
    ForeignKey(("async_generation_ratio",), _generation_ratio),
    ForeignKey(
        (f"{_ROLLOUT}.enable_dual_buffer",),
        _must_be(
            f"{_ROLLOUT}.enable_dual_buffer",
            True,
            "weights always go through the dual buffer",
            "leave it out, or train with stock verl",
        ),
    ),
    ForeignKey(
        (f"{_ROLLOUT}.with_reward",),
        _must_be(
            f"{_ROLLOUT}.with_reward", True, "rewards are computed while generation runs", "False is not supported yet"
        ),
    ),
    ForeignKey(
        (f"{_ROLLOUT}.param_update_preduce_bucket_size_mb",),
        _size_mb(f"{_ROLLOUT}.param_update_preduce_bucket_size_mb", "preduce_bucket_size_mb"),
    ),
    ForeignKey(
        (f"{_ROLLOUT}.param_update_consume_bucket_size_mb",),
        _size_mb(f"{_ROLLOUT}.param_update_consume_bucket_size_mb", "consume_bucket_size_mb"),
    ),
    *(
        ForeignKey((path,), _quota_key(path, name, least, whole=whole))
        for prefix in ("", "async_training.")
        for name, path, least, whole in (
            ("staleness_threshold", f"{prefix}staleness_threshold", 0, False),
            ("sync_every", f"{prefix}trigger_parameter_sync_step", 1, True),
        )
    ),
    *(ForeignKey((path,), _require_batches(path)) for path in ("require_batches", "async_training.require_batches")),
    *(ForeignKey((path,), _pg_variant(path)) for path in ("pg_variant", "actor_rollout_ref.actor.pg_variant")),
    *(
        ForeignKey((path,), _partial_rollout(path))
        for path in ("partial_rollout", "async_training.partial_rollout")
    ),
    *(
        ForeignKey((p,), _not_yet(p), supported=False)
        for p in (
            "trainer.use_nodes_ratios",
            "trainer.sperated_node_tasks",
            "trainer.sperated_node_ratios",
        )
    ),
)


def own_fields() -> tuple[str, ...]:
    """Names of all knobs under `trainer.v1.async_pipeline`."""
    return tuple(f.name for f in dataclasses.fields(AsyncPipelineConfig))


def _reject_unknown(own: Mapping[str, Any]) -> None:
    for name in own:
        if name not in own_fields():
            raise ConfigError(
                f"{OWN}.{name} is unknown, got {own[name]!r}{_hint(name, own_fields())}; knobs: {', '.join(own_fields())}"
            )


def unknown_key(path: str) -> str:
    """What to say of a path that hydra finds in no config: one line, with the nearest of our knobs."""
    parent, _, name = path.rpartition(".")
    if parent == OWN:
        return f"{path} is unknown{_hint(name, own_fields())}; knobs: {', '.join(own_fields())}"
    return f"{path} is not a key of this config; check its spelling, or write +{path}=... to add it"


def _reject_misplaced(raw: Mapping[str, Any]) -> None:
    """Our names anywhere but in their place would be ignored by verl, so they are errors."""
    right_places: dict[str, tuple[str, ...]] = {}
    for key in FOREIGN:
        for path in key.paths:
            leaf = path.rsplit(".", 1)[-1]
            right_places[leaf] = (*right_places.get(leaf, ()), path)
    unsupported = {path.rsplit(".", 1)[-1] for key in FOREIGN if not key.supported for path in key.paths}
    right_places["async_pipeline"] = (*SWITCHES, OWN)
    unique = ("max_lag", "oldest_share", "sync_every", "proof_tensors", "in_flight", "publish_timeout_s", "wait_timeout_s", "custom_roles", "reuse_prefixes")
    right_places.update({name: (f"{OWN}.{name}",) for name in unique})
    for path, value in walk(raw):
        leaf = path.rsplit(".", 1)[-1]
        places = right_places.get(leaf, ())
        if leaf in unsupported and value is not None:
            _not_yet(path)(value, _Draft())
        if places and path not in places:
            raise ConfigError(f"{path} is misplaced, got {value!r}; it belongs at {' or '.join(places)}")
    # These names are common; only where verl has no such key are they certainly meant for us.
    for name in ("strategy", "run_dir", "preduce_bucket_size_mb", "consume_bucket_size_mb"):
        for path in (name, f"trainer.{name}", f"trainer.v1.{name}", f"trainer.async_pipeline.{name}"):
            if select(raw, path) is not None:
                raise ConfigError(f"{path} is misplaced, got {select(raw, path)!r}; it belongs at {OWN}.{name}")
    reject_near_misses(raw)


def reject_near_misses(raw: Mapping[str, Any]) -> None:
    """A key that verl does not know and that is almost one of ours would be ignored, so it is an error.

    Looks at the levels on which our switches stand. Raises ConfigError.
    """
    ours = {path.rpartition(".")[2] for key in FOREIGN for path in key.paths} | {"async_pipeline"}
    for parent in ("", "actor_rollout_ref", "trainer", "actor_rollout_ref.rollout"):
        node = select(raw, parent) if parent else raw
        for name in node if isinstance(node, Mapping) else ():
            if not isinstance(name, str) or name in ours:
                continue
            close = difflib.get_close_matches(name, list(ours), n=1, cutoff=0.85)
            if close:
                path = f"{parent}.{name}" if parent else name
                raise ConfigError(f"{path} is unknown, got {node[name]!r}; did you mean {close[0]!r}?")


def walk(raw: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All dotted paths of a nested mapping, inner nodes included."""
    for name, value in raw.items():
        path = f"{prefix}{name}"
        yield path, value
        if isinstance(value, Mapping):
            yield from walk(value, f"{path}.")


def _check_types(own: Mapping[str, Any]) -> None:
    kinds: Mapping[str, type | tuple[type, ...]] = {
        "wait_timeout_s": (int, float),
        "publish_timeout_s": (int, float),
        "proof_tensors": int,
        "preduce_bucket_size_mb": int,
        "consume_bucket_size_mb": int,
        "sync_every": int,
        "depth": int,
        "oldest_share": (int, float),
        "in_flight": str,
        "stage": str,
        "stale": str,
        "run_dir": str,
    }
    for name, kind in kinds.items():
        value = own.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
            wanted = "text" if kind is str else "a number" if isinstance(kind, tuple) else "a whole number"
            raise ConfigError(f"{OWN}.{name} must be {wanted}, got {value!r}; leave it out for the default")
    for name in ("reuse_prefixes", "single_mini_batch"):
        if not isinstance(own.get(name, False), bool):
            raise ConfigError(f"{OWN}.{name} must be True or False, got {own[name]!r}; False is the default")
    roles = own.get("custom_roles", ())
    if not isinstance(roles, list | tuple) or not all(isinstance(spec, str) for spec in roles):
        raise ConfigError(f"{OWN}.custom_roles must be a list of texts, got {roles!r}; e.g. [module:Class@after->before]")


def _require(ok: bool, name: str, rule: str, value: Any, remedy: str) -> None:
    if not ok:
        raise ConfigError(f"{OWN}.{name} {rule}, got {value!r}; {remedy}")


def _hint(name: str, known: Any) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
