# SPDX-License-Identifier: Apache-2.0
"""Tool calls of gpt-oss in every spelling of its format, for all agent loops.

The recipient follows the role or the channel, and the type of the arguments may lack its mark or be absent:

    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>commentary to=functions.f json<|message|>{}<|call|>
    <|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>

verl's parser reads the first one; of an answer with another one, neither a text nor a call would be left.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.tool_parser import GptOssToolParser, ToolParser

RECIPIENT = r"\s+to=functions\.([^\s<]+)"
CALL = (
    # The prompt may end with the beginning. `(?|` numbers the groups of both branches alike.
    r"(?s)(?:<\|start\|>assistant)?"
    rf"(?|{RECIPIENT}\s*<\|channel\|>[^<]*|<\|channel\|>[^<]*{RECIPIENT}[^<]*)"
    r"(?:<\|constrain\|>[^<]*)?<\|message\|>(.*?)<\|call\|>"
)
"""A pattern of the module `regex`, with the name and the arguments as its groups."""


@ToolParser.register("gpt-oss")
class HarmonyToolParser(GptOssToolParser):  # type: ignore[misc]
    """verl's parser with a pattern for all spellings."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.tool_call_pattern = CALL
