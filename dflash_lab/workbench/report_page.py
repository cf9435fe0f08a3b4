"""The shell of a report page: style for light and dark, one copy of plotly.js, figures as data."""

from __future__ import annotations

import html
import json
import re
from typing import Any

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

_TAGS = frozenset(
    "b br code div em h3 h4 i li ol p pre small span strong table tbody td th thead tr ul".split()  # noqa: SIM905
)
_LOOKS = ["background", "background-color", "border", "border-radius", "color", "font-size", "font-style"]
_LOOKS += ["font-weight", "line-height", "margin", "max-width", "padding", "text-align", "white-space"]

_STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.5 system-ui, Helvetica, Arial, sans-serif; max-width: 1060px; margin: 2rem auto; padding:
0 1rem; } h1 { font-size: 1.7rem; } h2 { font-size: 1.25rem; } section { border-top: 1px solid var(--line);
margin-top: 2rem; } table { border-collapse: collapse; margin: 1rem 0; font-size: 14px; display: block;
overflow-x: auto; } td, th { padding: 0.25rem 0.75rem; border-bottom: 1px solid var(--line); text-align: left;
vertical-align: top; } pre { background: #8881; padding: 0.75rem; overflow-x: auto; font-size: 13px;
line-height: 1.35; border-radius: 4px; } pre.error { border-left: 4px solid #D55E00; }
code { font-size: 0.92em; } .figure { margin: 1rem 0; } .html { overflow-x: auto; margin: 1rem 0; }
"""

_DRAW = """
for (const data of document.querySelectorAll('script[type="application/json"]')) {
    const figure = JSON.parse(data.textContent);
    Plotly.newPlot(data.previousElementSibling, figure.data, figure.layout, {responsive: true, displaylogo:
    false});
}
"""


def page(title: str, body: str, with_figures: bool) -> str:
    """Return a whole HTML page; plotly.js is put in once, and only if there is a figure to draw."""
    scripts = ""
    if with_figures:
        from plotly.offline import get_plotlyjs

        scripts = f"<script>{get_plotlyjs()}</script><script>{_DRAW}</script>"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body>{body}{scripts}</body></html>\n"
    )


def harmless(content: str) -> str:
    """Return HTML with only plain tags, titles and a few styles; everything else is dropped, its text
    escaped.
    """
    import bleach
    from bleach.css_sanitizer import CSSSanitizer

    content = re.sub(r"(?is)<(style|script)\b.*?</\1\s*>", "", content)
    looks = CSSSanitizer(allowed_css_properties=_LOOKS)
    cleaned = bleach.clean(content, _TAGS, {"*": ["style", "title"]}, css_sanitizer=looks, strip=True)
    return f'<div class="html">{cleaned}</div>'


def figure_block(figure: dict[str, Any], number: int) -> str:
    """Return the place of a figure and its data; `<` is written so that no text in it can end the script."""
    data = {"data": figure.get("data", []), "layout": figure.get("layout", {})}
    content = (
        json.dumps(data).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    )
    return (
        f'<div class="figure" id="figure-{number}"></div><script type="application/json">{content}</script>'
    )
