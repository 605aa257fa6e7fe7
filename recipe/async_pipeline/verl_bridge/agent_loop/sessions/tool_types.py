# SPDX-License-Identifier: Apache-2.0
"""The type of an argument of a tool, from a JSON Schema as agents' frameworks write it. Pure.

Optional[int]    {"anyOf": [{"type": "integer"}, {"type": "null"}]}    integer
a model          {"$ref": "#/$defs/Point"}                             object
Literal["a"]     {"enum": ["a"]}, {"const": "a"}                       string
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ANY = "any"
"""The type of an argument about which a schema says nothing; parsers guess it from what the policy writes."""
OF_VALUES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
DEEPEST = 8
"""References and unions that are followed: a schema may refer to itself."""


def type_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> str:
    """Return the first type other than null that a value may have. `root`: holds the `$defs`."""
    if not isinstance(schema, Mapping) or depth > DEEPEST:
        return ANY
    named = schema.get("type")
    for name in named if isinstance(named, list) else [named]:
        if isinstance(name, str) and name != "null":
            return name
    if "$ref" in schema:
        return type_of(_referred(str(schema["$ref"]), root), root, depth + 1)
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, list):
            types = (OF_VALUES.get(type(value)) for value in values)
            return next((one for one in types if one is not None), ANY)
    for word in ("anyOf", "oneOf", "allOf"):
        options = schema.get(word)
        found = [type_of(one, root, depth + 1) for one in options] if isinstance(options, list) else []
        known = [one for one in found if one != ANY]
        if known:
            return known[0]
    return ANY


def _referred(name: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for part in name.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
