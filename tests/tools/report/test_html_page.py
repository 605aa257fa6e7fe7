# SPDX-License-Identifier: Apache-2.0
"""A page loads nothing, and whatever text it is given is text."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from recipe.async_pipeline.tools.report.html_page import TEMPLATES, page, part
from tests import REPOSITORY

BASE = f"{TEMPLATES}/base.html"


def test_a_page_is_whole_and_loads_nothing() -> None:
    html = page(BASE, title="a & b", body=Markup("<p>body</p>"))
    assert html.startswith("<!doctype html>") and html.rstrip().endswith("</html>")
    assert "<title>a &amp; b</title>" in html and "<p>body</p>" in html
    assert " src=" not in html and "<link" not in html and "<style>" in html and "<script>" in html
    assert "const tip" in html and "&amp;&amp;" not in html, "the script is not escaped"


def test_text_is_escaped_wherever_a_template_has_it() -> None:
    assert "<p>&lt;b&gt;</p>" in page(BASE, title="", body=Markup("<p>{}</p>").format("<b>"))
    assert "&lt;b&gt;" in part("figure", "<b>", Markup("<i></i>"), "<b>", "<b>", False)
    assert "<b>" not in part("table", ("<b>",), [("<b>", "<b>")], "")


def test_a_value_that_is_missing_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="body"):
        page(BASE, title="a")


def test_the_wheel_has_every_template() -> None:
    packaged = (REPOSITORY / "setup.py").read_text(encoding="utf-8")
    root = files("recipe.async_pipeline")
    templates = [path for path in (REPOSITORY / "recipe").rglob("*.html")]
    assert templates
    for path in templates:
        folder = ".".join(path.relative_to(REPOSITORY).parent.parts).removesuffix(".templates")
        listed = re.search(rf'"{re.escape(folder)}": \[(.*)\]', packaged)
        assert listed, path
        assert f"templates/*{path.suffix}" in listed[1] or path.name in listed[1], path
        assert root.joinpath(path.relative_to(REPOSITORY / "recipe" / "async_pipeline").as_posix()).is_file()
