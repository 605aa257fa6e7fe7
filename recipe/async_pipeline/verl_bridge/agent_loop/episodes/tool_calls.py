# SPDX-License-Identifier: Apache-2.0
"""Tool calls of verl's agent loop `tool_agent`: a tool that hangs or exits costs its episode, not the run.

verl tells the policy what a tool raised, and waits for a tool for as long as it takes. It runs tools that are
plain functions in the few threads of its event loop, so that some of them that hang stop all others.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from ....core.waits.deadline import GRACE_S, within
from ....core.waits.threads import in_new_thread
from ....errors import RolloutError
from .episode import current_attempt

CallTool = Callable[..., Awaitable[Any]]


def limited(call: CallTool, timeout_s: float | None) -> CallTool:
    """Return verl's `_call_tool`, but with a deadline, after which the episode ends as `deadline`.

    `timeout_s`: seconds for one call, None for no limit.
    Validation has the same deadline; its error is a WaitTimeout. Raises RolloutError if the tool called
    exit(), which in a separate task would end the process of all agent loops.
    """

    @wraps(call)
    async def call_tool(loop: Any, tool_call: Any, *args: Any, **kwargs: Any) -> Any:
        attempt = current_attempt()
        what = f"the tool {tool_call.name} to return (agentic.tool_timeout_s)"
        try:
            calling = call(loop, tool_call, *args, **kwargs)
            if attempt is None:
                return await within(calling, timeout_s, owner="an agent loop", what=what, grace_s=GRACE_S)
            return await attempt.within(calling, timeout_s, what=what, grace_s=GRACE_S)
        except SystemExit as error:
            raise RolloutError(f"the tool {tool_call.name} called exit({error.code})") from error

    return call_tool


async def call_function(tool: Any, parameters: dict[str, Any]) -> Any:
    """Call a tool that is a function, as verl does, but a plain one in a separate thread.

    A thread that hangs is left behind: it holds up no other tool, nor the end of the process.
    """
    if tool.is_async:
        return await tool.fn(**parameters)
    found = await in_new_thread(lambda: tool.fn(**parameters), f"tool {tool.name}")
    # A plain decorator around an async function hides that it is one.
    return await found if inspect.isawaitable(found) else found
