"""Answers as coloured text: which tokens were drafted, and what was drafted where the target disagreed."""

from __future__ import annotations

import polars as pl

from dflash_lab.workbench.figures.style import escape

_ACCEPTED, _TARGET = "rgba(0, 158, 115, 0.30)", "rgba(213, 94, 0, 0.35)"


def worst_answers(answers: pl.DataFrame, method: str = "trained") -> list[int]:
    """Return the numbers of the answers of `method`, lowest tau first."""
    return (
        answers.filter((pl.col("method") == method) & pl.col("tau").is_not_null())
        .sort("tau")["answer"]
        .to_list()
    )


def heading(answers: pl.DataFrame, answer: int, method: str = "trained") -> str:
    """Return one paragraph of HTML: which prompt an answer is to, the end of its text, and its tau."""
    row = answers.filter((pl.col("answer") == answer) & (pl.col("method") == method)).row(0, named=True)
    asked = f"<br><i>{escape(row['asked'])}</i>" if row.get("asked") else ""
    told = f"tau {row['tau']:.2f}, {row['tokens']} tokens in {row['rounds']} rounds"
    return f"<p><b>{escape(row['prompt'])}</b> ({escape(row['source'])}): {told}{asked}</p>"


def coloured_text(tokens: pl.DataFrame, answer: int, method: str = "trained") -> str:
    """Return an answer as HTML: accepted drafts green, the target's own tokens orange with the rejected draft
    struck out.

    All text is escaped: answers are untrusted.
    """
    rows = tokens.filter((pl.col("answer") == answer) & (pl.col("method") == method)).sort("place")
    parts = []
    for text, kind, replaced in rows.select("text", "kind", "replaced").iter_rows():
        shown = escape(text).replace("\n", "&#8629;\n")
        if kind == "accepted":
            parts.append(f'<span style="background-color: {_ACCEPTED}">{shown}</span>')
        elif kind == "target":
            draft = (
                f"<small>{escape(replaced.strip() or '␣')}&#10007;</small> " if replaced is not None else ""
            )
            parts.append(f'<span style="background-color: {_TARGET}">{draft}{shown}</span>')
        else:
            parts.append(f"<b>{shown}</b>")
    return f'<p style="white-space: pre-wrap; line-height: 1.8">{"".join(parts)}</p>'


def legend() -> str:
    """Return one line of HTML that explains the colours of `coloured_text`."""
    accepted, own = (f'<span style="background-color: {colour}">' for colour in (_ACCEPTED, _TARGET))
    return (
        f"<p>{accepted}accepted draft</span> "
        f"{own}<small>rejected draft&#10007;</small> the target's own token</span></p>"
    )
