# SPDX-License-Identifier: Apache-2.0
"""The APIs that agents may use. Another one is a module with a `wire.Dialect` and a line here."""

from __future__ import annotations

from ..wire import Dialect
from .anthropic_messages import AnthropicMessages
from .openai_chat import OpenAIChat
from .openai_responses import OpenAIResponses

DIALECTS: tuple[Dialect, ...] = (OpenAIChat(), AnthropicMessages(), OpenAIResponses())
