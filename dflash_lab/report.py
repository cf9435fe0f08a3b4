"""One HTML file a run, from its notebooks, and an index of runs: offline, interactive, nothing trusted.

Text is escaped wherever it came from, HTML outputs pass a short list of harmless tags and styles, and a
content security policy forbids the page to load anything.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dflash_lab.errors import InputError, StoreError
from dflash_lab.files import write_bytes
from dflash_lab.progress import duration
from dflash_lab.runs import closing_figures, closing_lines, closing_number, overview, run_folders, stage_table
from dflash_lab.secrets import redact

REPORT = "report.html"
LONGEST_OUTPUT = 20_000  # characters of one printed output
LONGEST_HTML = 400_000  # characters of one table or coloured text


def write_report(run: Path) -> Path:
    """Write `<run>/report.html` from the run's notebooks and results, and return its path."""
    if not run.is_dir():
        raise InputError(f"{run}: no such run folder. `dflash-lab runs` lists them.")
    table = stage_table(run.resolve().parent)
    stages = [row for row in table.iter_rows(named=True) if row["run"] == run.resolve().name]
    if not stages:
        raise InputError(f"{run}: holds no stage. Run one first: dflash-lab run {run.name}")
    closing = html.escape("\n".join(closing_lines(closing_figures(run))))
    body = [
        f"<h1>{html.escape(run.resolve().name)}</h1>",
        f'<pre style="white-space: pre-wrap">{closing}</pre>' if closing else "",
        _state_table(stages),
    ]
    figures = 0
    for row in stages:
        blocks = []
        for block, is_figure in _notebook_blocks(run, row, figures):
            figures += is_figure
            blocks.append(block)
        body.append(
            f'<section id="{html.escape(row["folder"])}">{"".join(blocks)}{_parameters(row)}</section>'
        )
    path = run / REPORT
    write_bytes(
        path, page(f"{run.resolve().name} - DFlash Lab", redact("\n".join(body)), figures > 0).encode()
    )
    return path


def write_index(root: Path) -> Path:
    """Write `<root>/index.html`: one row a run, each linked to its report."""
    rows = []
    for row in overview(root).iter_rows(named=True) if run_folders(root) else []:
        name = html.escape(row["run"], quote=True)
        link = (
            f'<a href="{quote(row["run"])}/{REPORT}">{name}</a>'
            if (root / row["run"] / REPORT).exists()
            else name
        )
        cells = [link, *(html.escape(_shown(value)) for key, value in row.items() if key != "run")]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    heads = "".join(f"<th>{name}</th>" for name in ("run", *_INDEX_HEADS))
    body = f"<h1>Runs</h1><table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    path = root / "index.html"
    write_bytes(path, page("Runs - DFlash Lab", body, False).encode())
    return path


_INDEX_HEADS = (
    "state",
    "stages",
    "last change (UTC)",
    "seconds",
    "samples",
    "tokens/s",
    "last loss",
    "tau trained",
    "tau untrained",
)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return closing_number(value)
    return f"{value:%Y-%m-%d %H:%M}" if hasattr(value, "strftime") else str(value)


def _state_table(stages: list[dict[str, Any]]) -> str:
    rows = []
    for row in stages:
        took = duration(row["seconds"]) if row["seconds"] is not None else ""
        peak = "" if row["peak_rss_gib"] is None else f"{row['peak_rss_gib']:.2f} GiB"
        cells = [row["state"], took, peak, row["message"][:300]]
        link = f'<a href="#{html.escape(row["folder"])}">{html.escape(row["folder"])}</a>'
        rows.append(f"<tr><td>{link}</td>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>")
    heads = "<tr><th>stage</th><th>state</th><th>took</th><th>peak memory</th><th></th></tr>"
    return f"<table><thead>{heads}</thead><tbody>{''.join(rows)}</tbody></table>"


def _parameters(row: dict[str, Any]) -> str:
    values = json.loads(row["parameters"])
    cells = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(json.dumps(value, ensure_ascii=False))}</td></tr>"
        for name, value in values.items()
    )
    return f"<details><summary>parameters</summary><table>{cells}</table></details>" if cells else ""


def _notebook_blocks(run: Path, row: dict[str, Any], first: int) -> Iterator[tuple[str, bool]]:
    """Yield (html, is a figure) for the prose, figures and printed results of a stage's executed notebook."""
    path = run / f"{row['folder']}.ipynb"
    if not path.exists():
        told = "No executed notebook here."
        if row["state"] == "finished":  # by hand, in JupyterLab
            stage, _, shard = path.stem.partition("-")
            typed = f"dflash-lab {stage} --run {run.resolve().name}{f' -p shard {shard}' if shard else ''}"
            told += (
                f" <code>{html.escape(typed)}</code> makes it, with its figures, of the finished result "
                f"within seconds; then <code>dflash-lab report {html.escape(str(run))}</code> again."
            )
        yield f"<h2>{html.escape(path.stem)}</h2><p>{told}</p>", False
        return
    import nbformat

    try:
        notebook = nbformat.read(path, as_version=4)
    except (OSError, ValueError, nbformat.ValidationError) as error:
        raise StoreError(
            f"{path}: not a notebook ({str(error)[:200]}). Remove it and run the stage again."
        ) from error
    number = first
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            yield _prose(cell.source), False
        for output in cell.get("outputs", []):
            block, is_figure = _output_block(output, number)
            number += is_figure
            yield block, is_figure


def _prose(source: str) -> str:
    import mistune

    return str(mistune.create_markdown(escape=True, plugins=["table"])(source))


def _output_block(output: dict[str, Any], number: int) -> tuple[str, bool]:
    kind = output.get("output_type")
    if kind == "error":
        text = f"{output.get('ename', '')}: {output.get('evalue', '')}"
        return f'<pre class="error">{html.escape(text[:LONGEST_OUTPUT])}</pre>', False
    if kind == "stream" and output.get("name") == "stdout":
        return f"<pre>{html.escape(output['text'][:LONGEST_OUTPUT])}</pre>", False
    data = output.get("data", {})
    if "application/vnd.plotly.v1+json" in data:
        return figure_block(data["application/vnd.plotly.v1+json"], number), True
    if "text/html" in data:
        return harmless(data["text/html"][:LONGEST_HTML]), False
    if "text/markdown" in data:
        return _prose(data["text/markdown"]), False
    if "text/plain" in data:
        return f"<pre>{html.escape(data['text/plain'][:LONGEST_OUTPUT])}</pre>", False
    return "", False


# --- The page: style for light and dark, one copy of plotly.js, figures as data

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
