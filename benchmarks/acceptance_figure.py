"""The figure and the page of the acceptance benchmark: tau by tree budget, where the time of a round goes.

python benchmarks/acceptance_figure.py RESULT.json [MORE.json ...] FOLDER

Later results add prompt sets that the first one lacks. Speeds are shown of the first one's device alone.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots
from result_figure import save_figure
from result_file import made_of, read_result, told

from dflash_lab.files import write_bytes
from dflash_lab.views.style import BLUE, GREEN, GREY, ORANGE, PURPLE

SETS = (("heldout", "held-out", BLUE, "rgba(0, 114, 178, 0.15)"),
        ("humaneval", "HumanEval", GREEN, "rgba(0, 158, 115, 0.15)"))  # fmt: skip
PHASES = (("draft", ORANGE), ("build", PURPLE), ("verify", BLUE), ("commit", GREY))


def _rows(found: dict[str, Any], part: str) -> list[dict[str, Any]]:
    """Return one part's rows by budget; the chain's, budget 0, comes first."""
    return sorted((row for row in found["budgets"] if row["part"] == part), key=lambda row: row["budget"])


def figure(result: dict[str, Any]) -> go.Figure:
    """Build the figure from a result of benchmarks/acceptance.py."""
    details = result["details"]
    fig = make_subplots(
        cols=2, column_widths=[0.6, 0.4], horizontal_spacing=0.1,
        subplot_titles=("Tokens a round by tree budget", "A round, phase by phase"),
    )  # fmt: skip
    for key, name, colour, band in SETS:
        if key not in details:
            continue
        first, *rows = _rows(details[key], "all")
        chain = first["tau"]
        budgets = [row["budget"] for row in rows]
        figures = details[key]["figures"]
        fig.add_scatter(
            x=[*budgets, *budgets[::-1]], y=[*(r["high"] for r in rows), *(r["low"] for r in rows[::-1])],
            fill="toself", fillcolor=band, mode="lines", line={"width": 0}, hoverinfo="skip",
            showlegend=False, row=1, col=1,
        )  # fmt: skip
        fig.add_scatter(
            x=budgets, y=[row["tau"] for row in rows], mode="lines+markers",
            name=f"{name}, tree ({figures['offline_answers']} answers)",
            line={"color": colour}, row=1, col=1,
        )  # fmt: skip
        fig.add_scatter(
            x=[budgets[0], budgets[-1]], y=[chain, chain], name=f"{name}, chain", mode="lines",
            line={"color": colour, "dash": "dash"}, row=1, col=1,
        )  # fmt: skip
        if "tau_tree_decoded" in figures:
            fig.add_scatter(
                x=[figures["tree_budget"]], y=[figures["tau_tree_decoded"]], mode="markers",
                name=f"{name}, tree decoded ({figures['prompts']} prompts)",
                marker={"symbol": "star", "size": 13, "color": colour, "line": {"width": 1}},
                row=1, col=1,
            )  # fmt: skip
    budgets = sorted(
        {r["budget"] for key, *_ in SETS if key in details for r in _rows(details[key], "all")[1:]}
    )
    fig.update_xaxes(
        type="log", tickvals=budgets, ticktext=[str(budget) for budget in budgets],
        range=[math.log10(budgets[0] / 1.2), math.log10(budgets[-1] * 1.2)], title="nodes", row=1, col=1,
    )  # fmt: skip
    fig.update_yaxes(title="acceptance length tau", rangemode="tozero", row=1, col=1)
    plain = details["heldout"]["figures"]["plain_ms_per_token"]
    split = details["heldout"]["phase_ms"]
    bars = ["plain", *split]
    labels = {"plain": "plain step", **_labels(details["heldout"])}
    for phase, colour in PHASES:
        values = [plain if phase == "verify" else 0.0, *(parts[phase] for parts in split.values())]
        fig.add_bar(
            x=[labels[bar] for bar in bars], y=values, name=phase, marker_color=colour, row=1, col=2
        )  # fmt: skip
    speeds = _speeds(details["heldout"]["figures"])
    for name, parts in split.items():
        if speeds.get(name):
            fig.add_annotation(
                x=labels[name], y=sum(parts[phase] for phase, _ in PHASES),
                text=f"{speeds[name]:.2f} times plain", yanchor="bottom", showarrow=False, row=1, col=2,
            )  # fmt: skip
    fig.update_yaxes(title="ms a round", row=1, col=2)
    device = result["device"]["device"] if isinstance(result.get("device"), dict) else ""
    fig.update_layout(
        title=f"Drafting for {details['arguments']['target']}, greedy, one prompt at a time; {device}",
        barmode="stack", template="plotly_white", width=1250, height=560,
        legend={"orientation": "h", "y": -0.15, "yanchor": "top"}, margin={"t": 90, "r": 30, "b": 130},
    )  # fmt: skip
    return fig


def _labels(found: dict[str, Any]) -> dict[str, str]:
    """Name the methods of a prompt set by their sizes."""
    own = found["figures"]
    return {
        "trained": f"chain of {found['facts']['protocol']['block_size']}",
        "best block": f"chain of {own['best_block_size']}",
        "tree": f"tree of {own.get('tree_budget', 0)}",
    }


def _speeds(own: dict[str, Any]) -> dict[str, float]:
    """How many times faster than plain decoding each method of a prompt set was, as far as it was decoded."""
    speeds = {"trained": own["speedup_trained_block"]}
    if "tau_best_block" in own:
        speeds["best block"] = own.get("speedup_best_block", own["speedup_chain"])
    if "speedup_tree" in own:
        speeds["tree"] = own["speedup_tree"]
    return speeds


def _second(details: dict[str, Any]) -> list[str]:
    """The table of the few prompts decoded again in another dtype."""
    if "second_dtype" not in details:
        return []
    found = details["second_dtype"]
    own, labels = found["figures"], _labels(found)
    speeds = ", ".join(f"{labels[name]} {speed:.2f}" for name, speed in _speeds(own).items())
    return [
        "",
        f"In {found['facts']['protocol']['dtype']}, {own['prompts']} held-out prompts: a plain step takes "
        f"{own['plain_ms_per_token']:.2f} ms; times plain decoding: {speeds}. {own['greedy_different']} "
        f"answers leave plain decoding, {own['greedy_ties']} of them at a tie.",
    ]


def report(result: dict[str, Any]) -> str:
    """Return the result as a page of Markdown."""
    figures, details = result["figures"], result["details"]
    arguments, drafter = details["arguments"], details["drafter"]
    facts = details["heldout"]["facts"]
    protocol = facts["protocol"]
    sets = [(key, name) for key, name, _, _ in SETS if key in details]
    limits = ", ".join(
        f"{details[key]['figures']['prompts']} {name} prompts up to "
        f"{details[key]['facts']['protocol']['max_new_tokens']} tokens"
        for key, name in sets
    )
    lines = [
        "# Acceptance on one GPU",
        "",
        "![Tokens a round by tree budget, and the time of a round](acceptance.png)",
        "",
        f"Target {arguments['target']} ({protocol['dtype']}), drafter of {drafter['num_hidden_layers']} "
        f"layers, blocks of {protocol['block_size']}; greedy, one prompt at a time; {limits}; seed "
        f"{arguments['seed']}. "
        f"{facts['decoding']} The tree budget is chosen on a dev part of the prompts. "
        f"Decoded on: {', '.join(f'{_device(result, key)} ({name})' for key, name in sets)}.",
        *(["", details["note"]] if "note" in details else []),
        "",
        "| | " + " | ".join(name for _, name in sets) + " |",
        "|---" * (1 + len(sets)) + "|",
    ]
    best = (str(details[key]["figures"]["best_block_size"]) for key, _ in sets)
    lines.append(f"| best block size | {' | '.join(best)} |")
    for label, name, form in (
        ("tau, chain", "tau_chain", _number),
        ("tau, tree, decoded", "tau_tree", _number),
        ("times plain decoding, best chain", "speedup_chain", _number),
        ("times plain decoding, tree", "speedup_tree", _number),
        ("offline tau against decoded, %", "tau_offline_gap_pct", _number),
        ("answers that leave plain decoding", "greedy_different", str),
        ("of these at a tie of the target's logits", "greedy_ties", str),
    ):
        cells = (form(figures.get(f"{name}_{key}")) for key, _ in sets)
        lines.append(f"| {label} | {' | '.join(cells)} |")
    answers = ", ".join(f"{details[key]['figures']['offline_answers']} {name}" for key, name in sets)
    lines += ["", f"Tau by tree budget, offline, over {answers} answers, with 95 % intervals:", ""]
    lines += ["| nodes | " + " | ".join(name for _, name in sets) + " |", "|---" * (1 + len(sets)) + "|"]
    tables = [{row["budget"]: row for row in _rows(details[key], "all")} for key, _ in sets]
    for budget in sorted({budget for rows in tables for budget in rows}):
        found = (rows.get(budget) for rows in tables)
        cells = ("" if r is None else f"{r['tau']:.2f} ({r['low']:.2f} to {r['high']:.2f})" for r in found)
        lines.append(f"| {budget or 'chain'} | {' | '.join(cells)} |")
    lines += ["", f"A plain step takes {details['heldout']['figures']['plain_ms_per_token']:.2f} ms."]
    if "plain_without_graphs_ms" in details:
        lines[-1] += f" Without graphs it takes {details['plain_without_graphs_ms']:.2f} ms."
    lines += [
        "Milliseconds a round, by phase:",
        "",
    ]
    lines += ["| | draft | build | verify | commit | round | times plain |", "|---" * 7 + "|"]
    for key, label in sets:
        names, speeds = _labels(details[key]), _speeds(details[key]["figures"])
        for name, parts in details[key].get("phase_ms", {}).items():
            cells = [f"{parts[phase]:.2f}" for phase in (*(phase for phase, _ in PHASES), "round")]
            times = _number(speeds.get(name))
            lines.append(f"| {label}, {names[name]} | {' | '.join(cells)} | {times} |")
    waits = {name: found for name, found in details["waits_a_round"].items() if found}
    blocking = "; ".join(f"{name} {found['blocking']:.2f}" for name, found in waits.items())
    lines += [
        "",
        f"Waits of the host a round that leave the device idle: {blocking or 'not measured'}. "
        "(Each round's record is read while the next round runs.)",
        *_second(details),
        "",
        f"A tree of 512 nodes is built in {figures['tree_build_ms_512']:.2f} ms where it is used, and "
        f"in {figures['tree_build_host_ms_512']:.2f} ms from logits on the device to a tree on the host.",
    ]
    if "offline" in details:
        rate = details["offline"]
        lines.append(
            f"Offline metrics of {rate['samples']} samples ({rate['anchors']:,} anchors, states "
            f"made on the way): {rate['seconds']:.0f} s"
            + (
                "."
                if rate["samples"] >= 10_000
                else f", so {rate['minutes_for_10000']:.1f} minutes for 10,000 such samples."
            )
        )
    lines += [
        "",
        f"Device: {result['device']['device']}. Command:",
        "",
        "    python benchmarks/acceptance.py --drafter FOLDER --heldout samples.parquet --json RESULT.json",
        "    python benchmarks/acceptance_figure.py RESULT.json docs/results",
    ]
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "" if value is None else f"{round(value, 2) + 0.0:.2f}"  # no minus zero


def save(result: dict[str, Any], folder: str | Path) -> None:
    """Write the figure (acceptance.json, .html, .svg, .png) and the page about it, acceptance.md."""
    folder = Path(folder)
    fig = figure(result)
    save_figure(fig, folder, "acceptance")
    write_bytes(folder / "acceptance.svg", fig.to_image("svg"))
    write_bytes(folder / "acceptance.md", report(result).encode())


def joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first result with the prompt sets that only later ones have."""
    whole, *others = results
    device = _device(whole, next(key for key, *_ in SETS if key in whole["details"]))
    for other in others:
        for key, *_ in SETS:
            if key in other["details"] and key not in whole["details"]:
                whole["details"][key] = other["details"][key]
                same = _device(other, key) == device
                whole["figures"] |= {
                    name: value
                    for name, value in other["figures"].items()
                    if name.endswith(key) and (same or not name.startswith("speedup"))
                }
    return whole


def _device(result: dict[str, Any], key: str) -> str:
    return str(result["details"][key]["facts"]["protocol"]["device"])


def main() -> None:
    """Draw and write what is in the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", metavar="result")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    found = [read_result(path, "acceptance.py", figures=dict, details=dict) for path in args.results]
    with made_of(", ".join(map(str, args.results)), "acceptance.py"):
        save(joined(found), args.folder)


if __name__ == "__main__":
    sys.exit(told(main))
