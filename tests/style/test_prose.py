# SPDX-License-Identifier: Apache-2.0
"""Code, tests, docs, configs and scripts use plain technical English."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import REPOSITORY, tracked_files

pytestmark = pytest.mark.style

# Measured: 83 per 10,000 words of prose in this repository before it was rewritten; 0.6 in anyio, h11,
# aiohttp, starlette, Ray's utilities and torch.distributed together. The comments name usual replacements.
DIALECT = (
    r"anew",  # again
    r"whoever|whomever",  # the caller, the stage, the user
    r"whom",
    r"nobody|somebody|anybody|everybody",  # no caller, a user
    r"ours|theirs",  # name the owner: "this package's", "verl's own"
    r"of (one's|its|their) own",  # "its own X", "a custom X"
    r"one's own",
    r"beside",  # next to, alongside, during, in addition to
    r"those (that|who|of)",  # repeat the noun
    r"whatever (is|are|was|were|has|it|they|he|the|a)",  # any X that
    r"(goes|go|going|went|gone) on",  # continues
    r"(goes|go|going|went) by",  # uses, follows
    r"(comes?|came|coming) (down )?to",  # equals, reduces to
    r"(is|are|was|were|be|been|being) (said|told|asked)",  # is reported, is requested
    r"wants",  # requires, expects
    r"mend(s|ed|ing)?",  # fix
    r"lies|stood",  # is in, was blocked
    r"once more",  # again
    r"all the same",
    r"there is none",  # there is no X
    r"from (now|then) on",
)
WORDS = re.compile(rf"\b({'|'.join(DIALECT)})\b", re.IGNORECASE)

READ = {".py", ".md", ".sh", ".toml", ".yaml", ".yml", ".in", ".css", ".js", ".mjs", ".patch", ".cff"}
READ_BY_NAME = {".ci/run", "patches/series", "run_scripts/cpu.in.txt", "run_scripts/cpu.overrides.txt"}
THIS = "tests/style/test_prose.py"


def text_files() -> list[str]:
    return [
        name
        for name in tracked_files()
        if (Path(name).suffix in READ or name in READ_BY_NAME) and name != THIS
    ]


def prose(name: str, text: str) -> str:
    """Return the prose of a file on one line: of Python only comments, strings and names of functions."""
    if name.endswith(".patch"):
        # Context and removed lines are verl's.
        text = "\n".join(line for line in text.splitlines() if not line.startswith((" ", "-")))
    if name.endswith(".py"):
        text = " ".join(_python_prose(text))
    return re.sub(r"\s+(#+ )?", " ", text)


def _python_prose(source: str) -> Iterator[str]:
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "COMMENT" or kind.startswith("FSTRING"):
            yield token.string.lstrip("# ")
        elif kind == "STRING":
            # Without prefix, quotes and f-string fields: a sentence may continue in the next literal.
            text = re.sub(r"^\w*(\"\"\"|'''|\"|')|(\"\"\"|'''|\"|')$", "", token.string)
            yield re.sub(r"\{[^{}]*\}", "{}", text)
        elif before == "def":
            yield token.string.replace("_", " ")
        elif kind in ("NAME", "OP"):
            yield "|"
        before = token.string


def dialect_in(name: str) -> list[str]:
    source = (REPOSITORY / name).read_text(encoding="utf-8")
    text = prose(name, source) if may_have_dialect(source) else ""
    return [f"{name}: …{text[max(0, hit.start() - 30) : hit.end() + 20]}…" for hit in WORDS.finditer(text)]


LITERAL_PREFIX = re.compile(r"\b[bfru]{1,2}(?=[\"'])", re.IGNORECASE)
NO_WORD = re.compile(r"[^A-Za-z0-9']+")


def may_have_dialect(source: str) -> bool:
    """Return whether the words of a file match, including its code.

    Much faster than the prose of each file.
    """
    return WORDS.search(NO_WORD.sub(" ", LITERAL_PREFIX.sub("", source))) is not None


@pytest.mark.slow
def test_the_repository_uses_plain_english() -> None:
    found = [line for name in text_files() for line in dialect_in(name)]
    assert not found, f"{len(found)} dialect words; see DIALECT for the replacements:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", "x = 1  # the run\n# goes\n# on\n"),
        ("a.py", 'raise ValueError("no replica of "\n"its own")\n'),
        ("a.py", "def test_nobody_waits(): ...\n"),
        ("a.py", '"""Work beside\n    the engine."""\n'),
        ("a.md", "The sum\ncomes to 3."),
        ("a.sh", "# What is\n# asked twice is asked twice.\n"),
    ],
)
def test_dialect_is_found_across_lines_and_in_names(name: str, text: str) -> None:
    assert may_have_dialect(text) and WORDS.search(prose(name, text))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", "ours = theirs.own_name\n"),
        ("a.py", "besides = 'besides'\n"),
        ("0001-x.patch", " # verl's line: whoever\n-# whoever\n+# the caller\n"),
    ],
)
def test_code_and_verl_s_own_lines_are_not_prose(name: str, text: str) -> None:
    assert not WORDS.search(prose(name, text))
