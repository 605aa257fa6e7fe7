# SPDX-License-Identifier: Apache-2.0
"""Hide secrets in everything that a run writes: tracker configs, `run.log`, and messages about keys.

A secret is recognised by its name (`api_key`, `hf_token`, `password`). Three kinds of text are replaced:
the value under such a key, the value of every environment variable with such a name, and the password in a
URL. A secret under any other name is not detected.
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
_TOKENIZER_TOKEN = re.compile(
    r"(?:.*[_.-])?(?:pad|eos|bos|unk|mask|sep|cls|image|video|audio|stop|special|per|think)_token",
    re.IGNORECASE,
)
_PAIR = re.compile(
    r"""(?<![\w.-])(?P<key>[\w.-]{1,100})(?P<between>["']?\s{0,9}[:=]\s{0,9})(?:(?P<quote>["'])(?P<quoted>.{0,2000}?)(?P=quote)|(?P<bare>[^\s"',}\])]+))"""
)
_VARIABLE = re.compile(r"[A-Z0-9_]+_(?:KEY|PASS|PWD)")
"""Names of environment variables that count as secrets in addition to `_KEY`."""
_IN_URL = re.compile(r"(?<=://)([^\s/@:\"']{1,100}):[^\s/@\"']{1,200}(?=@)")
_HARMLESS = re.compile(r"(?:none|null|true|false|[\d.]*|\*+)", re.IGNORECASE)
MIN_LENGTH = 8
"""Shortest environment value, in characters, that is searched for; a shorter one could match common words."""


def looks_secret(key: str) -> bool:
    """Return whether `key` looks like the name of a secret."""
    return _KEY.fullmatch(key) is not None and _TOKENIZER_TOKEN.fullmatch(key) is None


def shown(key: str, value: Any) -> str:
    """Return the repr of a value for use in a message, redacted if `key` names a secret."""
    return repr(redacted({key.rpartition(".")[2]: value})[key.rpartition(".")[2]])


def redacted(value: Any) -> Any:
    """Return a copy of nested mappings and lists, with the text under secret keys replaced."""
    if isinstance(value, Mapping):
        return {
            key: _hidden(inner) if isinstance(key, str) and looks_secret(key) else redacted(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [redacted(inner) for inner in value]
    return value


def hider_of(environment: Mapping[str, str], *, for_programs: bool = False) -> Callable[[str], str]:
    """Return a function that replaces the secrets of `environment`, and passwords in URLs, in a text.

    Plain and JSON-escaped forms of each value are replaced. With `for_programs`, values such as numbers and
    booleans are left alone.
    """
    secret = [value for name, value in environment.items() if looks_secret(name) or _VARIABLE.fullmatch(name)]

    # In text that a program parses, a short number would also match inside other numbers.
    long = [
        value
        for value in secret
        if len(value) >= MIN_LENGTH and not (for_programs and _HARMLESS.fullmatch(value))
    ]
    values = {
        form
        for value in long
        for form in (value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1])
    }

    # Longest first: one value may contain another.
    found = re.compile("|".join(re.escape(value) for value in sorted(values, key=len, reverse=True)))

    def hide(text: str) -> str:
        # Most texts have neither, and searching them character by character takes longer than writing them.
        if values:
            text = found.sub(HIDDEN, text)
        return _IN_URL.sub(rf"\1:{HIDDEN}", text) if "://" in text else text

    return hide


@cache
def _hider_of_this_process() -> Callable[[str], str]:
    """Return the redaction function for the environment of this process."""
    return hider_of(os.environ, for_programs=True)


def without_secrets(text: str) -> str:
    """Return `text` with the secrets of this process's environment replaced."""
    return _hider_of_this_process()(text)


class RedactedStream:
    """A text stream that hides secrets before it writes to `stream`."""

    def __init__(self, stream: TextIO, environment: Mapping[str, str]) -> None:
        self._stream, self._redactor = stream, LineRedactor(environment)
        self._rest, self._lock = "", threading.Lock()

    def write(self, text: str) -> int:
        """Buffer `text` and write the complete lines; `flush` writes the rest.

        Whole lines are needed because a secret may arrive in pieces.
        """
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            self._stream.writelines(f"{self._redactor.line(line)}\n" for line in lines)
        return len(text)

    def flush(self) -> None:
        """Write the incomplete last line and flush the underlying stream."""
        with self._lock:
            self._stream.write(self._redactor.line(self._rest))
            self._rest = ""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def hide_in_output() -> None:
    """Redact all further output of this process to stdout and stderr."""
    sys.stdout, sys.stderr = (RedactedStream(stream, os.environ) for stream in (sys.stdout, sys.stderr))  # type: ignore[assignment]


class LineRedactor:
    """Redacts lines of text that other programs wrote."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Create a redactor for the secrets in `environment`."""
        self._hide = hider_of(environment)

    def line(self, text: str) -> str:
        """Return the line with secrets replaced."""
        return _PAIR.sub(_replaced, self._hide(text))


def _hidden(value: Any) -> Any:
    """Return `value` with every leaf hidden, except None, booleans and empty strings."""
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
