# SPDX-License-Identifier: Apache-2.0
"""Render the documentation of all knobs from the dataclasses of `schema` and the table of `aliases`.

Rewrites `configs/async_pipeline.yaml` and `docs/configuration.md`; a test compares both with the knobs:

    python -m recipe.async_pipeline.tools.explain.reference

`async-pipeline explain --knobs` prints the same information.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...config.keys.aliases import FOREIGN, SET_BY_OTHERS
from ...config.keys.misplaced import SWITCHES
from ...config.knobs.fields import LONGEST_S, Knob, knobs_of, sections_of
from ...config.knobs.schema import AsyncPipelineConfig, knob_paths
from ...config.paths import OWN, hint
from ...errors import ConfigError

COMMAND = "python -m recipe.async_pipeline.tools.explain.reference"
YAML, DOCS = Path("configs/async_pipeline.yaml"), Path("docs/configuration.md")
WIDTH = 110
LINE = 120
"""Longest line of prose in the pages."""
DERIVED = "Default: "
"""Begins the last sentence of the docstring of a knob whose default depends on other keys."""
_YAML_HEAD = f"""\
# @package _global_
# Every knob of the pipeline with its default. Written by `{COMMAND}`.
#
# Other experiment files in this folder hold only differences. A knob that a key of another system can also
# set is null here, and its comment names the default; every other value then was written by the user.
# Switch the pipeline on with +async_pipeline=True on the command line.

# Short form of trainer.v1.async_pipeline.strategy.
async_strategy: null

trainer:
  v1:
    async_pipeline:
"""
_DOCS_HEAD = f"""\
# Configuration

<!-- Written by `{COMMAND}`. -->

`+async_pipeline=True` switches the pipeline on. Its knobs are below `trainer.v1.async_pipeline`; set one on
the command line as `trainer.v1.async_pipeline.staleness.max_lag=2`, or with a leading `+` if your config does
not include `configs/async_pipeline.yaml`. An unknown or misplaced key is an error that names the nearest
knob. `async-pipeline explain --knobs [SECTION]` prints these tables, and `async-pipeline explain` the plan
that results from a command line. A resumed run must keep the value of each knob that may not change.
"""
_VERLS_DEFAULTS = """\
## Defaults of verl that change

`actor_rollout_ref.rollout.gpu_memory_utilization` is 0.5 in verl, because its trainer may share the devices.
With vLLM or SGLang on GPUs it [becomes 0.85 or 0.8](gpus.md#device-memory-of-the-engines) unless you set it.

`actor_rollout_ref.model.override_config.attn_implementation` is flash_attention_2 in verl. With FSDP on GPUs
it [becomes packed_sdpa](gpus.md#installing) where flash-attn is not installed, unless you set it.

"""
_FOREIGN_HEAD = """\
## Short forms and keys of other systems

Each of these keys is translated when it is set, and the run prints one line on the result when it starts. Two
keys that disagree are an error.

| Key | Sets |
|---|---|
"""


def render_yaml() -> str:
    """Return the text of `configs/async_pipeline.yaml`."""
    lines = [_YAML_HEAD]
    documents = _documents()
    last = ""
    for knob in knobs_of(AsyncPipelineConfig):
        section = knob.path.rpartition(".")[0]
        depth = 6

        for level, part in enumerate(section.split(".") if section else ()):
            depth += 2
            path = ".".join(section.split(".")[: level + 1])
            if not f"{last}.".startswith(f"{path}."):
                pad = " " * (depth - 2)
                lines += ["", *_comment(documents[path], pad), f"{pad}{part}:"]

        last = section
        pad = " " * depth
        text = documents[knob.path]
        value = json.dumps(_plain(knob.default))
        if knob.path in SET_BY_OTHERS and knob.default is not None:
            text += "" if DERIVED in text else f" {DERIVED}{value.strip(chr(34))}."
            value = "null"
        lines += ["", *_comment(text, pad), f"{pad}{knob.name}: {value.strip(chr(34))}"]
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def render_docs() -> str:
    """Return the text of `docs/configuration.md`."""
    documents = _documents()
    parts = [_DOCS_HEAD]
    for title, knobs in _by_section().items():
        prose = "\n".join(_wrapped(documents[title], LINE)) if title else ""
        parts.append(f"\n## `{title}`\n\n{prose}\n\n" if title else "\n## Top level\n\n")
        parts.append("| Knob | Values | Default | May change | Meaning |\n|---|---|---|---|---|\n")
        for knob in knobs:
            meaning, default = _meaning(knob, documents[knob.path])
            cells = (f"`{knob.path}`", _values(knob), default, "yes" if knob.may_change else "no", meaning)
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    parts += ["\n", _VERLS_DEFAULTS, _FOREIGN_HEAD, *_foreign_rows()]
    return "".join(parts)


def render_help(section: str | None = None) -> list[str]:
    """Return the lines of `explain --knobs [SECTION]`, which also accepts one knob by its path or its name.

    Raises ConfigError if there is no such section or knob.
    """
    sections = [path for path in _by_section() if path]
    paths = knob_paths()
    section = None if section is None else section.removeprefix(f"{OWN}.")
    names = [path.rpartition(".")[2] for path in paths]
    if section is not None and section not in (*sections, *paths, *names):
        raise ConfigError(
            f"--knobs: there is no section or knob {section!r}{hint(section, (*sections, *paths))}; "
            f"sections: {', '.join(sections)}"
        )

    documents = _documents()
    lines = [f"Below {OWN}:"]
    for knob in knobs_of(AsyncPipelineConfig):
        if section is None or section in (knob.path, knob.name) or knob.path.startswith(f"{section}."):
            meaning, default = _meaning(knob, documents[knob.path])
            resumed = "; may change at a resume" if knob.may_change else ""
            lines += ["", f"{knob.path}  ({_values(knob)}; default: {default}{resumed})".replace("`", "")]
            lines += textwrap.wrap(
                meaning.replace("`", ""), 90, initial_indent="    ", subsequent_indent="    "
            )
    return lines


def write(root: Path) -> None:
    """Rewrite the two files below a checkout."""
    (root / YAML).write_text(render_yaml(), encoding="utf-8")
    (root / DOCS).write_text(render_docs(), encoding="utf-8")


def _documents() -> Mapping[str, str]:
    """Return the docstring of every knob and section, by path, on one line."""
    found: dict[str, str] = {}
    for path, cls in {"": AsyncPipelineConfig, **sections_of(AsyncPipelineConfig)}.items():
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(tree, ast.ClassDef)
        if path:
            found.setdefault(path, " ".join((ast.get_docstring(tree) or "").split()))
        for item, below in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                text = _text(below)
                if text is not None:
                    found[f"{path}.{item.target.id}".lstrip(".")] = text
    return found


def _text(node: ast.stmt) -> str | None:
    if (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ):
        return " ".join(node.value.value.split())
    return None


def _by_section() -> dict[str, list[Knob]]:
    """Return the knobs by the path of their section, those without a section first."""
    found: dict[str, list[Knob]] = {}
    for knob in knobs_of(AsyncPipelineConfig):
        found.setdefault(knob.path.rpartition(".")[0], []).append(knob)
    return found


def _values(knob: Knob) -> str:
    """Describe the values that a knob accepts."""
    if knob.choices:
        return ", ".join(f"`{json.dumps(choice)}`".replace('"', "") for choice in knob.choices)
    names = {bool: "true, false", int: "whole number", float: "number", str: "text"}
    if knob.kind in names:
        return f"{names[knob.kind]} {_bounds(knob)}".strip()
    return "list of texts" if typing.get_origin(knob.kind) is tuple else "mapping"


def _bounds(knob: Knob) -> str:
    # The longest time is a limit of timers, which readers need not know.
    return "" if knob.bounds is None else str(knob.bounds).replace(f" and at most {LONGEST_S:g}", "")


def _meaning(knob: Knob, text: str) -> tuple[str, str]:
    """Return the docstring without its last sentence, which is on the default, and the default."""
    meaning, _, derived = text.partition(f" {DERIVED}")
    value = json.dumps(_plain(knob.default)).strip('"')
    return meaning, derived.rstrip(".") or ("none" if value == "null" else f"`{value}`")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _comment(text: str, pad: str) -> list[str]:
    return _wrapped(text, WIDTH, f"{pad}# ")


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    # Do not split names at dashes.
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _foreign_rows() -> Iterator[str]:
    yield f"| {_list(SWITCHES)} | the switch; no line is printed |\n"
    seen: set[tuple[str, str]] = set()
    for key in FOREIGN:
        name = key.path.rpartition(".")[2]
        if key.meaning and (name, key.meaning) not in seen:
            seen.add((name, key.meaning))
            same = [
                other.path
                for other in FOREIGN
                if other.path.rpartition(".")[2] == name and other.meaning in ("", key.meaning)
            ]
            yield f"| {_list(same)} | {key.meaning} |\n"


def _list(paths: Sequence[str]) -> str:
    return ", ".join(f"`{path}`" for path in paths)


if __name__ == "__main__":
    write(Path(__file__).resolve().parents[4])
