# SPDX-License-Identifier: Apache-2.0
"""Hundreds of agents at once: no conversation is lost or mixed up."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path

import pytest

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.gateway.sessions import Session, SessionLimits
from recipe.async_pipeline.gateway.turns import Ask
from recipe.async_pipeline.lab.bench import gateway

pytest.importorskip("uvicorn")


def run(*words: str) -> int:
    parser = ArgumentParser()
    gateway.add_arguments(parser)
    return gateway.run(parser.parse_args(words))


@pytest.mark.slow
def test_512_sessions_of_5_turns(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    run("--bytes", "100", "--json", str(out))
    found = json.loads(out.read_text())
    assert (found["sessions"], found["turns"], found["wrong"]) == (512, 5, 0)
    assert found["stall_s"] > 0
    assert found["cpu_ms_per_request"] > 0 and found["memory_mib"] < 500
    for name in ("cpu_ms_per_request", "stall_s", "memory_mib", "seconds"):
        assert found[name] == round(found[name], 4)


async def test_a_wrong_row_is_found() -> None:
    policy = gateway.BytePolicy()
    session = Session(policy, SessionLimits(prompt_tokens=99, response_tokens=99))
    assert gateway.wrong_rows(session, policy, 1) == 1
    await session.turn(Ask([{"role": "user", "content": "q"}], []))
    assert gateway.wrong_rows(session, policy, 1) == 0
    assert gateway.wrong_rows(session, policy, 2) == 1
    policy.prompts[0] = [1]
    assert gateway.wrong_rows(session, policy, 1) == 1


@pytest.mark.parametrize("option", ["--sessions", "--turns", "--bytes"])
def test_options_are_checked(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} must be >= 1, got 0"):
        run(option, "0")
