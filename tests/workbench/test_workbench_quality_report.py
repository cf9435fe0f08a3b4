"""The quality study's report: the page says what the record says, a row that was cut counts as far as it
went, and tau shows where it was measured.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.wording import refused

from dflash_lab.errors import InputError
from dflash_lab.files import read_json, write_json

REPO = Path(__file__).resolve().parents[2]
RECORD = REPO / "benchmarks" / "results" / "h200" / "quality.json"


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(REPO / "benchmarks"))


def measured(kind: str, step: int, streak: float, **more) -> dict:
    lists = dict(position_accuracy=[0.5], conditional_accuracy=[0.5])
    return dict(kind=kind, step=step, streak=streak, ce=2.0, kl=1.0, loss=2.0, accuracy=0.5, **lists, **more)


def row(root: Path, name: str, *, ended: bool, heldout: dict[int, float], **changes) -> None:
    """A row's folder as `quality.py train` leaves it, cut or ended."""
    parameters = dict(block_size=8, max_steps=20, samples="d/samples.parquet") | changes
    record = dict(row=name, parameters=parameters, command=f"train {name}", commit="c" * 40)
    record |= dict(data={"tokens": 1000}, tau={})
    lines = [dict(kind="step", step=1, loss=2.0)]
    lines += [measured("train", 5, 1.5, seconds=2.0, blocks_seen=50, context_tokens=500, epoch=0)]
    lines += [measured("heldout", step, streak) for step, streak in heldout.items()]
    if ended:
        low = dict(low=1.0, high=9.0, answers=3)
        per_answer = [3.0, 2.0, 4.0 + len(name)]
        record["tau"] = {key: dict(tau=3.0, per_answer=per_answer, **low) for key in ("heldout", "humaneval")}
        record |= dict(figures=dict(steps=20), training={}, curve=[one for one in lines if "streak" in one])
    write_json(root / name / "row.json", record)
    run = root / name / "train_drafter" / "run"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "st')


def test_the_page_and_its_tables_are_those_of_the_record():
    from quality_report import commands, filled, runs_table, studies_text

    found = read_json(RECORD)
    tables = {"runs": runs_table(found["runs"]), "rows": studies_text(found["studies"])}
    page = (REPO / "docs" / "quality.md").read_text()
    assert filled(page, tables) == page
    written = (REPO / "docs" / "results" / "quality.md").read_text()
    assert written == "\n".join([*tables.values(), commands(found)])


def test_a_cut_study_is_compared_where_all_its_rows_were_measured(tmp_path, monkeypatch):
    import quality_report
    from quality_report import gathered, save

    drawn = {}  # a PNG needs a browser
    monkeypatch.setattr(
        quality_report, "save_figure", lambda fig, folder, name: drawn.update({name: (folder, fig)})
    )
    row(tmp_path / "study", "base", ended=False, heldout={0: 1.0, 10: 2.0, 20: 2.5})
    row(tmp_path / "study", "wide", ended=False, heldout={0: 1.0, 10: 2.25}, intermediate_size=4096)
    found = gathered({"studies": {}, "runs": {}}, {"one": str(tmp_path / "study")}, {}, [])
    found = gathered(found, {}, {"cut": str(tmp_path / "study" / "wide")}, [])
    assert found["runs"]["cut"]["figures"] == dict(
        steps=10, train_seconds=2.0, anchors_per_s=25.0, streak_last=2.25
    )
    save(found, tmp_path / "out")
    text = (tmp_path / "out" / "quality.md").read_text()
    assert "2 rows on 0.0 M tokens, step 10 of 20; from the rows' diaries" in text
    assert "| wide | intermediate_size 4096 | 2.250 | +0.250 | 2.00 | 1.00 | 1.50 |" in text
    assert "| base | (base) | 2.000 |  | 2.00 | 1.00 | 1.50 |" in text and "tau heldout" not in text
    assert "| cut | not measured |" in text and "- one (commit cccccccccccc): `train base`" in text
    assert set(drawn) == {"quality-runs", "quality-study"}
    folder, figure = drawn["quality-study"]
    assert folder == tmp_path / "out"
    assert list(figure.data[0].y) == ["wide"] and list(figure.data[1].text) == ["+0.250"]


def test_a_finished_study_shows_tau_over_the_same_answers(tmp_path):
    from quality_figures import study_figure
    from quality_report import gathered, studies_text

    row(tmp_path, "base", ended=True, heldout={20: 2.5})
    row(tmp_path, "kl", ended=True, heldout={20: 2.0}, soft_weight=1.0)
    found = gathered({"studies": {}, "runs": {}}, {"one": str(tmp_path)}, {}, [])["studies"]
    words = next(line for line in studies_text(found).splitlines() if line.startswith("| kl"))
    # Its last answer is two tokens a round shorter than the base's; the other two are as long.
    assert "| 3.000 | -0.667 (-2.000 to +0.000) |" in words
    bar = study_figure(found).data[0]
    assert bar.x == pytest.approx([-2 / 3]) and bar.error_x.arrayminus == pytest.approx([4 / 3])


def test_a_study_without_its_base_says_so(tmp_path):
    from quality_report import gathered

    row(tmp_path, "kl", ended=False, heldout={20: 2.0})
    with refused(InputError):
        gathered({"studies": {}, "runs": {}}, {"one": str(tmp_path)}, {}, [])


def test_a_page_without_a_place_for_a_table_says_so():
    from quality_report import filled

    assert filled("<!-- begin: rows -->\nold\n<!-- end: rows -->", {"rows": "new\n"}).split("\n")[1] == "new"
    with refused(InputError):
        filled("no marks", {"rows": "x"})
