# SPDX-License-Identifier: Apache-2.0
"""Print the parameters of the installed clients of OpenAI and Anthropic as JSON, by the path of the requests.

    python client_parameters.py

Imports nothing of this repository.
"""

from __future__ import annotations

import json
from typing import Any


def client_parameters() -> dict[str, set[str]]:
    """Return the parameters, with the ones of the beta resources."""
    from anthropic.types.beta.message_create_params import (
        MessageCreateParamsNonStreaming as BetaMessages,
    )
    from anthropic.types.message_create_params import MessageCreateParamsNonStreaming as Messages
    from openai.types.beta.response_create_params import (
        ResponseCreateParamsNonStreaming as BetaResponses,
    )
    from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as Chat
    from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as Completions
    from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming as Responses

    return {
        "/v1/chat/completions": _names(Chat),
        "/v1/messages": _names(Messages) | _names(BetaMessages),
        "/v1/responses": _names(Responses) | _names(BetaResponses),
        "/v1/completions": _names(Completions),
    }


def _names(kind: Any) -> set[str]:
    return {name for one in (kind, *kind.__orig_bases__) for name in getattr(one, "__annotations__", {})}


if __name__ == "__main__":
    print(json.dumps({path: sorted(names) for path, names in client_parameters().items()}))  # noqa: T201
