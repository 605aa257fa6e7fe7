# SPDX-License-Identifier: Apache-2.0
"""A self-contained HTML page: no network access, no library."""

from __future__ import annotations

from html import escape
from importlib.resources import files


def page(title: str, body: str) -> str:
    """Return a complete HTML document with its style and script."""
    here = files(__package__)
    style, script = (here.joinpath(name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" '
        'content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light '
        f'dark">\n<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n'
        f'<body>\n<main>\n{body}\n</main>\n<div id="tip" '
        f"hidden></div>\n<script>\n{script}</script>\n</body>\n</html>\n"
    )
