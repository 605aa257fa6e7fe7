# SPDX-License-Identifier: Apache-2.0
"""The places of verl, and of this package, that read keys of verl's configuration while a pipeline runs.

Derived from the syntax alone. An expression such as `self.config.trainer.get("device")` is a chain of names.
A variable, or an attribute of `self`, stands for the chain that is assigned to it, or for the class of its
annotation (`@RolloutConfig`), or for the section in its name: `rollout_config`. Not read: what a statement
only checks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..contract.signatures import FunctionNode
from ..contract.sources import OURS, Definition, Module, Sources, own_members
from ..contract.uses import subclasses

STOCK_ONLY = (
    *("verl.trainer.main_eval", "verl.trainer.main_generation_server", "verl.trainer.main_ppo_v0"),
    *("verl.trainer.sft_trainer", "verl.trainer.ppo.v1.trainer_sync"),
    *("verl.trainer.ppo.v1.trainer_colocate_async", "verl.trainer.ppo.v1.trainer_separate_async"),
    *("verl.experimental.fully_async_policy", "verl.experimental.one_step_off_policy"),
    *("verl.experimental.separation", "verl.model_merger"),
    *("verl.workers.engine_workers_tinker", "verl.workers.reward_manager", "verl.utils.skip"),
    "verl.utils.profiler",
    *(
        "verl.workers.rollout.trtllm_rollout",
        "verl.workers.rollout.hf_rollout",
        "verl.workers.engine.automodel",
    ),
    *(
        "verl.base_config",
        "verl.workers.rollout.naive",
        "verl.workers.engine.mindspeed",
    ),
)
"""Modules, or beginnings of their names, that only verl's own trainers and programs use, or that refused
values select.
"""
STOCK_CLASSES = ("RayPPOTrainer", "ReplayBuffer", "ReplayBufferAsync")
PROFILING = ("start_profile", "stop_profile", "_start_profiling", "_stop_profiling")
"""No code of this package calls them."""
NOT_IN_RUNS = ("cli", "config", "contract", "lab", "patching", "tools")
"""Parts of this package that run no training, or only check keys."""
_NOT_IN_RUNS = tuple(f"{OURS}.{part}" for part in NOT_IN_RUNS)
ALWAYS_OURS = ("AgentLoopManager", "AgentLoopManagerTQ", "LLMServerManager", "PPOTrainer")
"""Classes of verl of which every run has this package's subclass."""
UNKNOWN = "?"
SUFFIX = re.compile(r"_?(?:config|cfg)$")
"""What a variable has in addition to the name of its section."""
_CLASS = re.compile(r"\b(?!DictConfig)[A-Z]\w*Config\b")
_SAME = ("omega_conf_to_dataclass", "to_container", "deepcopy", "create", "copy", "merge")
"""Functions whose result has the keys of their first argument."""

NamePath = tuple[str, ...]


class KeyRead(NamedTuple):
    """A chain that is read, or whose section is passed on with all its keys."""

    chain: NamePath
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A function with the ones in it, or the statements of a module outside of its functions."""

    module: str
    owner: str
    """Its class, or nothing."""
    name: str
    """Nothing for a module."""
    words: frozenset[str]
    reads: frozenset[KeyRead]

    @property
    def place(self) -> str:
        """Its file and name."""
        return f"{self.module.replace('.', '/')}.py:{'.'.join(filter(None, (self.owner, self.name)))}"


def units_of(sources: Sources, package: str, without: tuple[str, ...]) -> Iterator[Unit]:
    """Yield the functions and modules of a package, without some modules."""
    root = sources.roots[package]
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        name = ".".join([package, *(part for part in parts if part != "__init__")])
        module = None if name.startswith(without) else sources.module(name)
        if module is not None:
            yield from _units(sources, module)


def _units(sources: Sources, module: Module) -> Iterator[Unit]:
    rest: list[ast.AST] = []
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef | FunctionNode):
            if any(isinstance(one, ast.Call) for one in node.decorator_list):
                rest.append(ast.Name(node.name))  # kept in a registry
        if isinstance(node, ast.ClassDef):
            rest += node.bases
            env = _attributes(sources, Definition(kind="class", module=module, name=node.name, node=node))
            for member in node.body:
                if isinstance(member, FunctionNode):
                    yield _unit(module, [member], env, node.name, member.name)
                else:
                    rest.append(member)
        elif isinstance(node, FunctionNode):
            yield _unit(module, [node], {}, "", node.name)
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            rest.append(node)
    yield _unit(module, rest, {}, "", "")


def _unit(module: Module, nodes: list[ast.AST], env: Mapping[str, NamePath], owner: str, name: str) -> Unit:
    words, reads = set[str](), set[KeyRead]()
    for root in nodes:
        local = _environment(root, env)
        for node in _effective(root):
            match node:
                case ast.Constant(value=str(text)) if len(text) < 100 and not _exports(root):
                    words.update(re.findall(r"\w+", text))
                case ast.Name(id=word) | ast.Attribute(attr=word):
                    words.add(word)
            if isinstance(node, ast.Tuple | ast.List):
                reads |= {
                    KeyRead((UNKNOWN, one.value))
                    for one in node.elts
                    if isinstance(one, ast.Constant) and isinstance(one.value, str)
                }
            if isinstance(node, ast.Attribute | ast.Subscript | ast.Call | ast.JoinedStr):
                if not isinstance(getattr(node, "ctx", None), ast.Store) and (chain := _chain(node, local)):
                    reads.add(KeyRead(chain))
            if (of_self := _variable(node)) and of_self in local and "self" in local:
                reads.add(KeyRead((*local["self"], of_self.rpartition(".")[2])))
            reads |= {
                KeyRead(chain, True) for value in _passed_whole(node) if (chain := _chain(value, local))
            }
    known = {read for read in reads if read.chain[-1] != UNKNOWN}
    return Unit(module=module.name, owner=owner, name=name, words=frozenset(words), reads=frozenset(known))


def _exports(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


def _effective(node: ast.AST) -> Iterator[ast.AST]:
    """Walk a node, without assertions, errors, and conditions of nothing but these."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.Assert | ast.Raise) and not (
            isinstance(child, ast.If)
            and not child.orelse
            and all(isinstance(one, ast.Raise) for one in child.body)
        ):
            yield from _effective(child)


def _attributes(sources: Sources, found: Definition) -> dict[str, NamePath]:
    """Return what the attributes stand for that a class and its ancestors assign to `self`."""
    env: dict[str, NamePath] = {"self": (f"@{found.name}",)}
    for ancestor in reversed(sources.ancestors(found)):
        assert isinstance(ancestor.node, ast.ClassDef)
        for method in ancestor.node.body:
            if isinstance(method, FunctionNode):
                local = _environment(method, env)
                env |= {name: chain for name, chain in local.items() if name.startswith("self.")}
    return env


def _environment(node: ast.AST, outer: Mapping[str, NamePath]) -> dict[str, NamePath]:
    """Return what the variables of a function stand for."""
    env = dict(outer)
    inner = [*ast.walk(node)]
    env |= {
        one.arg: _class_in(one.annotation) or _hint(one.arg)
        for one in inner
        if isinstance(one, ast.arg) and one.arg != "self"
    }
    for one in inner:
        match one:
            case ast.Assign(targets=[target], value=value) | ast.NamedExpr(target=target, value=value):
                chain = _chain(value, env)
            case ast.AnnAssign(target=target, value=value, annotation=annotation):
                chain = _class_in(annotation) or (_chain(value, env) if value else None)
            case _:
                continue
        name = _variable(target)
        if name and chain and chain[-1] != UNKNOWN:
            env[name] = chain
    return env


def _variable(node: ast.AST) -> str | None:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return f"self.{name}"
    return None


def _class_in(annotation: ast.expr | None) -> NamePath | None:
    names = [] if annotation is None else _CLASS.findall(ast.unparse(annotation))
    return (f"@{'|'.join(names)}",) if names else None


def _hint(name: str) -> NamePath:
    section = SUFFIX.sub("", name).strip("_")
    return (section,) if section and SUFFIX.search(name) else (UNKNOWN,)


def _chain(node: ast.AST, env: Mapping[str, NamePath]) -> NamePath | None:
    """Return the chain of an expression, or None."""
    match node:
        case ast.Name(id=name):
            return env.get(name) or _hint(name)
        case ast.Attribute(attr=name) if (known := _variable(node)) and (known in env or SUFFIX.search(name)):
            return env.get(known) or _hint(name)
        case ast.BoolOp(values=[value, *_]) | ast.IfExp(body=value):
            return _chain(value, env)
        case ast.JoinedStr(values=[*_, ast.Constant(value=str(text))]) if re.fullmatch(r"(\.\w+)+", text):
            return (UNKNOWN, *text.split(".")[1:])
    if (step := _step(node)) is not None:
        left = _chain(step[0], env)
        return (*left, *step[1].split(".")) if left else None
    return _of_call(node, env) if isinstance(node, ast.Call) else None


def _step(node: ast.AST) -> tuple[ast.AST, str] | None:
    """Return a section and the key of it that an expression is, or None."""
    match node:
        case (
            ast.Attribute(value=value, attr=below)
            | ast.Subscript(value=value, slice=ast.Constant(value=str(below)))
            | ast.Call(
                func=ast.Attribute(value=value, attr="get" | "pop"), args=[ast.Constant(value=str(below)), *_]
            )
            | ast.Call(
                func=ast.Name(id="getattr" | "select") | ast.Attribute(attr="select"),
                args=[value, ast.Constant(value=str(below)), *_],
            )
        ):
            return value, below
    return None


def _of_call(node: ast.Call, env: Mapping[str, NamePath]) -> NamePath | None:
    """Return what a function returns that converts a section, or the class that is made."""
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in _SAME and node.args:
            kinds = [keyword.value for keyword in node.keywords if keyword.arg == "dataclass_type"]
            of_class = next((kind for one in kinds if (kind := _class_in(one))), None)
            return of_class or _chain(node.args[0], env)
        case ast.Name(id=name) if _CLASS.fullmatch(name):
            return (f"@{name}",)
    return None


def _passed_whole(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what other code gets with all its keys."""
    match node:
        case ast.Call(func=ast.Attribute(value=value, attr="items" | "to_dict" | "keys")):
            yield value
        case ast.Call(func=ast.Attribute(attr="update" | "init" | "merge"), args=values):
            yield from values
        case ast.Call(func=ast.Name(id="asdict" | "dict" | "fields" | "vars"), args=[value]):
            yield value
        case ast.Dict(keys=keys, values=values):
            yield from (value for key, value in zip(keys, values, strict=True) if key is None)
    if isinstance(node, ast.Call):
        yield from (keyword.value for keyword in node.keywords if keyword.arg is None)


def live(units: Iterable[Unit], words: Collection[str]) -> list[Unit]:
    """Return the units that may run: their names and their classes are among `words`, or in a live unit."""
    rest, found, known = list(units), list[Unit](), {*words}
    while new := [
        unit
        for unit in rest
        if (not unit.owner or unit.owner in known) and (unit.name in known or unit.name[:2] in ("", "__"))
    ]:
        found += new
        places = {id(unit) for unit in new}
        rest = [unit for unit in rest if id(unit) not in places]
        known.update(word for unit in new for word in unit.words)
    return found


def replaced(sources: Sources) -> Iterator[tuple[str, str, str]]:
    """Yield module, class and name of what every run replaces, or overrides without a call of it."""
    for subclass in subclasses(sources):
        if subclass.found.module.name.startswith(_NOT_IN_RUNS):
            continue
        for name, member in own_members(subclass.found).items():
            if isinstance(member.node, FunctionNode) and f"super().{name}(" not in ast.unparse(member.node):
                for above in sources.ancestors(subclass.found)[1:]:
                    if above.name in ALWAYS_OURS:
                        yield above.module.name, above.name, name


def units_of_a_run(sources: Sources) -> tuple[list[Unit], list[Unit]]:
    """Return the units of verl, and of this package, that a pipeline run may call."""
    ours = [*units_of(sources, OURS, _NOT_IN_RUNS)]
    gone = {*replaced(sources)}
    theirs = [
        unit
        for unit in units_of(sources, sources.theirs, STOCK_ONLY)
        if (unit.module, unit.owner, unit.name) not in gone
        and unit.owner not in STOCK_CLASSES
        and unit.name not in PROFILING
    ]
    words = {word for unit in ours for word in unit.words} | {"run_ppo", "TaskRunnerV1", "validate_config"}
    return live(theirs, words), ours
