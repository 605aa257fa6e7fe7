# SPDX-License-Identifier: Apache-2.0
"""Self-contained HTML pages from templates: no network access, no library in the page.

Templates escape every text; what is `Markup` is HTML already.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ...observe.table import percent
from .drawing.wording import seconds

TEMPLATES = "tools/report/templates"


def sentence(text: str) -> str:
    """Return a text as a sentence."""
    return text[:1].upper() + text[1:] + "."


@cache
def environment() -> Environment:
    """Return the environment of the templates, which are named relative to the package."""
    made = Environment(
        loader=PackageLoader("recipe.async_pipeline", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"percent": percent, "seconds": seconds, "sentence": sentence}
    return made


def page(template: str, *, title: str, **values: Any) -> str:
    """Return a complete HTML document with its style and script; `template` extends base.html."""
    here = files(__package__)
    style, script = (
        Markup(here.joinpath(name).read_text(encoding="utf-8")) for name in ("report.css", "report.js")
    )
    return environment().get_template(template).render(title=title, style=style, script=script, **values)


def part(name: str, *arguments: Any, file: str = "parts") -> Markup:
    """Return what the macro `name` of a file of templates makes of its arguments."""
    macros = environment().get_template(f"{TEMPLATES}/{file}.html").module
    return Markup(getattr(macros, name)(*arguments))
