"""Answers as coloured text: which tokens were drafted, and what was drafted where the target disagreed; and
what stands where no check ran.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from dflash_lab.workbench.figures.style import escape
from dflash_lab.workbench.judgement import learned, of_acceptance

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


def judged(figures: Mapping[str, Any]) -> str:
    """Return whether tau shows that the drafter learned, as the stage found it; a result of an earlier
    version is judged by its intervals alone.
    """
    return str(figures["judgement"] if "judgement" in figures else of_acceptance(figures, None))


def checked(figures: Mapping[str, Any], facts: Mapping[str, Any], diagnose: str) -> str:
    """Return what the checks found, or why none ran: a tau that shows no learning is not one that needed
    none.
    """
    if "cause" in facts:
        return str(facts["cause"])
    if diagnose == "never":
        return "No check ran: diagnose is never."
    if not learned(figures):
        return f"No check ran, for decoded and offline tau do not disagree. But {judged(figures)}"
    return "No check was needed: decoded and offline tau agree, and tau lies above the untrained drafter's."


def legend() -> str:
    """Return one line of HTML that explains the colours of `coloured_text`."""
    accepted, own = (f'<span style="background-color: {colour}">' for colour in (_ACCEPTED, _TARGET))
    return (
        f"<p>{accepted}accepted draft</span> "
        f"{own}<small>rejected draft&#10007;</small> the target's own token</span></p>"
    )
