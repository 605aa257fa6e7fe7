# SPDX-License-Identifier: Apache-2.0
"""Translate the configurations of verl's other entry points into the one of `verl.trainer.main_ppo`.

    fully_async    verl.experimental.fully_async_policy.fully_async_main
    one_step_off   verl.experimental.one_step_off_policy.main_ppo
    dapo           recipe.dapo.main_dapo, of verl's collection of recipes

Pure: takes plain mappings. The tables have verl 0.9.1's keys, and the keys of its earlier versions. Keys that
a run understands anyway, such as `async_training.staleness_threshold`, are in `aliases.FOREIGN`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...errors import ConfigError
from ..paths import OWN, select
from .aliases import FOREIGN
from .foreign_keys import Document, Outcome, Rule, Takes, WrongValue, nothing, only, required, to

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_MINI_BATCH = f"{_ACTOR}.ppo_mini_batch_size"
ASYNC = "async_training"
_COUNT = Takes(
    lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 1, "a number >= 1", "correct it"
)
OTHER_PROGRAMS = ("sft_trainer", "sft_trainer_ray", "main_eval", "main_generation_server")
"""Modules of `verl.trainer` that neither call main_ppo's functions nor know of a pipeline."""
UNBOUNDED = "the lag bounds what is generated ahead"


class EntryPointKey(NamedTuple):
    """A key of an entry point."""

    path: str
    rule: Rule
    default: Any = None
    """Its value in the entry point's own configuration, of which nothing is reported."""
    stays: bool = False
    """Whether it is a key of main_ppo, too."""


@dataclass(frozen=True)
class EntryPoint:
    """An entry point of verl, and its keys that main_ppo does not have or gives another meaning."""

    module: str
    runner: str
    """The class of its task runner, by which a run is recognised."""
    keys: tuple[EntryPointKey, ...]
    sets: Mapping[str, Any] = field(default_factory=dict)
    """Values of this package that it means, unless the user has chosen a strategy or a lag."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of its configuration that such a choice replaces."""
    folder: str | None = None
    """The folder of its configurations in verl's package, or None if it is not a part of verl."""
    configs: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    """What its configuration changes in `ppo_trainer`, if it is not a part of verl."""


class Rewritten(NamedTuple):
    """What becomes of a configuration."""

    values: dict[str, Any]
    """Values to set, by path."""
    removed: tuple[str, ...]
    """Keys and sections that main_ppo does not have."""
    notes: tuple[str, ...]
    """One line for each key."""
    problems: tuple[str, ...] = ()
    """One line for each wrong value, and for each key that has no meaning here; they are removed, too."""


def rewritten(raw: Document, entry: EntryPoint) -> Rewritten:
    """Translate a configuration of an entry point."""
    chosen = _has_chosen(raw)
    values = {} if chosen else dict(entry.sets)
    notes = [f"{entry.module} -> {path}={value}" for path, value in values.items()]
    removed = [path for path, value in entry.defaults.items() if chosen and select(raw, path) == value]
    notes += [f"{path} is ignored: you have chosen the strategy or the lag" for path in removed]
    problems = list[str]()
    for key in entry.keys:
        value = select(raw, key.path)
        if value is None:
            continue
        if not key.stays:
            removed.append(key.path)
        try:
            outcome = key.rule(value, raw)
        except (WrongValue, ConfigError) as error:
            text = str(error)
            problems.append(text if isinstance(error, ConfigError) else f"{key.path} {text}")
            continue
        values |= outcome.overrides
        if outcome.overrides or (value != key.default and not key.stays):
            notes.append(f"{key.path}={value} -> {outcome.describe()}")

    unknown = _unknown(raw, entry)
    problems += [f"{path} is not supported; leave it out" for path in unknown]
    removed += [".".join(path.split(".")[:2]) for path in unknown]
    removed += [section for section in ("rollout", ASYNC) if _is_empty_without(raw, section, removed)]
    return Rewritten(values, tuple(removed), tuple(notes), tuple(problems))


def _has_chosen(raw: Document) -> bool:
    """Return whether the user has chosen a strategy or a lag with a key of main_ppo."""
    own = [f"{OWN}.strategy", f"{OWN}.staleness.max_lag"]
    others = [
        key.path for key in FOREIGN if "staleness.max_lag" in key.sets and not key.path.startswith(ASYNC)
    ]
    return any(select(raw, path) is not None for path in (*own, *others))


def _leaves(node: Any, path: str) -> Iterable[str]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _leaves(value, f"{path}.{name}")
    elif node is not None:
        yield path


def _unknown(raw: Document, entry: EntryPoint) -> list[str]:
    """Return the keys of the sections `rollout` and `async_training` that no table has."""
    known = {*(key.path for key in entry.keys), *(key.path for key in FOREIGN)}
    found = (path for section in ("rollout", ASYNC) for path in _leaves(raw.get(section), section))
    return [path for path in found if not any(f"{path}.".startswith(f"{name}.") for name in known)]


def _is_empty_without(raw: Document, section: str, removed: Iterable[str]) -> bool:
    left = set(_leaves(raw.get(section), section)) - set(removed)
    return isinstance(raw.get(section), Mapping) and not left


def entry_of_command(config_name: str, overrides: Iterable[str]) -> EntryPoint | None:
    """Return the entry point that a command line is for, or None if it is main_ppo.

    It is recognised by the name of its configuration, or by keys that no other configuration has.
    """
    name = config_name.removesuffix(".yaml")
    keys = [override.partition("=")[0] for override in overrides]
    for entry in ENTRY_POINTS:
        if name in entry.configs:
            return entry
    if any(key.startswith(f"{ASYNC}.") or key == "rollout.total_rollout_steps" for key in keys):
        return FULLY_ASYNC
    of_one = {key.path for key in ONE_STEP_OFF.keys} - {"rollout.n"}  # which may lack its first section
    return None if of_one.isdisjoint(keys) else ONE_STEP_OFF


def entry_of_runner(name: str) -> EntryPoint | None:
    """Return the entry point of a task runner's class, or None if it is unknown."""
    return next((entry for entry in ENTRY_POINTS if entry.runner == name), None)


def entry_of_program(program: str) -> EntryPoint | None:
    """Return the entry point that is the module, or the file, that Python runs, or None."""
    return next((entry for entry in ENTRY_POINTS if _is_module(program, entry.module)), None)


def trains_without(program: str) -> bool:
    """Return whether what Python runs is a program of verl that has no place for a pipeline."""
    return any(_is_module(program, f"verl.trainer.{name}") for name in OTHER_PROGRAMS)


def _is_module(program: str, module: str) -> bool:
    return f".{program.removesuffix('.py').replace('/', '.')}".endswith(f".{module}")


# Rules.


def _steps_of_a_sync(document: Document) -> int:
    steps = select(document, f"{ASYNC}.trigger_parameter_sync_step")
    return steps if isinstance(steps, int) and not isinstance(steps, bool) and steps > 0 else 1


def _in_steps(path: str, *, moved: bool = False) -> Rule:
    """verl's fully asynchronous trainer counts versions, this package counts steps.

    `moved`: whether the key was another one, with which the present one must agree.
    """

    def rule(value: Any, document: Document) -> Outcome:
        given = select(document, path)
        if isinstance(given, int) and given > 0 and given != value:
            raise WrongValue(f"must equal {path}={given}, got {value}; keep one of them")
        every = _steps_of_a_sync(document)
        if not isinstance(value, int) or value <= 0 or every == 1:
            return to(path)(value, document) if moved else Outcome("nothing to do", text="as it is")
        text = f"{path}={value * every}: {value} versions of {every} steps each"
        return Outcome("set", {path: value * every}, text)

    return rule


def _total_steps(value: Any, document: Document) -> Outcome:
    """Return the steps that train as many prompts: one trains mini-batch x require_batches."""
    _COUNT.check(value)
    mini, batches = select(document, _MINI_BATCH), select(document, f"{ASYNC}.require_batches")
    size = mini * (batches or 1) if isinstance(mini, int) and isinstance(batches, int | None) else 0
    if size < 1:
        raise WrongValue(f"needs the size of a step, {_MINI_BATCH} x {ASYNC}.require_batches; set both")
    if value < size:
        raise WrongValue(f"must be at least the {size} prompts of a step, got {value}; raise it")
    path, steps = "trainer.total_training_steps", value // size
    given = select(document, path)
    instead = "" if given in (None, steps) else f", instead of {given}, which verl does not read here"
    return Outcome("set", {path: steps}, f"{path}={steps}{instead}")


def _of_the_pool(name: str, default: int) -> EntryPointKey:
    """Return a size of the rollout's pool, whose default gives way to main_ppo's key."""
    path, own = f"rollout.{name}", f"{_ROLLOUT}.{name}"

    def rule(value: Any, document: Document) -> Outcome:
        _COUNT.check(value)
        given = select(document, own) if select(document, f"{_ROLLOUT}.nnodes") else None
        if not isinstance(given, int) or given == value:
            return Outcome("set", {own: value})
        if value != default:
            raise WrongValue(f"must be {own}={given}, got {value}; keep one of them")
        return Outcome("nothing to do", text=f"ignored: {own}={given} is set")

    return EntryPointKey(path, rule, default)


_OFF = "leave it out: this package's pools are fixed sets of devices"
_POOL = (_of_the_pool("nnodes", 1), _of_the_pool("n_gpus_per_node", 8))
_TRANSFER = EntryPointKey(
    f"{_ROLLOUT}.checkpoint_engine.backend",
    to(f"{_ROLLOUT}.checkpoint_engine.backend", as_=lambda value: "dual_buffer"),
    stays=True,
)
_GENERATED_AT_ONCE = EntryPointKey(
    "data.gen_batch_size",
    to(
        "data.gen_batch_size", as_=lambda value: None, text="left out: the lag bounds what is generated ahead"
    ),
    1,
    stays=True,
)


def _old_log_probs(*, by_trainer: bool) -> Rule:
    """Let the trainer compute old log-probs if the value of a switch is `by_trainer`."""

    def rule(value: Any, document: Document) -> Outcome:
        path = f"{OWN}.training.old_logp"
        if value is by_trainer:
            return Outcome("set", {path: "trainer"}, f"{path}=trainer")
        return Outcome("nothing to do", text=f"ignored: {path} decides, which may be the engines' log-probs")

    return rule


FULLY_ASYNC = EntryPoint(
    "verl.experimental.fully_async_policy.fully_async_main",
    "FullyAsyncTaskRunner",
    (
        *_POOL,
        EntryPointKey(
            "rollout.n", nothing(f"ignored, as in verl: {_ROLLOUT}.n is the number of responses"), 4
        ),
        EntryPointKey("rollout.total_rollout_steps", _total_steps),
        EntryPointKey(
            "rollout.total_epochs", nothing("ignored: trainer.total_epochs is the number of epochs")
        ),
        EntryPointKey("trainer.test_freq", _in_steps("trainer.test_freq"), stays=True),
        EntryPointKey("rollout.test_freq", _in_steps("trainer.test_freq", moved=True)),
        EntryPointKey("trainer.save_freq", _in_steps("trainer.save_freq"), stays=True),
        _GENERATED_AT_ONCE,
        _TRANSFER,
        EntryPointKey(
            f"{_ROLLOUT}.standalone_gpu_memory_utilization",
            to(f"{_ROLLOUT}.gpu_memory_utilization"),
            stays=True,
        ),
        EntryPointKey(
            "async_training.use_trainer_do_validate",
            only(False, "the replicas validate", "ignored: the replicas validate, not the training devices"),
            False,
        ),
        EntryPointKey("async_training.use_dynamic_resource_scheduling", required(False, _OFF), False),
        EntryPointKey(
            "async_training.dynamic_schedule_policy", nothing("ignored: pools are fixed"), "default"
        ),
        EntryPointKey(
            "async_training.dynamic_schedule_deactivate_ratio", nothing("ignored: pools are fixed"), 0.3
        ),
        EntryPointKey(
            "async_training.dynamic_schedule_enable_rebalance", nothing("ignored: pools are fixed"), True
        ),
        EntryPointKey("async_training.concurrent_samples_per_replica", nothing(f"ignored: {UNBOUNDED}"), 16),
        # Earlier versions of verl.
        EntryPointKey(
            "async_training.required_samples", nothing(f"ignored: it is {_MINI_BATCH} x require_batches")
        ),
        EntryPointKey(
            "async_training.checkpoint_engine", nothing("ignored: this package transfers the weights")
        ),
        EntryPointKey("async_training.use_rollout_log_probs", _old_log_probs(by_trainer=False)),
        EntryPointKey("async_training.compute_prox_log_prob", _old_log_probs(by_trainer=True)),
    ),
    {"async_strategy": "fully_async"},
    {f"{ASYNC}.staleness_threshold": 0.1, f"{ASYNC}.trigger_parameter_sync_step": 4},
    "experimental/fully_async_policy/config",
    ("fully_async_ppo_trainer", "fully_async_ppo_megatron_trainer"),
)
ONE_STEP_OFF = EntryPoint(
    "verl.experimental.one_step_off_policy.main_ppo",
    "OneStepTaskRunner",
    (
        *_POOL,
        _TRANSFER,
        EntryPointKey("rollout.n", nothing(f"ignored, as in verl: {_ROLLOUT}.n is the number of responses")),
    ),
    {"async_strategy": "one_step_off"},
    {},
    "experimental/one_step_off_policy/config",
    ("one_step_off_ppo_trainer", "one_step_off_ppo_megatron_trainer"),
)
DAPO = EntryPoint(
    "recipe.dapo.main_dapo",
    "DAPOTaskRunner",
    (_GENERATED_AT_ONCE._replace(default=None),),
    configs=("dapo_trainer", "dapo_megatron_trainer"),
    # https://github.com/verl-project/verl-recipe, dapo/config/dapo_trainer.yaml
    overrides=(
        "reward.reward_manager.name=dapo",
        "+reward.reward_kwargs={overlong_buffer_cfg:{enable:false,len:0,penalty_factor:0.0,log:false},"
        "max_resp_len:null}",
        "trainer.project_name=verl-dapo",
    ),
)
ENTRY_POINTS = (FULLY_ASYNC, ONE_STEP_OFF, DAPO)
