# SPDX-License-Identifier: Apache-2.0
"""What the pages name exists: links and anchors, files, names in the code, subcommands and their options."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from recipe.async_pipeline.cli.main import SUBCOMMANDS, build_parser
from recipe.async_pipeline.lab.bench.inputs.arms import ARMS
from recipe.async_pipeline.lab.gpu_kit.catalogue import STEPS
from tests import REPOSITORY

pytestmark = pytest.mark.style

DOCS = REPOSITORY / "docs"
PACKAGE = REPOSITORY / "recipe" / "async_pipeline"
TOP_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "patches/README.md")
PAGES = [*TOP_PAGES, *sorted(p.relative_to(REPOSITORY).as_posix() for p in DOCS.rglob("*.md"))]

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`+([^`]+)`+")
LINK = re.compile(r"(?<!\\)\[[^\]]*\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
FILE = re.compile(
    r"(?<![\w./<~-])(?:[\w.-]+/)+[\w.-]+\.(?:py|sh|md|ya?ml|json|txt|patch|toml)\b(?::(\w[\w.]*))?"
)
"""A path with at least one folder, and after a colon perhaps a name in that file."""
DOTTED = re.compile(r"\brecipe\.async_pipeline(?:\.\w+)+")
KNOB = re.compile(r"\btrainer\.v1\.async_pipeline\.(\w+(?:\.\w+)*)")
COMMAND = re.compile(r"\basync-pipeline ((?:[^`|&;()\n]|\\\n)+)")

LINE = 120
"""Longest line of prose: characters, outside of tables and code."""
MADE_BY_A_RUN = ("outputs/", "my_project/")
PLACEHOLDERS = ("patches/NNNN",)
VERLS = ("workers/engine/", "verl/")
"""Paths in verl's tree."""


def text_of(page: str) -> str:
    return (REPOSITORY / page).read_text(encoding="utf-8")


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page as GitHub and mkdocs derive them from its headings."""
    headings = HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


def links(text: str) -> Iterator[str]:
    """Yield the relative links of a page."""
    outside_code = CODE.sub("", FENCE.sub("", text))
    return (target for target in LINK.findall(outside_code) if "://" not in target)


def broken(page: Path, target: str) -> str:
    """Return why a link leads nowhere, or an empty string."""
    path, _, anchor = target.partition("#")
    found = (page.parent / path).resolve() if path else page
    if not found.exists():
        return "no such file"
    if anchor and anchor not in anchors(found):
        return "no such heading"
    return ""


def long_lines(text: str) -> list[str]:
    """Return the lines of prose that are too long; one word, such as an address, cannot be wrapped."""
    prose = FENCE.sub(lambda code: "\n" * code[0].count("\n"), text).splitlines()
    return [
        f"line {number} has {len(line)} characters: {line[:40]}..."
        for number, line in enumerate(prose, start=1)
        if len(line) > LINE and not line.lstrip().startswith(("|", "#")) and len(line.split()) > 2
    ]


@pytest.mark.parametrize("page", PAGES)
def test_lines_of_prose_are_short(page: str) -> None:
    assert long_lines(text_of(page)) == []


def test_a_long_line_would_be_found() -> None:
    word = "word " * 25
    assert long_lines(f"# {word}\n| {word} |\n```\n{word}\n```\n{word.strip()}\n") == [
        f"line 6 has 124 characters: {word[:40]}..."
    ]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    path = REPOSITORY / page
    # Images and code spans inside link texts do not hide a link.
    found = {target: broken(path, target) for target in links(text_of(page))}
    assert {target: why for target, why in found.items() if why} == {}


def test_a_broken_link_would_be_found() -> None:
    page = DOCS / "index.md"
    assert broken(page, "nowhere.md") == "no such file"
    assert broken(page, "../README.md#nowhere") == "no such heading"
    assert broken(page, "../README.md#try-it-three-commands") == ""
    assert list(links("[a](b.md#c) ![d](e.png) `[f](g)` [h](https://i)\n```\n[j](k)\n```\n")) == [
        "b.md#c",
        "e.png",
    ]


# Files and names in the code.


def candidates(path: str) -> list[Path]:
    """Return the places where a path of a page may be: below the repository or below the package."""
    return [REPOSITORY / path, PACKAGE / path]


@cache
def names_in(path: Path) -> frozenset[str]:
    """Return the names at the top of a module, and `Class.name` of each name in a class."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        found.update(_bound(node))
        if isinstance(node, ast.ClassDef):
            found.update(f"{node.name}.{name}" for inner in node.body for name in _bound(inner))
    return frozenset(found)


def _bound(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Assign(targets=targets):
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name


def missing_files(text: str) -> list[str]:
    missing = []
    for found in FILE.finditer(text):
        path, name = found[0].partition(":")[0], found[1]
        if path.startswith((*MADE_BY_A_RUN, *PLACEHOLDERS, *VERLS)):
            continue
        files = [file for file in candidates(path) if file.is_file()]
        if not files or (name and path.endswith(".py") and name not in names_in(files[0])):
            missing.append(found[0])
    return missing


def missing_modules(text: str) -> list[str]:
    return [dotted for dotted in DOTTED.findall(text) if not _is_there(dotted)]


def _is_there(dotted: str) -> bool:
    path = REPOSITORY.joinpath(*dotted.split("."))
    module = path.parent.with_suffix(".py")
    package = path.parent / "__init__.py"
    return (
        path.is_dir()
        or path.with_suffix(".py").is_file()
        or (module.is_file() and path.name in names_in(module))
        or (package.is_file() and path.name in package.read_text(encoding="utf-8"))
    )


@pytest.mark.parametrize("page", PAGES)
def test_every_file_and_name_in_the_code_exists(page: str) -> None:
    text = text_of(page)
    outside_links = LINK.sub("", text)
    assert missing_files(outside_links) + missing_modules(text) == []


def test_a_missing_file_or_name_would_be_found() -> None:
    assert missing_files("`core/flow.py:AsyncTrainingFlow.run`, `tests/e2e/parts.py`, a/b") == []
    assert missing_files("`core/flow.py:AsyncTrainingFlow.walk`") == ["core/flow.py:AsyncTrainingFlow.walk"]
    assert missing_files("see `core/nothing.py`") == ["core/nothing.py"]
    assert (
        missing_modules("recipe.async_pipeline.core.graph.GRAPH recipe.async_pipeline.PipelineTrainer") == []
    )
    assert missing_modules("recipe.async_pipeline.core.nothing") == ["recipe.async_pipeline.core.nothing"]


# Knobs.


@cache
def knobs() -> frozenset[str]:
    """Return the paths of all knobs and of their sections, as `configs/async_pipeline.yaml` has them."""
    data = yaml.safe_load((REPOSITORY / "configs" / "async_pipeline.yaml").read_text(encoding="utf-8"))
    return frozenset(_paths(data["trainer"]["v1"]["async_pipeline"], ""))


def _paths(section: object, above: str) -> Iterator[str]:
    for name, value in section.items() if isinstance(section, dict) else ():
        yield f"{above}{name}"
        yield from _paths(value, f"{above}{name}.")


def missing_knobs(text: str) -> list[str]:
    return [name for name in KNOB.findall(text) if name not in knobs()]


@pytest.mark.parametrize("page", PAGES)
def test_every_knob_exists(page: str) -> None:
    assert missing_knobs(text_of(page)) == []


def test_a_missing_knob_would_be_found() -> None:
    assert missing_knobs("`trainer.v1.async_pipeline.run_dir`, by default") == []
    assert missing_knobs("+trainer.v1.async_pipeline.run_dri=x") == ["run_dri"]


# Commands.


@cache
def options(subcommand: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the options of a subcommand and of the subcommands below it, and the names of the latter."""
    parser = build_parser(subcommand)
    own = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices[subcommand]
    found: set[str] = {"--help"}
    inner: set[str] = set()
    todo: list[argparse.ArgumentParser] = [own]
    while todo:
        for action in todo.pop()._actions:
            found.update(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                inner.update(action.choices)
                todo.extend(action.choices.values())
    return frozenset(found), frozenset(inner)


def wrong_commands(text: str) -> list[str]:
    """Return the commands of a page that name a subcommand or an option that does not exist."""
    wrong = []
    for found in COMMAND.finditer(text):
        words = found[1].replace("\\\n", " ").partition("#")[0].partition(" -- ")[0].split()
        command = words[0].rstrip(".,:")
        if command.startswith(("-", "<")) or not re.fullmatch(r"[a-z-]+", command):
            continue
        given = {word.partition("=")[0].rstrip(".,:") for word in words[1:] if word.startswith("--")}
        if command not in SUBCOMMANDS or not given <= options(command)[0]:
            wrong.append(found[0].strip())
    return wrong


def commands_in(text: str) -> str:
    """Return the code of a page: prose may follow the words `async-pipeline` with anything."""
    spans = CODE.findall(FENCE.sub("", text))
    return "\n".join([*FENCE.findall(text), *(span.replace("\n", " ") for span in spans)])


@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_its_options_exist(page: str) -> None:
    assert wrong_commands(commands_in(text_of(page))) == []


def test_a_wrong_command_would_be_found() -> None:
    assert wrong_commands("async-pipeline report RUN --json") == []
    assert wrong_commands("async-pipeline bench weight-sync --params 100M --replicas 2") == []
    assert wrong_commands("async-pipeline bench --workload a \\\n    --arms b") == []
    assert wrong_commands("async-pipeline summary RUN") == ["async-pipeline summary RUN"]
    assert wrong_commands("async-pipeline report RUN --jsno") == ["async-pipeline report RUN --jsno"]


# Lists that must be complete.


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("docs/quickstart.md", SUBCOMMANDS),
        ("docs/benchmarks.md", ARMS),
        ("docs/benchmarks.md", [f"bench {name}" for name in options("bench")[1]]),
        ("docs/index.md", [f"({path.name})" for path in DOCS.glob("*.md") if path.name != "index.md"]),
        ("README.md", ["doctor --verl-dir", "doctor --engine", "doctor --cluster"]),
        ("run_scripts/verify_gpu.sh", [step.name for step in STEPS]),
        ("README.md", [f"(docs/{path.name})" for path in DOCS.glob("*.md") if path.name != "index.md"]),
    ],
)
def test_a_page_that_lists_things_names_all_of_them(page: str, names: Iterable[str]) -> None:
    text = text_of(page)
    assert [name for name in names if name not in text] == []


@pytest.mark.parametrize(
    "row", re.findall(r"^\| (?:vLLM|SGLang) [\d.]+ \|.*$", text_of("docs/gpus.md"), re.MULTILINE)
)
def test_each_version_of_an_engine_says_what_has_run_and_when(row: str) -> None:
    _, _, real, source, _ = row.split("|")
    assert re.search(r"\(\d{4}-\d\d-\d\d\)|nightly\.tsv", real), row
    assert " as 0." not in source, "name what has run"


# The site.


def test_every_page_of_the_docs_is_in_the_navigation_once() -> None:
    data = yaml.safe_load((DOCS / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = sorted(_leaves(data["nav"]))
    assert listed == sorted(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md"))


def _leaves(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, list):
        for entry in nav:
            yield from _leaves(entry)
    elif isinstance(nav, dict):
        for entry in nav.values():
            yield from _leaves(entry)


FILES_OF_THE_PATHS = 30
"""Files that a reader who follows a prompt and a version has to open."""


def test_the_two_paths_are_short_enough_to_follow() -> None:
    _, _, paths = text_of("docs/architecture.md").partition("## The path of one prompt")
    paths, found, _ = paths.partition("## Next to the paths")
    assert found and "## The path of one version" in paths
    assert len(files := set(re.findall(r"`([\w/]+\.py)", paths))) <= FILES_OF_THE_PATHS, sorted(files)
