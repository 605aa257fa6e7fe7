# SPDX-License-Identifier: Apache-2.0
"""What the code of this package needs of an engine: what it imports, and what it declares.

Imports, calls of imported names, subclasses and arguments of engines are derived from the code. Members of
objects that an engine hands over at run time cannot be, so `declarations/<engine>.py` declares them:

    "pause": {"engine.module:Class": ("member", "old | new", "async coroutine", "!unwanted")}

The outer key says what breaks without them; if it ends with `on a CPU`, only runs there need them.

    member          a member of the class, with the kind and the signature that it has in the tested version
    old | new       one of them suffices, since the code handles both; a whole place stands for a member of
                    another class
    async member    a coroutine function
    !member         must not exist: its presence means that another member behaves differently
    'word'          below a module: a string, or an attribute that is assigned, for what is set by name
    '.word'         below a module: an attribute that the module reads, for what this package replaces

A key without a class names a module. A key `old | new` gives several places for each member; `module:'*'`
among them means the word in that module. A name that is declared as well as imported is taken as declared.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from recipe.async_pipeline.errors import ContractError, PatchError
from recipe.async_pipeline.installed.verl import find_verl_root

from .arguments import arguments_in, fields_in
from .shapes import shape_of
from .sources import OURS, THEIRS, Module, Sources, guarded_imports, words_in
from .uses import Use, uses_of

PACKAGE = Path(__file__).resolve().parents[2]
TABLES = "tools/contract/declarations/{}.py"
_CPU_ONLY = "on a CPU"


@dataclass(frozen=True, order=True)
class Alternative:
    """One alternative to meet a need: something that exists at a place, or does not."""

    place: str
    is_async: bool = False
    absent: bool = False

    def __str__(self) -> str:
        return f"{'!' * self.absent}{'async ' * self.is_async}{self.place}"

    @classmethod
    def of(cls, text: str) -> Alternative:
        """Read what `str` wrote."""
        place = text.lstrip("!").removeprefix("async ")
        return cls(place, is_async="async " in text, absent=text.startswith("!"))

    @property
    def name(self) -> str:
        """The name of the member, or the word without quotes."""
        inner = self.place.rpartition(":")[2]
        return inner.strip("'.") if inner.startswith("'") else inner.rpartition(".")[2]

    def shape(self, sources: Sources) -> str | None:
        """Return the shape of what is there, or None."""
        module, _, name = self.place.partition(":")
        if not name.startswith("'"):
            return shape_of(sources, self.place)
        found, word = sources.module(module), name.strip("'")
        if found is None:
            return None
        words = words_in(found) if word.startswith(".") else sources.words(found)
        return "word" if word.removeprefix(".") in words else None


@dataclass(frozen=True, order=True)
class Need:
    """Something of an engine that this package uses."""

    alternatives: tuple[Alternative, ...]
    breaks: str
    """What does not work without it."""
    used_by: tuple[str, ...] = ()
    """Files of this package."""

    @property
    def cpu_only(self) -> bool:
        """Whether only runs on the CPU platform need it."""
        return self.breaks.endswith(_CPU_ONLY)


@dataclass(frozen=True, kw_only=True)
class DeclaredUses:
    """What the file of an engine declares."""

    files: Mapping[str, str]
    arguments: str
    """Where the arguments of the engine are declared: a key as in `uses`."""
    uses: Mapping[str, Mapping[str, tuple[str, ...]]]


def table_of(engine: str, package: Path = PACKAGE) -> DeclaredUses:
    """Read the table of an engine. Raises ContractError if it is not of literals."""
    file = package / TABLES.format(engine)
    try:
        found = {
            node.target.id: ast.literal_eval(node.value)
            for node in ast.parse(file.read_bytes()).body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value
        }
        return DeclaredUses(files=found["FILES"], arguments=found["ARGUMENTS"], uses=found["USES"])
    except (OSError, ValueError, KeyError, SyntaxError) as error:
        raise ContractError(
            f"{file} must have FILES, ARGUMENTS and USES of literals, got {error!r}; correct it"
        ) from None


def sources_of(engine: str, folder: Path, package: Path = PACKAGE) -> Sources:
    """Return the engine in `folder`, which has its `__init__.py`, and this package's files that use it.

    Also verl if it is installed, since this package uses subclasses of verl.
    """
    files, roots = tuple(table_of(engine, package).files), {engine: folder, OURS: package}
    with suppress(PatchError):
        roots[THEIRS] = find_verl_root() / THEIRS
    return Sources(roots=roots, theirs=engine, files=files)


def needs_of(sources: Sources) -> list[Need]:
    """Return everything that this package needs of the engine of `sources`, as that tree names it."""
    table = table_of(sources.theirs, sources.roots[OURS])
    declared = list(_declared(sources, table))
    places = {one.place for need in declared for one in need.alternatives}
    derived: dict[tuple[str, str], set[str]] = {}
    for use in uses_of(sources):
        file = use.where.partition(":")[0]
        if use.place not in places and not _is_optional(sources, use):
            derived.setdefault((use.place, table.files[file]), set()).add(file)
    for file, breaks in table.files.items():
        for place in {*fields_in(sources, module_of(sources, file))} - places:
            derived.setdefault((place, breaks), set()).add(file)
    found = [
        Need((Alternative(place),), breaks, tuple(sorted(files)))
        for (place, breaks), files in derived.items()
        if shape_of(sources, place) is not None
    ]
    return sorted([*declared, *found, *_arguments(sources, table, places)])


def _arguments(sources: Sources, table: DeclaredUses, known: Set[str]) -> Iterator[Need]:
    """Yield the arguments that the files name and the engine has, unless they are declared."""
    found: dict[tuple[tuple[Alternative, ...], str], set[str]] = {}
    for file, breaks in table.files.items():
        for name in {*arguments_in(sources, module_of(sources, file))}:
            alternatives = tuple(_alternative(key, name) for key in table.arguments.split(" | "))
            if alternatives[0].place not in known and alternatives[0].shape(sources) is not None:
                found.setdefault((alternatives, breaks), set()).add(file)
    yield from (Need(one, breaks, tuple(sorted(files))) for (one, breaks), files in found.items())


def _declared(sources: Sources, table: DeclaredUses) -> Iterator[Need]:
    names = {file: named_in(module_of(sources, file)) for file in table.files}
    for breaks, by_class in table.uses.items():
        found = [
            tuple(_alternative(k, t) for t in text.split(" | ") for k in key.split(" | "))
            for key, members in by_class.items()
            for text in members
        ]
        users = [_users(table, names, breaks, alternatives) for alternatives in found]
        # What is not named in the code, such as what must not exist, belongs to the rest of its group.
        of_group = tuple(sorted({file for files in users for file in files}))
        yield from (
            Need(alternatives, breaks, files or of_group)
            for alternatives, files in zip(found, users, strict=True)
        )


def _users(
    table: DeclaredUses,
    names: Mapping[str, frozenset[str]],
    breaks: str,
    alternatives: tuple[Alternative, ...],
) -> tuple[str, ...]:
    """Return the files that name a member; several classes may have it, so what breaks decides."""
    files = [file for file in table.files if names[file] & {one.name for one in alternatives}]
    return tuple(sorted([file for file in files if table.files[file] == breaks] or files))


def _alternative(key: str, text: str) -> Alternative:
    alternative = Alternative.of(text)
    if ":" in alternative.place:
        return alternative
    if key.endswith("'*'"):
        return replace(alternative, place=key.replace("*", alternative.place))
    return replace(alternative, place=f"{key}{'.' if ':' in key else ':'}{alternative.place}")


def module_of(sources: Sources, file: str) -> Module:
    """Return a file of this package. Raises ContractError if it does not exist."""
    module = sources.module(f"{OURS}.{file.removesuffix('.py').replace('/', '.')}")
    if module is None:
        raise ContractError(f"{file} uses {sources.theirs} but does not exist; correct {TABLES}")
    return module


def named_in(module: Module) -> frozenset[str]:
    """Return the names that a module imports, defines or takes from objects, and its strings."""
    named = ast.FunctionDef | ast.AsyncFunctionDef | ast.alias
    return words_in(module) | {node.name for node in ast.walk(module.tree) if isinstance(node, named)}


def _is_optional(sources: Sources, use: Use) -> bool:
    """Return whether the code handles that the import of a name fails."""
    module = module_of(sources, use.where.partition(":")[0])
    return any(
        use.place == place or use.place.startswith(f"{place}.")
        for place in (f"{bound.module}:{bound.name}" for bound in guarded_imports(module))
    )
