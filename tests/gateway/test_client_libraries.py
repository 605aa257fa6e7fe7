# SPDX-License-Identifier: Apache-2.0
"""Client libraries at their defaults, in their own environment, play one episode each."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from recipe.async_pipeline.gateway.dialects import DIALECTS, GROUPS
from recipe.async_pipeline.gateway.sessions import SessionLimits
from tests import REPOSITORY
from tests.fakes.agent_policy import FakePolicy
from tests.fakes.client_parameters import client_parameters
from tests.fakes.served_gateway import served

PROGRAM = REPOSITORY / "tests" / "fakes" / "client_libraries.py"
PARAMETERS = PROGRAM.with_name("client_parameters.py")
LIMITS = SessionLimits(prompt_tokens=100_000, response_tokens=200_000)
OFF = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "PYDANTIC_DISABLE_PLUGINS": "__all__",
}
"""What the libraries send elsewhere, and nothing else of their defaults."""
CALL, ANSWER = '[add {"x": 2, "y": 3}]', "5"
TYPED = '{"value": 5}'
TOOLS = (CALL, ANSWER)


class Case(NamedTuple):
    """An agent, and what the policy says to it."""

    name: str
    client: str
    """A package of client_libraries.txt."""
    feature: str
    answers: Sequence[str]
    rows: int = 1
    """Conversations, which are the rows of training."""
    forms: int = 0
    """Requests for an answer with a form."""


CASES = (
    Case("openai_chat", "openai", "chat completions", TOOLS),
    Case("openai_chat_typed", "openai", "`chat.completions.parse`", (TYPED,), forms=1),
    Case("openai_responses", "openai", "responses", TOOLS),
    Case("anthropic_messages", "anthropic", "messages", TOOLS),
    Case("anthropic_tool_runner", "anthropic", "`beta.messages.tool_runner`", TOOLS),
    Case("litellm", "litellm", "`completion`", TOOLS),
    Case("langchain", "langchain", "`create_agent`", TOOLS),
    Case(
        "langchain_typed",
        "langchain",
        "`create_agent`, `response_format`",
        (CALL, f"[Sum {TYPED}]"),
        forms=2,
    ),
    Case("langchain_structured", "langchain-openai", "`with_structured_output`", (TYPED,), forms=1),
    Case(
        "langgraph_typed",
        "langgraph",
        "`create_react_agent`, `response_format`",
        (*TOOLS, TYPED),
        rows=2,
        forms=1,
    ),
    Case("pydantic_ai", "pydantic-ai-slim", "tool", TOOLS),
    Case(
        "pydantic_ai_typed", "pydantic-ai-slim", "`output_type`", (CALL, f"[final_result {TYPED}]"), forms=2
    ),
    Case("pydantic_ai_native", "pydantic-ai-slim", "`NativeOutput`", (CALL, TYPED), forms=2),
    Case("openai_agents", "openai-agents", "tool", TOOLS),
    Case("openai_agents_typed", "openai-agents", "`output_type`", (CALL, TYPED), forms=2),
    Case(
        "openai_agents_chat_typed",
        "openai-agents",
        "`output_type`, chat completions",
        (CALL, TYPED),
        forms=2,
    ),
    Case(
        "smolagents_tools",
        "smolagents",
        "`ToolCallingAgent`",
        (CALL, '[final_answer {"answer": "5"}]'),
        rows=2,
        forms=2,
    ),
    Case(
        "smolagents_code",
        "smolagents",
        "`CodeAgent`",
        ("I add.\n<code>\nprint(add(2, 3))\n</code>", "<code>\nfinal_answer(5)\n</code>"),
        rows=2,
    ),
)


def client_table() -> str:
    """Return the cases as a table of Markdown."""
    packages = PROGRAM.with_suffix(".txt").read_text(encoding="utf-8")
    versions = dict(re.findall(r"^([\w-]+).*==(\S+)$", packages, re.MULTILINE))
    head = ["client", "feature", "requests", "with a form", "rows of training", "encoded again"]
    rows = [
        [
            f"{one.client} {versions[one.client]}",
            one.feature,
            *map(str, (len(one.answers), one.forms, one.rows, 0)),
        ]
        for one in CASES
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---"] * len(head), *rows])


def test_the_page_has_the_table_of_clients() -> None:
    page = (REPOSITORY / "docs" / "agents.md").read_text(encoding="utf-8")
    assert client_table() in page, "run `bash run_scripts/fix.sh`"


@pytest.fixture(scope="module")
def python() -> str:
    """Return the interpreter of the clients' environment, which is made on first use."""
    requirements = PROGRAM.with_suffix(".txt")
    script = REPOSITORY / "run_scripts" / "agent_venv.sh"
    done = subprocess.run(["bash", str(script), str(requirements)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def check_known(names_of_path: Mapping[str, Iterable[str]]) -> None:
    """Require that the gateway says what it does with each parameter."""
    for dialect in DIALECTS:
        known = {name for group in GROUPS for name in getattr(dialect.parameters, group)}
        assert set(names_of_path[dialect.path]) - known == set(), dialect.path


def test_the_parameters_of_the_clients_are_known() -> None:
    pytest.importorskip("openai")
    pytest.importorskip("anthropic")
    check_known(client_parameters())


@pytest.mark.nightly
def test_the_parameters_of_the_declared_clients_are_known(python: str) -> None:
    done = subprocess.run([python, str(PARAMETERS)], capture_output=True, text=True, check=True)
    check_known(json.loads(done.stdout))


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_a_library_at_its_defaults_plays_an_episode(case: Case, python: str, tmp_path: Path) -> None:
    policy = FakePolicy(*case.answers)
    async with served(policy, LIMITS) as at:
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "OPENAI_BASE_URL": f"{at.url}/v1",
            "OPENAI_API_KEY": at.session.keys.model,
            "ANTHROPIC_BASE_URL": at.url,
            "ANTHROPIC_API_KEY": at.session.keys.model,
            **OFF,
        }
        process = await asyncio.create_subprocess_exec(
            python,
            str(PROGRAM),
            case.name,
            env=env,
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()[-3000:]
        assert out.decode().split()[-1:] == ["5"], out
        rows = at.session.rows()
        counts = at.session.counts
        forms = sum(form is not None for form in policy.forms)
    assert sum(row.answers for row in rows) == len(case.answers), "all answers are trained"
    assert (len(rows), counts.tokenized_again, forms) == (case.rows, 0, case.forms)
