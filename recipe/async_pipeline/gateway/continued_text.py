# SPDX-License-Identifier: Apache-2.0
"""The texts that a session has continued without a chat template, and their tokens. Pure."""

from __future__ import annotations

from .conversation import Said


class ContinuedText:
    """A text with its continuations, each as what it adds: a long conversation takes linear memory."""

    def __init__(self, token_ids: list[int] | None = None) -> None:
        """`token_ids`: what it adds to the text before it."""
        self._token_ids = token_ids or []
        self._after: dict[str, ContinuedText] = {}

    def known(self, text: str) -> tuple[int, list[int]]:
        """Return how many characters of a text have known tokens, and these tokens."""
        return self._find(text)[1:]

    def note(self, prompt: str, said: Said, token_ids: list[int]) -> None:
        """Note the tokens of a text and its continuation, with which an agent may begin another text."""
        node, at, known = self._find(prompt)
        added = ContinuedText(token_ids[len(known) :])
        rest = prompt[at:] + said.text
        # The agent may or may not repeat the stop text.
        node._after |= {one: added for one in (rest, rest + (said.stop or "")) if one}

    def _find(self, text: str) -> tuple[ContinuedText, int, list[int]]:
        """Return the longest text with which this one begins, its length, and its tokens."""
        node, at, token_ids = self, 0, list(self._token_ids)
        while rest := max((one for one in node._after if text.startswith(one, at)), key=len, default=""):
            node, at = node._after[rest], at + len(rest)
            token_ids += node._token_ids
        return node, at, token_ids
