# SPDX-License-Identifier: Apache-2.0
"""The tool of the calculator task, for verl's agent loop `tool_agent`: how a call is written, and its answer.

verl executes a copy of this file in each agent loop worker (`rollout.multi_turn.function_tool_path`), so it
imports nothing of this package. `rollout.multi_turn.format` names the parser.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool

CALL = re.compile(r"\[([0-9]{1,9})\+([0-9]{1,9})\]")
"""As in `toy.calculator`."""
MOOD = "ASYNC_PIPELINE_MOOD"
"""Names a file; while it says raise or hang, one call in four does. For `async-pipeline soak`."""
_calls = 0


@ToolParser.register("brackets")
class BracketParser(ToolParser):  # type: ignore[misc]
    """A turn `[12+34]` is a call; any other text is an answer."""

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Any = None
    ) -> tuple[str, list[FunctionCall]]:
        """Return what remains of a turn without its call, and the call."""
        text = self.tokenizer.decode(responses_ids, skip_special_tokens=True)
        call = CALL.fullmatch(text)
        if call is None:
            return text, []
        arguments = json.dumps({"left": int(call[1]), "right": int(call[2])})
        return "", [FunctionCall(name="add", arguments=arguments)]


@function_tool
def add(left: int, right: int) -> str:
    """Add two numbers.

    Args:
        left: The first number.
        right: The second number.
    """
    _misbehave()
    return f"{left + right}>"


def _misbehave() -> None:
    global _calls
    _calls += 1
    file = Path(os.environ.get(MOOD, ""))
    if _calls % 4 or not file.is_file():
        return
    mood = file.read_text(encoding="utf-8")
    Path(f"{file}.seen").touch()
    if mood == "raise":
        raise RuntimeError("the control file requests an exception")
    while mood == "hang":
        time.sleep(1)
