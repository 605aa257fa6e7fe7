# SPDX-License-Identifier: Apache-2.0
"""verl's configuration without torch, Ray and transformers, for commands that do not train.

Importing any module of verl runs the `__init__` of its packages, which import all of these, for seconds.
Within `light`, the packages have no `__init__`, and what the classes of the configuration need only in
annotations, or in methods that no check calls, is `Postponed`. Nothing of that stays in `sys.modules`, so
verl can be imported as a whole later. Once it has been, it is used as it is.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from ...config.paths import select, walk
from ...installed.engines import plugins_of
from ...installed.verl import find_verl_root
from ..process.after_import import require_loaded

VERL, TARGET = "verl", "_target_"
PLUGIN = "recipe.async_pipeline.verl_bridge.plugin"
PACKAGES: Mapping[str, Mapping[str, str]] = {
    VERL: {},
    "verl.utils": {},
    "verl.utils.profiler": {"ProfilerConfig": "config"},
    "verl.utils.qat": {"QATConfig": "core"},
    "verl.utils.skip": {"SkipManagerConfig": "config"},
}
"""Packages without their `__init__`, and the names that the configuration imports from it: their modules."""
POSTPONED = ("torch", "transformers", "tensordict", "verl.protocol", "verl.utils.device", "verl.utils.model")
"""Packages and modules that are not imported."""
AGENT_LOOPS = tuple(f"experimental/agent_loop/{name}_agent_loop.py" for name in ("single_turn", "tool"))
REWARD_MANAGERS = "experimental/reward_loop/reward_manager"
OTHERS = ("VERL_USE_EXTERNAL_MODULES", "VERL_USE_EXTERNAL_PLUGINS", "VERL_USE_MODELSCOPE")
"""Variables by which code of others changes verl when it is imported."""
LIGHT = (
    *("verl.trainer.config", "verl.utils.profiler", "verl.utils.qat", "verl.utils.skip"),
    *("verl.trainer.ppo.rollout_corr_helper", "verl.utils.reward_score", "verl.workers.config"),
)
"""Where what is light can be imported from, such as the classes of verl's configuration."""
Result = TypeVar("Result")


def is_whole() -> bool:
    """Return whether verl has been imported in this process."""
    return VERL in sys.modules


def suffices() -> bool:
    """Return whether importing verl would load no code but its own and this package's plug-in."""
    return plugins_of("verl.plugins") == {PLUGIN} and not any(map(os.environ.get, OTHERS))


def require_plugin() -> None:
    """Raises PatchedVerlRequired if verl has not loaded this package's plug-in; imports verl if unknown."""
    if is_whole() or not suffices():
        importlib.import_module(VERL)
        require_loaded()


def compute(work: Callable[[], Result], targets: Iterable[str] = (), *, torch: bool = False) -> Result:
    """Return what `work` returns, which uses `targets` of verl.

    If it uses something postponed, or what it imports needs more than is light, it is called again with the
    whole of verl. `torch`: it needs torch.
    """
    if not is_whole() and all(target.startswith(LIGHT) for target in targets):
        if torch:
            importlib.import_module("torch")
        with light() as used:
            try:
                for target in targets:
                    importlib.import_module(target.rpartition(".")[0])
            except Exception:  # noqa: BLE001 - a module may need what is postponed in any way
                used.append("a module")
            try:
                result = work()
            except Exception:  # an error of something postponed may have become any other
                if not used:
                    raise
        if not used:
            return result
    importlib.import_module(VERL)
    return work()


@cache
def fields_of(target: str) -> tuple[str, ...]:
    """Return the fields of a dataclass, or nothing if it cannot be imported or is none."""
    module, _, name = target.rpartition(".")

    def work() -> tuple[str, ...]:
        cls = getattr(importlib.import_module(module), name)
        return tuple(field.name for field in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else ()

    try:
        return compute(work, [target]) if module.startswith(f"{VERL}.") else work()
    except (ImportError, AttributeError, ValueError):
        return ()


def refusal(config: DictConfig, *, reference: bool) -> str:
    """Return why verl's `validate_config` refuses a config without a critic, or nothing.

    `reference`: it has a reference policy.
    """
    actor = cast("dict[str, Any]", OmegaConf.to_container(config.actor_rollout_ref.actor, resolve=True))
    targets = [str(value) for path, value in walk(actor) if path.rpartition(".")[2] == TARGET]

    def work() -> None:
        from verl.utils.config import validate_config

        validate_config(config, reference, use_critic=False)

    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compute(work, targets)
    except (AssertionError, ValueError, TypeError, InstantiationException) as error:
        return " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return ""


_modules: dict[str, ModuleType] = {}
"""What was imported within `light`, from one time to the next."""
_used: list[str] = []
"""What was postponed and has been used since `light` began."""


@contextlib.contextmanager
def light() -> Iterator[list[str]]:
    """Let imports of verl be light, in a process without verl. Yields the postponed names that were used."""
    finder = _Finder(find_verl_root())
    before = set(sys.modules)
    _used.clear()
    sys.modules.update({name: one for name, one in _modules.items() if name not in sys.modules})
    sys.meta_path.insert(0, finder)
    try:
        yield _used
    finally:
        sys.meta_path.remove(finder)
        for name in filter(_is_light, sys.modules.keys() - before):
            _modules[name] = sys.modules.pop(name)


def _is_light(name: str) -> bool:
    return _is_postponed(name) or name.partition(".")[0] == VERL


def _is_postponed(name: str) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in POSTPONED)


class Postponed:
    """Stands for a name of a module that has not been imported. A class may derive from it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _used.append(self._name)
        raise ImportError(f"{self._name} is postponed")

    def __getattr__(self, name: str) -> Postponed:
        if name.startswith("__"):
            raise AttributeError(name)
        return Postponed(f"{self._name}.{name}")

    def __or__(self, other: object) -> Postponed:
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()


class _Light(ModuleType):
    """A package without its `__init__`, or a postponed module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if module := PACKAGES.get(self.__name__, {}).get(name):
            return getattr(importlib.import_module(f"{self.__name__}.{module}"), name)
        return Postponed(f"{self.__name__}.{name}")


class _Finder(MetaPathFinder, Loader):
    """Finds light packages and postponed modules before others find the real ones."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in PACKAGES:
            folder = self._root.joinpath(*name.split("."))
            found = ModuleSpec(name, self, origin=str(folder / "__init__.py"), is_package=True)
            found.submodule_search_locations = [str(folder)]
            return found
        above = sys.modules.get(name.partition(".")[0])
        real = above is not None and not isinstance(above, _Light)
        return ModuleSpec(name, self, is_package=True) if _is_postponed(name) and not real else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Light(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """A light module has no code."""


def registered_estimators() -> frozenset[str]:
    """Return the names of verl's estimators of advantages."""
    if not is_whole():
        return _registered_by("register_adv_est")
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    return frozenset(ADV_ESTIMATOR_REGISTRY)


def registered_losses() -> frozenset[str]:
    """Return the names of verl's policy losses."""
    if not is_whole():
        return _registered_by("register_policy_loss")
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    return frozenset(POLICY_LOSS_REGISTRY)


def registered_agent_loops() -> frozenset[str]:
    """Return the names of verl's agent loops."""
    return _registered_by("register", *AGENT_LOOPS)


def registered_reward_managers() -> frozenset[str]:
    """Return the names of verl's reward managers."""
    folder = find_verl_root() / "verl" / REWARD_MANAGERS
    files = tuple(f"{REWARD_MANAGERS}/{file.name}" for file in sorted(folder.glob("*.py")))
    return _registered_by("register", *files) | _registered_by("register_manager", *files)


def registered_tool_parsers() -> frozenset[str]:
    """Return the names of the forms of calls of tools that verl can read."""
    return _registered_by("ToolParser.register", "experimental/agent_loop/tool_parser.py")


@cache
def _registered_by(decorator: str, *files: str) -> frozenset[str]:
    """Return the names that a decorator gets in files of verl's source."""
    return frozenset(
        name
        for file in files or ("trainer/ppo/core_algos.py",)
        for name in _names_in(_parsed(find_verl_root() / "verl" / file), decorator)
    )


@cache
def _parsed(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_bytes()).body


def _names_in(body: list[ast.stmt], decorator: str) -> Iterator[str]:
    values = {
        f"{node.name}.{ast.unparse(line.targets[0])}": ast.literal_eval(line.value)
        for node in body
        if isinstance(node, ast.ClassDef) and node.name == "AdvantageEstimator"
        for line in node.body
        if isinstance(line, ast.Assign)
    }
    for node in body:
        for call in node.decorator_list if isinstance(node, ast.FunctionDef | ast.ClassDef) else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func) == decorator and call.args:
                first = call.args[0]
                yield str(first.value if isinstance(first, ast.Constant) else values[ast.unparse(first)])


FUNCTION = "verl.utils.reward_score.default_compute_score"
SCORERS = ("custom_reward_function.path", "reward_model.enable", "reward_manager.module.path")


def can_score(config: Mapping[str, Any], data_source: str | None) -> bool:
    """Return whether the run has a reward function or model, or verl's default function knows the source.

    `config`: the whole config.
    """
    return not uses_default(config) or (data_source is not None and verl_knows(data_source))


def uses_default(config: Mapping[str, Any]) -> bool:
    """Return whether verl's default function scores the responses of a run."""
    reward = select(config, "reward")
    return reward is not None and not any(select(reward, name) for name in SCORERS)


@cache
def verl_knows(data_source: str) -> bool:
    """Return whether verl's default reward function scores a data source."""

    def work() -> bool:
        from verl.utils.reward_score import default_compute_score

        try:
            default_compute_score(data_source, "", "")
        except NotImplementedError:
            return False
        except Exception:  # noqa: BLE001 - it knows the data source, but there is nothing to score
            return True
        return True

    return compute(work, [FUNCTION])
