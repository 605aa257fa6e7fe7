# SPDX-License-Identifier: Apache-2.0
"""Check what holds for every page: it is well-formed, self-contained and accessible."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from markupsafe import Markup

from recipe.async_pipeline.tools.report.html_page import TEMPLATES, page

VOID = {"meta", "link", "br", "img", "input", "hr"}
SELF_CLOSING = {"rect", "path"}


class Page(HTMLParser):
    """A parser that checks nesting; `tags` has all tags, `texts` the text outside of scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], f"unclosed tags: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"{tag} has a duplicate attribute: {names}"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in SELF_CLOSING, f"<{tag}/> is not closed in HTML"
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> does not match the open tag"

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data.strip())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def check(html: str) -> Page:
    """Check a page. Returns it parsed."""
    assert html.startswith("<!doctype html>")
    page = Page(html)
    for tag, attrs in page.tags:
        inside = {name for name, value in attrs.items() if str(value).startswith("data:image/png;base64,")}
        assert not {"src", "href", "srcset", "action"} & (attrs.keys() - inside), (
            f"<{tag}> refers to an external resource"
        )
        numbers = [
            str(value) for name, value in attrs.items() if name in ("x", "y", "width", "height", "d", "style")
        ]
        assert not any(re.search(r"nan|inf|None", value) for value in numbers), (tag, numbers)

    assert not re.search(r"https?://|url\(|@import", html), "the page fetches nothing"
    assert [attrs.get("lang") for attrs in page.all("html")] == ["en"]
    assert len(page.all("h1")) == 1

    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids)), "ids are unique"
    for attrs in page.all("section"):
        assert attrs.get("aria-labelledby") in ids
    for attrs in page.all("svg"):
        assert attrs.get("aria-hidden") == "true", "each figure has a text description"
    assert html.count("<figure") == html.count("<figcaption>")
    return page


def page_of(body: Markup) -> str:
    """Return a page with one section."""
    heading = Markup("<h1>run</h1>")
    section = Markup('<section aria-labelledby="part"><h2 id="part">part</h2>{}</section>').format(body)
    return page(f"{TEMPLATES}/base.html", title="run", body=heading + section)
