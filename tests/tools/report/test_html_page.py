# SPDX-License-Identifier: Apache-2.0
"""A page loads nothing and its title is escaped."""

from __future__ import annotations

from recipe.async_pipeline.tools.report.html_page import page


def test_a_page_is_whole_and_loads_nothing() -> None:
    html = page("a & b", "<p>body</p>")
    assert html.startswith("<!doctype html>") and html.rstrip().endswith("</html>")
    assert "<title>a &amp; b</title>" in html and "<p>body</p>" in html
    assert " src=" not in html and "<link" not in html and "<style>" in html and "<script>" in html
