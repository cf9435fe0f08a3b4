"""Figures of acceptance: what is accepted, what pays, answers as coloured text, and the what-if sliders."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go
import polars as pl

from dflash_lab.acceptance.results import Costs, at, operating_points
from dflash_lab.stages.judgement import learned, of_acceptance
from dflash_lab.views.style import (
    BELOW_LEFT,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SEQUENTIAL,
    SKY,
    escape,
    live,
    shown_number,
)

if TYPE_CHECKING:
    import ipywidgets

    from dflash_lab.acceptance.results import Evaluation

_COLOURS = {"trained": BLUE, "untrained": GREY, "best block": SKY, "tree": GREEN, "other": PURPLE}


def taus(figures: dict[str, Any]) -> go.Figure:
    """Decoded and offline acceptance lengths side by side, with bootstrap intervals where there are any."""
    names = {
        "tau_untrained": ("untrained", GREY),
        "tau_trained": ("trained", BLUE),
        "tau_no_selector": ("trained, no selector", ORANGE),
        "tau_offline": ("trained, offline", SKY),
        "tau_trained_counted": ("trained, as servers count", BLUE),
        "tau_served": ("served", RED),
        "tau_tree_decoded": ("tree", GREEN),
        "tau_tree": ("tree, offline test part", GREEN),
        "tau_other": ("other drafter", PURPLE),
    }
    shown = [(label, colour, name) for name, (label, colour) in names.items() if name in figures]
    fig = go.Figure()
    for label, colour, name in shown:
        value = figures[name]
        low, high = figures.get(f"{name}_low"), figures.get(f"{name}_high")
        error = {"array": [high - value], "arrayminus": [value - low]} if low is not None else None
        fig.add_bar(
            x=[label],
            y=[value],
            error_y=error,
            marker_color=colour,
            text=[f"{value:.2f}"],
            textposition="inside",
            showlegend=False,
            hovertemplate="%{x}<br>tau %{y:.3f}<extra></extra>",
        )
    fig.add_hline(y=1, line={"color": GREY, "dash": "dot"}, annotation_text="no draft accepted")
    fig.update_layout(title="Acceptance length", yaxis_title="tokens a round (tau)")
    fig.update_yaxes(rangemode="tozero")
    return fig


def sets(table: pl.DataFrame) -> go.Figure:
    """Acceptance lengths of each set of prompts side by side, with bootstrap intervals, and the trained
    drafter's offline ones, hatched. `table`: see `results.by_set`.
    """
    fig = go.Figure()
    shown = table.filter(pl.col("tau").is_not_null())
    for method in shown["method"].unique(maintain_order=True):
        rows = shown.filter(pl.col("method") == method)
        fig.add_bar(
            x=[escape(name) for name in rows["set"]],
            y=rows["tau"],
            error_y={"array": rows["high"] - rows["tau"], "arrayminus": rows["tau"] - rows["low"]},
            name=method,
            marker_color=_COLOURS.get(method, ORANGE),
            customdata=rows.select("prompts", "tokens", "speedup").to_numpy(),
            hovertemplate="%{x}: tau %{y:.3f}<br>%{customdata[0]} prompts, %{customdata[1]} tokens<br>"
            "%{customdata[2]:.2f} times plain decoding<extra>" + method + "</extra>",
        )
        if method == "trained":
            fig.add_bar(
                x=[escape(name) for name in rows["set"]],
                y=rows["tau_offline"],
                name="trained, offline",
                marker={"color": BLUE, "pattern": {"shape": "/"}},
                hovertemplate="%{x}: tau %{y:.3f}<extra>trained, offline</extra>",
            )
    fig.add_hline(y=1, line={"color": GREY, "dash": "dot"}, annotation_text="no draft accepted")
    fig.update_layout(
        title="Acceptance length by set of prompts",
        barmode="group",
        legend=BELOW_LEFT,
        xaxis={"type": "category"},
        yaxis_title="tokens a round (tau)",
    )
    fig.update_yaxes(rangemode="tozero")
    return fig


def sets_html(table: pl.DataFrame) -> str:
    """Return one table of HTML a set of prompts: tau with its interval, the offline tau, the speed-up, how
    many prompts, answers and tokens, of each method but plain decoding.
    """
    columns = ["tau", "low", "high", "tau_offline", "speedup", "prompts", "answers", "tokens"]
    heads = ["", *columns]
    parts = []
    for name in table["set"].unique(maintain_order=True):
        rows = table.filter((pl.col("set") == name) & (pl.col("method") != "plain"))
        cells = [
            [method, *map(shown_number, values)] for method, *values in rows.select("method", *columns).rows()
        ]
        lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in cells)
        head = "".join(f"<th>{escape(text).replace('_', ' ')}</th>" for text in heads)
        parts.append(f"<p><b>{escape(name)}</b></p><table><tr>{head}</tr>{lines}</table>")
    return "".join(parts)


def served(rows: list[dict[str, Any]], figures: dict[str, Any]) -> go.Figure:
    """Tau and tokens a second of a running server at each concurrency, beside decoded and offline tau."""
    names = [f"{row['concurrency']} at a time" for row in rows]
    told = [[row["first_token_ms"], row["latency_p50_ms"], row["latency_p95_ms"]] for row in rows]
    fig = go.Figure()
    fig.add_bar(
        x=names,
        y=[row["tau"] for row in rows],
        name="served tau",
        marker_color=RED,
        text=["-" if row["tau"] is None else f"{row['tau']:.2f}" for row in rows],
        textposition="inside",
        customdata=told,
        hovertemplate="%{x}: tau %{y:.3f}<br>first token %{customdata[0]:.0f} ms<br>answer "
        "%{customdata[1]:.0f} ms (95 %: %{customdata[2]:.0f} ms)<extra></extra>",
    )
    fig.add_scatter(
        x=names,
        y=[row["tokens_per_s"] for row in rows],
        name="tokens/s",
        yaxis="y2",
        mode="lines+markers",
        marker_color=GREY,
    )
    for name, label, colour in (
        ("tau_trained_counted", "decoded here", BLUE),
        ("tau_offline", "offline", SKY),
    ):
        if name in figures:
            fig.add_hline(y=figures[name], line={"color": colour, "dash": "dot"}, annotation_text=label)
    fig.update_layout(
        title="The running server",
        yaxis={"title": "tokens a round (tau)", "rangemode": "tozero"},
        yaxis2={"title": "tokens/s", "overlaying": "y", "side": "right", "rangemode": "tozero"},
        legend=BELOW_LEFT,
    )
    return fig


def served_table(rows: list[dict[str, Any]]) -> pl.DataFrame:
    """What a running server answered, took and counted, one row a number of requests at a time."""
    return pl.DataFrame(rows, infer_schema_length=None)


def selector(figures: dict[str, Any]) -> go.Figure:
    """What DFlash 2's selector adds: streak and acceptance lengths with it and without it, side by side."""
    pairs = {
        "streak, all anchors": ("streak_uniform", "streak_uniform_no_selector"),
        "tau, offline": ("tau_offline_all", "tau_offline_all_no_selector"),
        "tau, decoded": ("tau_trained", "tau_no_selector"),
    }
    fig = go.Figure()
    for place, (name, colour) in enumerate((("with selector", BLUE), ("without", ORANGE))):
        values = [figures[names[place]] for names in pairs.values()]
        fig.add_bar(
            x=list(pairs),
            y=values,
            name=name,
            marker_color=colour,
            text=[f"{value:.2f}" for value in values],
            textposition="inside",
            hovertemplate="%{x}<br>%{y:.3f}<extra>" + name + "</extra>",
        )
    fig.add_hline(y=1, line={"color": GREY, "dash": "dot"}, annotation_text="no draft accepted")
    fig.update_layout(title="What the selector adds", yaxis_title="tokens a round", barmode="group")
    fig.update_yaxes(rangemode="tozero")
    return fig


def round_lengths(rounds: pl.DataFrame) -> go.Figure:
    """Share of rounds by acceptance length, 1 + accepted drafts, for each method."""
    fig = go.Figure()
    for method in rounds["method"].unique(maintain_order=True):
        lengths = (rounds.filter(pl.col("method") == method)["accepted"] + 1).to_numpy()
        counts = np.bincount(lengths)[1:]
        fig.add_bar(
            x=np.arange(1, len(counts) + 1),
            y=100 * counts / counts.sum(),
            name=method,
            marker_color=_COLOURS.get(method, ORANGE),
            customdata=counts,
            hovertemplate="%{x} tokens: %{y:.1f} % (%{customdata} rounds)",
        )
    fig.update_layout(
        title="Tokens a round", xaxis_title="acceptance length of a round", yaxis_title="% of rounds"
    )
    fig.update_xaxes(dtick=1)
    return fig


def slots(by_slot: pl.DataFrame, rounds: pl.DataFrame, block_size: int) -> go.Figure:
    """Acceptance by slot: alone, given that all before held, and all up to it, offline; and as decoded."""
    fig = go.Figure()
    for column, label, colour in (
        ("accuracy", "right, whatever came before", GREY),
        ("conditional", "right, given all before were", ORANGE),
        ("survival", "all up to it right (every anchor)", SKY),
    ):
        fig.add_scatter(
            x=by_slot["slot"], y=100 * by_slot[column], name=label, mode="lines+markers", marker_color=colour
        )
    trained = rounds.filter(pl.col("method") == "trained")["accepted"].to_numpy()
    if len(trained):
        depth = np.arange(1, block_size)
        fig.add_scatter(
            x=depth,
            y=[100 * float((trained >= d).mean()) for d in depth],
            name="all up to it accepted (decoded)",
            mode="lines+markers",
            marker_color=BLUE,
        )
    fig.update_layout(
        title="Acceptance by slot", xaxis_title="slot of the block", yaxis_title="%", legend=BELOW_LEFT
    )
    fig.update_yaxes(range=[0, 101])
    fig.update_xaxes(dtick=1 if block_size <= 20 else None)
    return fig


def position_depth(anchors: pl.DataFrame, block_size: int, bins: int = 12) -> go.Figure:
    """Share of anchors whose draft survives to each depth, by position in the answer."""
    place = anchors["place"].to_numpy()
    edges = np.unique(np.linspace(0, place.max() + 1, bins + 1).astype(int))
    accepted, left = anchors["accepted"].to_numpy(), anchors["left"].to_numpy()
    rows, labels = [], []
    for low, high in pairwise(edges):
        inside = (place >= low) & (place < high)
        labels.append(f"{low}-{high - 1}")
        shares = []
        for depth in range(1, block_size):
            valid = inside & (left >= depth)
            shares.append(100 * float((accepted[valid] >= depth).mean()) if valid.any() else None)
        rows.append(shares)
    fig = go.Figure(
        go.Heatmap(
            z=rows,
            x=list(range(1, block_size)),
            y=labels,
            zmin=0,
            zmax=100,
            colorscale=SEQUENTIAL,
            colorbar_title="%",
            hovertemplate="tokens %{y} of the answer<br>%{z:.0f} % accepted to depth %{x}<extra></extra>",
        )
    )
    fig.update_layout(
        title="Acceptance by position and depth",
        xaxis_title="depth in the block",
        yaxis_title="token of the answer",
    )
    fig.update_yaxes(autorange="reversed")
    return fig


MOST_GROUPS = 12  # kinds or sources shown, the most frequent first
_BREAKS_BY = {
    "kind": "the token that was not drafted",
    "source": "source",
    "entropy": "entropy of the draft (nats)",
    "place": "token of the answer",
}


def breaks(frame: pl.DataFrame, by: str = "kind") -> go.Figure:
    """Where drafts die: rounds that broke by `kind` of token, `source`, `entropy` of the draft or `place` in
    the answer, split by how sure the drafter was of its own token.
    """
    names, group = _groups(frame[by])
    sure = frame["p_top"].to_numpy()
    fig = go.Figure()
    for name, low, high, colour in (
        ("unsure (below 0.3)", 0.0, 0.3, SKY),
        ("leaning (0.3 to 0.7)", 0.3, 0.7, ORANGE),
        ("sure and wrong (above 0.7)", 0.7, np.inf, RED),
    ):
        counts = np.bincount(group[(sure >= low) & (sure < high)], minlength=len(names))
        fig.add_bar(
            x=[escape(name) for name in names],
            y=100 * counts[: len(names)] / max(1, frame.height),
            name=name,
            marker_color=colour,
            hovertemplate="%{x}: %{y:.1f} % of breaks<extra></extra>",
        )
    fig.update_layout(
        title=f"Where drafts die: {_BREAKS_BY[by]}",
        barmode="stack",
        legend=BELOW_LEFT,
        xaxis={"title": _BREAKS_BY[by], "type": "category"},
        yaxis_title="% of breaks",
    )
    return fig


def _groups(values: pl.Series) -> tuple[list[str], np.ndarray]:
    """Return the names of groups and the group of each value [n], that of left-out ones beyond the last:
    words by how often they occur, whole numbers in even bins, others in nats.
    """
    if values.dtype == pl.String:
        known = values.value_counts(sort=True, name="count").sort(
            "count", values.name, descending=[True, False]
        )
        names = known[values.name].head(MOST_GROUPS).to_list()
        number = {name: place for place, name in enumerate(names)}
        return names, np.asarray([number.get(value, len(names)) for value in values], dtype=np.int64)
    if values.dtype.is_integer():
        last = int(values.to_numpy().max(initial=0))
        edges = np.unique(np.linspace(0, last + 1, 13).astype(int))
        names = [f"{low}-{high - 1}" for low, high in pairwise(edges)]
    else:
        edges = np.asarray([0.0, 0.1, 0.5, 1.0, 2.0, 4.0, np.inf])
        names = [f"{low:g} to {high:g}" for low, high in pairwise(edges[:-1])] + [f"{edges[-2]:g} and more"]
    return names, np.searchsorted(edges[1:-1], values.to_numpy(), side="right")


def two_drafters(
    answers: pl.DataFrame, figures: dict[str, Any], first: str = "trained", second: str = "other"
) -> go.Figure:
    """Tau of each answer under two methods; dots above the line are answers where the second is better. The
    title says the mean difference and its interval, from paired resampling of the answers.
    """
    wide = answers.filter(pl.col("method").is_in([first, second])).pivot(
        "method", index=["answer", "prompt"], values="tau"
    )
    fig = go.Figure()
    if first in wide.columns and second in wide.columns:
        top = max(wide[first].max() or 1, wide[second].max() or 1)
        fig.add_scatter(
            x=[1, top], y=[1, top], mode="lines", line={"color": GREY, "dash": "dot"}, showlegend=False
        )
        fig.add_scatter(
            x=wide[first],
            y=wide[second],
            mode="markers",
            marker={"color": PURPLE, "size": 9},
            text=[escape(prompt) for prompt in wide["prompt"]],
            hovertemplate="%{text}<br>%{x:.2f} and %{y:.2f}<extra></extra>",
            showlegend=False,
        )
    name = f"{second}_minus_{first}"
    change, low, high = figures[name], figures[f"{name}_low"], figures[f"{name}_high"]
    fig.update_layout(
        title=f"Answer by answer: {second} - {first} = {change:+.3f} (95 % from {low:+.3f} to {high:+.3f})",
        xaxis_title=f"tau, {first}",
        yaxis_title=f"tau, {second}",
    )
    return fig


# What pays: trees by budget, speed-ups from costs, time by phase


def tau_by_budget(budgets: pl.DataFrame, oracle: pl.DataFrame, chosen: int = 0) -> go.Figure:
    """Offline tau of trees by budget on the test part, its interval, the chain, and what top-k oracles
    would reach.
    """
    test = budgets.filter(pl.col("part") == "test").sort("budget")
    trees, chain = test.filter(pl.col("budget") > 0), test.filter(pl.col("budget") == 0)
    fig = go.Figure()
    band = [*trees["high"], *trees["low"].reverse()]
    fig.add_scatter(
        x=[*trees["budget"], *trees["budget"].reverse()],
        y=band,
        mode="lines",
        fill="toself",
        fillcolor="rgba(0, 158, 115, 0.18)",
        line={"width": 0},
        name="95 % interval",
        hoverinfo="skip",
    )
    fig.add_scatter(x=trees["budget"], y=trees["tau"], name="tree", mode="lines+markers", marker_color=GREEN)
    span = [trees["budget"].min(), trees["budget"].max()]
    lines = [("chain", chain["tau"][0], {"color": BLUE})]
    if oracle.height:
        k, tau = oracle.sort("k").row(-1)
        lines.append((f"if the best {k} of each slot counted", tau, {"color": GREY, "dash": "dot"}))
    for name, value, line in lines:
        fig.add_scatter(x=span, y=[value, value], mode="lines", name=name, line=line)
    if chosen:
        at = trees.filter(pl.col("budget") == chosen)
        marker = {"symbol": "star", "size": 14, "color": ORANGE}
        fig.add_scatter(
            x=at["budget"], y=at["tau"], mode="markers", name="chosen on the dev part", marker=marker
        )
    fig.update_layout(
        title="Acceptance length by tree budget", xaxis_title="nodes", yaxis_title="tau", legend=BELOW_LEFT
    )
    _sizes_on_log_axis(fig, trees["budget"].to_list())
    return fig


def speedups(points: pl.DataFrame, figures: dict[str, Any]) -> go.Figure:
    """Expected speed-up of every block size and tree budget from measured costs, with what decoding really
    gave.
    """
    fig = go.Figure()
    for column, name, colour in (
        ("block_size", "chains by block size", BLUE),
        ("budget", "trees by budget", GREEN),
    ):
        part = points.filter(
            (pl.col("budget") == 0) if column == "block_size" else (pl.col("budget") > 0)
        ).sort(column)
        fig.add_scatter(
            x=part[column],
            y=part["speedup"],
            name=name,
            mode="lines+markers",
            marker_color=colour,
            customdata=part.select("tau", "round_ms").to_numpy(),
            hovertemplate="%{x}: %{y:.2f} times<br>tau %{customdata[0]:.2f}, "
            "%{customdata[1]:.1f} ms a round<extra></extra>",
        )
    for name, label, x, colour in (
        ("speedup_chain", "chain, decoded", figures.get("best_block_size"), BLUE),
        ("speedup_tree", "tree, decoded", figures.get("tree_budget"), GREEN),
        ("speedup_other", "other drafter, decoded", figures.get("other_block_size"), PURPLE),
    ):
        if name in figures and x:
            marker = {"symbol": "star", "size": 14, "color": colour}
            fig.add_scatter(x=[x], y=[figures[name]], name=label, mode="markers", marker=marker)
    fig.add_hline(y=1, line={"color": GREY, "dash": "dot"}, annotation_text="plain decoding")
    fig.update_layout(
        title="Speed-up: expected and decoded",
        xaxis_title="block size, or nodes of the tree",
        yaxis_title="times plain decoding",
        legend=BELOW_LEFT,
    )
    _sizes_on_log_axis(fig, [*points["block_size"], *points.filter(pl.col("budget") > 0)["budget"]])
    fig.update_yaxes(rangemode="tozero")
    return fig


def what_if_figure(
    costs: Costs, taus_known: pl.DataFrame, *, block_size: int = 0, budget: int = 0
) -> go.Figure:
    """Expected speed-up of every point under `costs`, the best one and the chosen one marked, and which trees
    beat the best chain.

    `taus_known`: `block_size`, `budget` (0: chain), `tau`.
    """
    points = operating_points(costs, taus_known)
    fig = speedups(points, {})
    best = points.row(0, named=True)
    what = f"a tree of {best['budget']}" if best["budget"] else f"a chain of {best['block_size']}"
    fig.update_layout(
        title={
            "text": f"Best under these costs: {what}, {best['speedup']:.2f} times plain decoding",
            "subtitle": {"text": trees_that_win(points)},
        }
    )
    chosen = points.filter((pl.col("block_size") == block_size) & (pl.col("budget") == budget))
    if chosen.height:
        row = chosen.row(0, named=True)
        fig.add_scatter(
            x=[row["budget"] or row["block_size"]],
            y=[row["speedup"]],
            mode="markers",
            name="chosen",
            marker={"symbol": "diamond", "size": 13, "color": ORANGE},
        )
    return fig


def trees_that_win(points: pl.DataFrame) -> str:
    """Say at which budgets a tree is faster than the best chain."""
    chain = points.filter(pl.col("budget") == 0)["speedup"].max()
    trees = points.filter(pl.col("budget") > 0)
    wins = trees.filter(pl.col("speedup") > chain)["budget"].sort().to_list()
    if not trees.height:
        return "No tree was measured."
    if not wins:
        return "No tree beats the best chain."
    return f"Trees of {', '.join(map(str, wins))} nodes beat the best chain."


def phases(shares: dict[str, dict[str, float]]) -> go.Figure:
    """Where the time of a round goes: share of draft, build, verify and commit by method."""
    fig = go.Figure()
    for phase, colour in (("draft", ORANGE), ("build", PURPLE), ("verify", BLUE), ("commit", GREY)):
        fig.add_bar(
            y=list(shares),
            x=[100 * s[phase] for s in shares.values()],
            name=phase,
            orientation="h",
            marker_color=colour,
        )
    fig.update_layout(title="Time of a round by phase", barmode="stack", xaxis_title="% of decoding time")
    return fig


def _sizes_on_log_axis(fig: go.Figure, sizes: list[int]) -> None:
    """Label a logarithmic axis with the sizes that were measured."""
    ticks = sorted(set(sizes))
    fig.update_xaxes(type="log", tickvals=ticks, ticktext=[str(size) for size in ticks], minor_showgrid=False)


# Answers as coloured text, and what stands where no check ran

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


# What-if sliders


def known_taus(result: Evaluation, temperature: float = 0.0) -> pl.DataFrame:
    """Return every measured point: `block_size`, `budget` (0: chain), `tau`, over all answers.

    At a temperature the drafts beyond the bonus are scaled by what the offline estimate says sampling keeps
    of them.
    """
    report = result.offline
    streaks = dict(report.by_temperature().iter_rows())
    kept = (streaks[temperature] - 1) / max(1e-9, streaks[0.0] - 1) if temperature else 1.0
    chains = report.by_block_size().select("block_size", budget=pl.lit(0, dtype=pl.Int64), tau=pl.col("tau"))
    trees = report.by_budget().filter(pl.col("budget") > 0)
    trees = trees.select(block_size=pl.lit(report.block_size, dtype=pl.Int64), budget="budget", tau="tau")
    points = pl.concat([chains, trees])
    return points.with_columns(tau=1 + (pl.col("tau") - 1) * kept)


def what_if(result: Evaluation) -> ipywidgets.Widget:
    """Return the sliders and their figure; `measured` uses this machine's costs, otherwise the typed ones."""
    import ipywidgets as widgets

    known = known_taus(result)
    costs = result.cost_model
    sizes = sorted(set(known.filter(pl.col("budget") == 0)["block_size"]))
    budgets = sorted(set(known["budget"]))
    wide = max(costs.step)
    slope = (at(costs.step, wide) - at(costs.step, 1)) / max(1, wide - 1)
    look: dict[str, Any] = {"continuous_update": False, "style": {"description_width": "150px"}}
    controls: dict[str, Any] = {
        "block_size": widgets.SelectionSlider(
            options=sizes, value=sizes[-1], description="block size", **look
        ),
        "budget": widgets.SelectionSlider(
            options=budgets, value=0, description="tree nodes (0: chain)", **look
        ),
        "temperature": widgets.SelectionSlider(
            options=[0.0, *result.offline.temperatures], value=0.0, description="temperature", **look
        ),
        "measured": widgets.Checkbox(value=True, description="costs measured here"),
        "step_ms": widgets.FloatLogSlider(
            value=at(costs.step, 1), min=-1, max=4, description="target step (ms)", **look
        ),
        "slope_ms": widgets.FloatText(
            value=round(max(0.0, slope), 4), description="each more token (ms)", style=look["style"]
        ),
        "draft_ms": widgets.FloatLogSlider(
            value=at(costs.draft, sizes[-1]), min=-1, max=4, description="draft (ms)", **look
        ),
    }
    figure = live(what_if_figure(costs, known, block_size=sizes[-1]))

    def update(_: Any) -> None:
        chosen = costs
        if not controls["measured"].value:
            chosen = Costs.typed(
                step_ms=controls["step_ms"].value,
                step_ms_per_token=max(0.0, controls["slope_ms"].value),
                draft_ms=controls["draft_ms"].value,
                replay=costs.replay,
            )
        budget = controls["budget"].value
        size = result.offline.block_size if budget else controls["block_size"].value
        taus = known_taus(result, controls["temperature"].value)
        fresh = what_if_figure(chosen, taus, block_size=size, budget=budget)
        with figure.batch_update():
            figure.layout.title = fresh.layout.title
            for old, new in zip(figure.data, fresh.data):
                old.x, old.y, old.customdata = new.x, new.y, new.customdata

    for control in controls.values():
        control.observe(update, names="value")
    return widgets.VBox([widgets.VBox(list(controls.values())), figure])
