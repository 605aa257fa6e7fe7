# SPDX-License-Identifier: Apache-2.0
"""What commands write is bounded: the beginning, the end, and how much is missing."""

from __future__ import annotations

import random

from recipe.async_pipeline.agents.processes.commands import HEAD_BYTES, TAIL_BYTES, OutputLog


def test_short_output_is_whole() -> None:
    log = OutputLog()
    assert log.text() == ""
    for part in ("one\n", "zw", "ei\n"):
        log.write(part.encode())
    log.write("é".encode()[:1])
    assert log.text() == "one\nzwei\n�"


def test_of_long_output_the_beginning_and_the_end_are_kept() -> None:
    rng, log = random.Random(1), OutputLog()
    written = bytes(rng.choice(b"abcdef") for _ in range(5 * (HEAD_BYTES + TAIL_BYTES)))
    at = 0
    while at < len(written):
        size = rng.randint(1, 9000)
        log.write(written[at : at + size])
        at += size
    missing = len(written) - HEAD_BYTES - TAIL_BYTES
    head, tail = written[:HEAD_BYTES].decode(), written[-TAIL_BYTES:].decode()
    assert log.text() == f"{head}\n[... {missing} bytes are not kept ...]\n{tail}"


def test_output_that_just_fits_has_no_gap() -> None:
    log = OutputLog()
    log.write(b"a" * HEAD_BYTES)
    log.write(b"b" * TAIL_BYTES)
    assert log.text() == "a" * HEAD_BYTES + "b" * TAIL_BYTES
