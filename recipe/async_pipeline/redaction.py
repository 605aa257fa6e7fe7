# SPDX-License-Identifier: Apache-2.0
"""Keeps secrets out of what a run writes: configs for trackers, `run.log`, and messages about keys.

A key that looks like one of a secret (`api_key`, `hf_token`, `password`) has its text replaced; so has, in
lines of
output and in the files of a run, the value of every environment variable with such a name, and the password
of a URL. What
does not look like a secret is not found.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TextIO

HIDDEN = "***"
_SERVICES = (
    r"(?:wandb|openai|anthropic|azure|aws|gcp|google|hf|huggingface|swanlab|mlflow|comet|neptune|clearml)"
    r"(?:[_-][a-z0-9]+)*"
)
_NAMES = (
    rf"(?:(?:api|access|secret|private|ssh|encryption|{_SERVICES})[_-]?keys?|secrets?|credentials?|authorization|auth|bearer|cookies?"
    r"|passwords?|passphrases?|passwd|[a-z0-9]+[_-]pwd)"
)
_TOKEN = (
    r"(?:(?:[a-z0-9]+[_-])*"
    r"(?:auth|access|api|bearer|hf|hub|refresh|session|wandb|github|slack|http|security)[_-]?)?token"
)
_KEY = re.compile(rf"(?:.*[_.-])?(?:{_NAMES}|{_TOKEN})", re.IGNORECASE)
_OF_A_TOKENIZER = re.compile(
    r"(?:.*[_.-])?(?:pad|eos|bos|unk|mask|sep|cls|image|video|audio|stop|special|per|think)_token",
    re.IGNORECASE,
)
_PAIR = re.compile(
    r"""(?<![\w.-])(?P<key>[\w.-]{1,100})(?P<between>["']?\s{0,9}[:=]\s{0,9})(?:(?P<quote>["'])(?P<quoted>.{0,2000}?)(?P=quote)|(?P<bare>[^\s"',}\])]+))"""
)
_VARIABLE = re.compile(r"[A-Z0-9_]+_(?:KEY|PASS|PWD)")
"""An environment variable whose name says less than a key of ours has to."""
_IN_URL = re.compile(r"(?<=://)([^\s/@:\"']{1,100}):[^\s/@\"']{1,200}(?=@)")
_HARMLESS = re.compile(r"(?:none|null|true|false|[\d.]*|\*+)", re.IGNORECASE)
LEAST_LENGTH = 8
"""Of a value of the environment that is looked for; a shorter one would hide innocent words."""


def looks_secret(key: str) -> bool:
    """Is this the name of something that nobody else may know?"""
    return _KEY.fullmatch(key) is not None and _OF_A_TOKENIZER.fullmatch(key) is None


def shown(key: str, value: Any) -> str:
    """A value as it may stand in a message."""
    return repr(redacted({key.rpartition(".")[2]: value})[key.rpartition(".")[2]])


def redacted(value: Any) -> Any:
    """A copy of nested mappings and lists, without the texts under keys that look like secrets."""
    if isinstance(value, Mapping):
        return {
            key: _hidden(inner) if isinstance(key, str) and looks_secret(key) else redacted(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [redacted(inner) for inner in value]
    return value


def hider_of(environment: Mapping[str, str], *, for_programs: bool = False) -> Callable[[str], str]:
    """What replaces the values of an environment's secrets in a text, JSON or not, and passwords of URLs."""
    secret = [value for name, value in environment.items() if looks_secret(name) or _VARIABLE.fullmatch(name)]
    # In what a program reads, a number would be found within other numbers.
    long = [
        value
        for value in secret
        if len(value) >= LEAST_LENGTH and not (for_programs and _HARMLESS.fullmatch(value))
    ]
    values = {
        form
        for value in long
        for form in (value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1])
    }
    # The longest first: one may be part of another.
    found = re.compile(
        "|".join(re.escape(value) for value in sorted(values, key=len, reverse=True)) or r"(?!)"
    )
    return lambda text: _IN_URL.sub(rf"\1:{HIDDEN}", found.sub(HIDDEN, text))


@cache
def _hider_of_this_process() -> Callable[[str], str]:
    return hider_of(os.environ, for_programs=True)


def without_secrets(text: str) -> str:
    """A text that this process is about to write, such as an error of somebody else's code."""
    return _hider_of_this_process()(text)


class RedactedStream:
    """A stream of text that somebody else keeps, such as the output of a process that Ray keeps for weeks."""

    def __init__(self, stream: TextIO, environment: Mapping[str, str]) -> None:
        self._stream, self._redactor = stream, LineRedactor(environment)
        self._rest, self._lock = "", threading.Lock()

    def write(self, text: str) -> int:
        """A line is looked at as a whole, and so is written once it is one, or at `flush`."""
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            self._stream.writelines(f"{self._redactor.line(line)}\n" for line in lines)
        return len(text)

    def flush(self) -> None:
        with self._lock:
            self._stream.write(self._redactor.line(self._rest))
            self._rest = ""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def hide_in_output() -> None:
    """From here on, what this process prints has no secrets."""
    sys.stdout, sys.stderr = (RedactedStream(stream, os.environ) for stream in (sys.stdout, sys.stderr))  # type: ignore[assignment]


class LineRedactor:
    """For lines of text that others have written."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment`: variables whose values must not be seen, if their names look like secrets."""
        self._hide = hider_of(environment)

    def line(self, text: str) -> str:
        """The line, with secrets replaced."""
        return _PAIR.sub(_replaced, self._hide(text))


def _hidden(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _hidden(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(inner) for inner in value]
    return value if value is None or isinstance(value, bool) or value == "" else HIDDEN


def _replaced(found: re.Match[str]) -> str:
    value = found["quoted"] if found["quote"] else found["bare"]
    if not looks_secret(found["key"]) or _HARMLESS.fullmatch(value):
        return found[0]
    quote = found["quote"] or ""
    return f"{found['key']}{found['between']}{quote}{HIDDEN}{quote}"
