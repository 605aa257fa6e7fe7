# SPDX-License-Identifier: Apache-2.0
"""Reads our keys out of a verl config once, checks them, and translates those of other systems.

Pure: takes plain mappings, imports neither verl nor ray. Every complaint is one line:
path, rule, value, remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import ConfigError

OWN = "trainer.v1.async_pipeline"
SWITCHES = ("async_pipeline", "actor_rollout_ref.async_pipeline")
STRATEGY_LAG: Mapping[str, int | None] = {"on_policy": 0, "one_step_off": 1, "n_step_ahead": None}
"""Strategies by name, with the lag that they imply; None: `max_lag` says."""
STRATEGY_ALIASES = {"naive": "on_policy"}
DEFAULT_STRATEGY = "one_step_off"
IN_FLIGHT = ("keep", "abort", "drain")
"""What may become of requests in flight when a replica loads; see `weight_sync.versioned_engine`."""
STAGES = ("host", "device")
"""Where a version waits for its load; see `weight_sync.spare`."""
DEFAULT_AHEAD = 3
"""max_lag of n_step_ahead when nothing names one."""


@dataclass(frozen=True, kw_only=True)
class AsyncPipelineConfig:
    """The knobs of the pipeline, under `trainer.v1.async_pipeline`."""

    strategy: str = DEFAULT_STRATEGY
    """on_policy, one_step_off, n_step_ahead, or `module:Class` of one's own."""
    max_lag: int = 1
    """Hard bound: versions that a trajectory may be older than the trainer. Implied by the first two."""
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
        for name in ("proof_tensors", "preduce_bucket_size_mb", "consume_bucket_size_mb"):
            value = getattr(self, name)
            _require(value >= 1, name, "must be >= 1", value, "leave it out for the default")
        for name, choices in (("in_flight", IN_FLIGHT), ("stage", STAGES)):
            value = getattr(self, name)
            _require(value in choices, name, f"must be one of {', '.join(choices)}", value, f"{choices[0]} is the default")
        for spec in self.custom_roles:
            ok = spec.count("@") == 1 and spec.count("->") == 1 and ":" in spec.split("@")[0]
            _require(ok, "custom_roles", "entries must read module:Class@after->before", spec, "see the README")
        implied = STRATEGY_LAG.get(self.strategy)
        if implied is not None and implied != self.max_lag:
            raise ConfigError(
                f"{OWN}.max_lag must be {implied} with strategy {self.strategy}, got {self.max_lag}; "
                "use strategy n_step_ahead for another lag"
            )


@dataclass(frozen=True)
class Translation:
    """The resolved config and one line for each key of another system that shaped it."""

    config: AsyncPipelineConfig
    notes: tuple[str, ...]
    foreign_paths: tuple[str, ...]
    """Paths in the verl config that verl itself does not know and that must be removed."""


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
    own.update({k: v for k, v in draft.values.items() if k not in ("strategy", "max_lag")})
    own["strategy"], own["max_lag"] = _strategy_and_lag(draft)
    own = {k: v for k, v in own.items() if v is not None}
    _check_types(own)
    if "custom_roles" in own:
        own["custom_roles"] = tuple(own["custom_roles"])
    return Translation(AsyncPipelineConfig(**own), tuple(notes), (*SWITCHES, *foreign))


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
        strategy = DEFAULT_STRATEGY if lag is None else {0: "on_policy", 1: "one_step_off"}.get(lag, "n_step_ahead")
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
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value % 1 != 0:
        raise ConfigError(f"{path} must be a whole number >= 0, got {value!r}; fractions are not supported yet")
    draft.propose("max_lag", int(value), path)
    return f"max_lag={int(value)}"


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
        ForeignKey((p,), _not_yet(p), supported=False)
        for p in (
            "staleness_threshold",
            "trigger_parameter_sync_step",
            "partial_rollout",
            "pg_variant",
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
    unique = ("max_lag", "proof_tensors", "in_flight", "publish_timeout_s", "wait_timeout_s", "custom_roles", "reuse_prefixes")
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
        "in_flight": str,
        "stage": str,
        "run_dir": str,
    }
    for name, kind in kinds.items():
        value = own.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
            wanted = "text" if kind is str else "a number" if isinstance(kind, tuple) else "a whole number"
            raise ConfigError(f"{OWN}.{name} must be {wanted}, got {value!r}; leave it out for the default")
    if not isinstance(own.get("reuse_prefixes", False), bool):
        raise ConfigError(f"{OWN}.reuse_prefixes must be True or False, got {own['reuse_prefixes']!r}; False is the default")
    roles = own.get("custom_roles", ())
    if not isinstance(roles, list | tuple) or not all(isinstance(spec, str) for spec in roles):
        raise ConfigError(f"{OWN}.custom_roles must be a list of texts, got {roles!r}; e.g. [module:Class@after->before]")


def _require(ok: bool, name: str, rule: str, value: Any, remedy: str) -> None:
    if not ok:
        raise ConfigError(f"{OWN}.{name} {rule}, got {value!r}; {remedy}")


def _hint(name: str, known: Any) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
