"""Figures of lengths and padding, and the length explorer's sliders."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go
import polars as pl

from dflash_lab.data.batching import POLICIES, Exploration, explore
from dflash_lab.errors import InputError
from dflash_lab.progress import duration
from dflash_lab.views.style import BLUE, GREEN, GREY, ORANGE, RED, SKY, escape, live, thin

if TYPE_CHECKING:
    import ipywidgets

    from dflash_lab.stages.dataset_stats import DatasetStatsParams, DatasetStatsResult

EXPLORED = 200_000  # samples planned at each move of the explorer, so that it answers in a blink
_LOG_TICKS = [2**power for power in range(21)]


def length_bars(histogram: pl.DataFrame, *, max_length: int = 0, unit: str = "samples") -> go.Figure:
    """Bars over logarithmic bins of length; `unit` is `samples` or `tokens` (what the bars count)."""
    low, high = histogram["low"].to_numpy(), histogram["high"].to_numpy()
    total = max(int(histogram[unit].sum()), 1)
    shares = 100 * histogram[unit].to_numpy() / total
    figure = go.Figure(
        go.Bar(
            x=(low * high) ** 0.5,
            y=shares,
            width=high - low,
            marker_color=BLUE if unit == "samples" else ORANGE,
            customdata=[
                list(row) for row in zip(low.tolist(), (high - 1).tolist(), histogram[unit].to_list())
            ],
            hovertemplate="%{customdata[0]:,} to %{customdata[1]:,} tokens<br>"
            f"%{{customdata[2]:,}} {unit}, %{{y:.2f}} %<extra></extra>",
        )
    )
    figure.update_layout(
        title=f"Length of samples, share of {unit}", xaxis_title="tokens a sample", yaxis_title=f"% of {unit}"
    )
    _log_axis(figure, low.min() if len(low) else 1, max(high.max() if len(high) else 1, max_length))
    return _mark(figure, max_length)


def length_ecdf(ecdf: pl.DataFrame, percentiles: pl.DataFrame, *, max_length: int = 0) -> go.Figure:
    """Share of samples and of tokens in samples at most so long; dots are percentiles."""
    table = ecdf[thin(ecdf.height, 1000)]
    lengths = table["length"].to_list()
    figure = go.Figure()
    for column, name, colour in (("samples_share", "samples", BLUE), ("tokens_share", "tokens", ORANGE)):
        figure.add_scatter(
            x=lengths,
            y=(100 * table[column]).to_list(),
            name=name,
            mode="lines",
            line={"color": colour, "shape": "hv"},
            hovertemplate=f"%{{y:.1f}} % of {name}<br>are in samples up to %{{x:,}} tokens<extra></extra>",
        )
    dots = percentiles.filter(pl.col("percent").is_in([25.0, 50.0, 90.0, 99.0, 100.0]))
    dots = dots.unique("length", keep="first", maintain_order=True)  # of equal ones the lowest says it all
    figure.add_scatter(
        x=dots["length"].to_list(),
        y=dots["percent"].to_list(),
        name="percentiles of samples",
        mode="markers+text",
        marker={"color": BLUE, "size": 8},
        text=[
            f"p{percent:g}: {length:,} " for percent, length in dots.select("percent", "length").iter_rows()
        ],
        textposition=["middle left"] * (dots.height - 1) + ["top left"],  # 99 and 100 lie close
        textfont={"size": 11},
        hovertemplate="%{text} tokens<extra></extra>",
        cliponaxis=False,
    )
    figure.update_layout(
        title="What a length limit keeps",
        xaxis_title="tokens a sample",
        yaxis_title="% at most so long",
        yaxis_range=[0, 103],
    )
    if lengths:
        _log_axis(figure, lengths[0], max(lengths[-1], max_length))
    return _mark(figure, max_length, height=0.1)


def tail_shares(tail: pl.DataFrame) -> go.Figure:
    """What lies beyond each limit: samples, their tokens, and the tokens that truncating would cut."""
    limits = [f"{limit:,}" for limit in tail["limit"]]
    figure = go.Figure()
    for column, name, colour in (
        ("samples_pct", "samples longer", BLUE),
        ("tokens_pct", "tokens if dropped", ORANGE),
        ("cut_tokens_pct", "tokens if truncated", SKY),
    ):
        figure.add_bar(
            x=limits,
            y=tail[column].to_list(),
            name=name,
            marker_color=colour,
            customdata=tail["samples"].to_list(),
            hovertemplate=f"%{{y:.2f}} % {name}<br>%{{customdata:,}} samples over %{{x}}<extra></extra>",
        )
    figure.update_layout(
        title="The tail beyond a limit",
        xaxis_title="limit, tokens",
        yaxis_title="% of the set",
        xaxis_type="category",
    )
    return figure


def source_shares(sources: pl.DataFrame, *, keep: int = 20) -> go.Figure:
    """Samples, tokens, answer tokens (if known) and mean length by source; beyond `keep` in one bar."""
    answers = [] if sources["answer_tokens"].null_count() else [("answer_tokens", GREEN)]
    columns = [("samples", BLUE), ("tokens", ORANGE), *answers]
    table = sources.select("source", *(column for column, _ in columns))
    if table.height > keep:
        rest = table[keep:]
        row = {"source": f"{rest.height:,} more", **{column: rest[column].sum() for column, _ in columns}}
        table = pl.concat([table[:keep], pl.DataFrame([row], schema=table.schema)])
    table = table.reverse()  # plotly draws the first row at the bottom
    names = [
        escape(name if len(name) <= 40 else name[:39] + "…") for name in table["source"].fill_null("(none)")
    ]
    figure = go.Figure()
    for column, colour in columns:
        total = max(int(table[column].sum()), 1)
        means = (table["tokens"] / table["samples"]).to_list()
        figure.add_bar(
            y=names,
            x=(100 * table[column] / total).to_list(),
            name=column.replace("_", " "),
            orientation="h",
            marker_color=colour,
            customdata=[list(row) for row in zip(table[column].to_list(), means)],
            hovertemplate=f"%{{y}}: %{{x:.1f}} %, %{{customdata[0]:,}} {column.replace('_', ' ')}<br>"
            "mean %{customdata[1]:,.0f} tokens a sample<extra></extra>",
        )
    figure.update_layout(
        title="Where samples and tokens come from",
        xaxis_title="% of the set",
        yaxis_type="category",
        height=max(260, 140 + 34 * len(names)),
    )
    return figure


def policy_padding(policies: pl.DataFrame) -> go.Figure:
    """Padding that each batching policy would compute, in percent of all computed tokens."""
    table = policies.reverse()
    ours = [GREEN if "sort" in name else GREY for name in table["policy"]]
    figure = go.Figure(
        go.Bar(
            y=table["policy"].to_list(),
            x=table["waste_pct"].to_list(),
            orientation="h",
            marker_color=ours,
            text=[f"{waste:.2f} %" for waste in table["waste_pct"]],
            textposition="outside",
            cliponaxis=False,
            customdata=table.select("batches", "largest_batch", "padded_tokens").rows(),
            hovertemplate="%{y}: %{x:.2f} % padding<br>"
            "%{customdata[0]:,} batches, up to %{customdata[1]:,} samples<br>"
            "%{customdata[2]:,} tokens computed<extra></extra>",
        )
    )
    highest = max(table["waste_pct"].to_list(), default=0.0)
    figure.update_layout(
        title="Padding by batching policy",
        xaxis_title="padding, % of computed tokens",
        xaxis_range=[0, max(1.15 * highest, 1.0)],
        height=320,
        margin_l=210,
    )
    return figure


def exploration(
    histogram: pl.DataFrame, found: Exploration, *, max_length: int, unit: str = "tokens"
) -> go.Figure:
    """The histogram with the limit marked and the outcome of a choice in the title."""
    figure = length_bars(histogram, max_length=max_length, unit=unit)
    figure.update_layout(title=exploration_text(found))
    return figure


def explored(result: DatasetStatsResult, params: DatasetStatsParams, **choices: Any) -> Exploration:
    """Return what `choices` would give for the whole set, planned on at most 200,000 of its samples.

    choices: max_length, over_long, token_budget, max_batch, policy, tokens_per_s; the rest is from `params`.
    """
    lengths = result.length_array
    if len(lengths) > EXPLORED:
        chosen = np.random.default_rng(params.seed).choice(len(lengths), EXPLORED, replace=False)
        lengths = lengths[np.sort(chosen)]
    limits = {name: choices.pop(name) for name in ("token_budget", "max_batch") if name in choices}
    options = {"max_length": params.max_length, "tokens_per_s": params.tokens_per_s, **choices}
    found = explore(lengths, limits=dataclasses.replace(params.limits, **limits), **options)
    scale = result.figures["samples"] / len(lengths)
    if scale == 1:
        return found
    counts = ("kept", "dropped", "truncated", "tokens", "batches", "over_budget")
    scaled: dict[str, Any] = {name: round(scale * getattr(found, name)) for name in counts}
    return dataclasses.replace(found, hours=scale * found.hours, **scaled)


def exploration_text(found: Exploration) -> str:
    """Say in one line what a choice of limits gives."""
    lost = f"{found.dropped:,} dropped" if not found.truncated else f"{found.truncated:,} truncated"
    return (
        f"{found.kept:,} samples ({lost}), {found.kept_tokens_pct:.1f} % of tokens · "
        f"{found.waste_pct:.2f} % padding · {found.batches:,} batches · {duration(3600 * found.hours)}"
    )


def _log_axis(figure: go.Figure, low: float, high: float) -> None:
    ticks = [tick for tick in _LOG_TICKS if low / 2 <= tick <= 2 * high]
    while len(ticks) > 12:
        ticks = ticks[::2]
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{tick:,}" for tick in ticks])


def _mark(figure: go.Figure, max_length: int, *, height: float = 1.0) -> go.Figure:
    """Draw the length limit; on a logarithmic axis a line stands at x, but its annotation at log10(x)."""
    if max_length:
        figure.add_vline(x=max_length, line={"color": RED, "dash": "dash", "width": 1.5})
        figure.add_annotation(
            x=math.log10(max_length),
            y=height,
            yref="paper",
            text=f"limit {max_length:,}",
            showarrow=False,
            xanchor="left",
            yanchor="top",
        )
    return figure


# ---- The length explorer: sliders for limits, budget and policy over one figure ----


def explorer(result: DatasetStatsResult, params: DatasetStatsParams) -> ipywidgets.Widget:
    """Return the explorer; its start is `params`, its numbers are those of `explored`."""
    import ipywidgets as widgets

    longest = int(result.figures["longest_tokens"])
    top = max(longest, params.max_length, 2)
    choices: dict[str, Any] = {
        "max_length": _slider("length limit", params.max_length or longest, 1, top),
        "over_long": widgets.ToggleButtons(options=["drop", "truncate"], description="longer ones"),
        "token_budget": _slider("token budget", params.token_budget, 256, max(262144, params.token_budget)),
        "max_batch": _slider("rows a batch", params.max_batch, 1, max(4096, params.max_batch)),
        "policy": widgets.Dropdown(
            options=list(POLICIES), value="sort in 32,768 windows", description="policy"
        ),
        "tokens_per_s": widgets.BoundedFloatText(
            value=params.tokens_per_s, min=1, max=1e9, step=100, description="tokens/s"
        ),
    }
    for control in choices.values():
        control.style = {"description_width": "90px"}
        control.layout.width = "400px"
    table = widgets.HTML()

    def chosen() -> tuple[Exploration, go.Figure]:
        values = {name: control.value for name, control in choices.items()}
        found = explored(result, params, **values)
        return found, exploration(result.histogram, found, max_length=values["max_length"])

    found, start = chosen()
    figure = live(start, height=340)
    table.value = outcome_table(found)

    def update(change: dict[str, Any]) -> None:
        try:
            found, fresh = chosen()
        except InputError as error:
            table.value = f"<b>{escape(str(error))}</b>"
            return
        with figure.batch_update():
            figure.layout.title.text = fresh.layout.title.text
            figure.layout.shapes = fresh.layout.shapes
            figure.layout.annotations = fresh.layout.annotations
        table.value = outcome_table(found)

    for control in choices.values():
        control.observe(update, names="value")
    return widgets.VBox([widgets.HBox([widgets.VBox(list(choices.values())), table]), figure])


def outcome_table(found: Any) -> str:
    """Return the outcome as a small HTML table; all of it numbers."""
    rows = (
        ("samples kept", f"{found.kept:,}"),
        ("dropped", f"{found.dropped:,}"),
        ("truncated", f"{found.truncated:,}"),
        ("tokens kept", f"{found.tokens:,} ({found.kept_tokens_pct:.1f} %)"),
        ("padding", f"{found.waste_pct:.2f} %"),
        ("batches", f"{found.batches:,}, up to {found.largest_batch:,} rows"),
        ("over the budget alone", f"{found.over_budget:,}"),
        ("predicted", duration(3600 * found.hours)),
    )
    cells = "".join(
        f"<tr><td>{name}</td><td style='text-align:right'><b>{value}</b></td></tr>" for name, value in rows
    )
    return f"<table style='margin-left:24px; line-height:1.5'>{cells}</table>"


def _slider(description: str, value: int, low: int, high: int) -> ipywidgets.Widget:
    """A slider over whole numbers in even ratios, which answers when it is let go."""
    import ipywidgets as widgets

    steps = sorted({value, low, high, *(round(low * (high / low) ** (step / 60)) for step in range(61))})
    return widgets.SelectionSlider(
        options=[(f"{step:,}", step) for step in steps],
        value=value,
        description=description,
        continuous_update=False,
    )
