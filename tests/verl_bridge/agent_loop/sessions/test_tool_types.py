# SPDX-License-Identifier: Apache-2.0
"""An argument has the type that its schema means, in whichever words a framework writes it."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.verl_bridge.agent_loop.sessions.tool_types import ANY, type_of

ROOT = {
    "$defs": {
        "Point": {"type": "object"},
        "Color": {"enum": ["red"]},
        "Loop": {"$ref": "#/$defs/Loop"},
    }
}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer"}, "integer"),
        ({"type": ["null", "number"]}, "number"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "integer"),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Point"}]}, "object"),
        ({"oneOf": [{"type": "array"}]}, "array"),
        ({"allOf": [{"$ref": "#/$defs/Color"}], "default": "red"}, "string"),
        ({"enum": [None, 3]}, "integer"),
        ({"const": True}, "boolean"),
        ({"$ref": "#/$defs/Loop"}, ANY),
        ({"$ref": "#/$defs/None"}, ANY),
        ({"anyOf": [{"anyOf": 3}]}, ANY),
        ({}, ANY),
        (True, ANY),
    ],
)
def test_the_type_of_an_argument(schema: Any, expected: str) -> None:
    assert type_of(schema, ROOT) == expected
