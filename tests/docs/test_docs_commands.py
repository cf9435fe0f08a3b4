"""Every command of README and docs is run as it stands, in a checkout with parameters cut down to seconds.
What a test machine cannot run is marked in the page, and its words are checked.

The README's commands are also a new user's walk: own chats, own local target folder, a measured tau.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time

import documents
import nbformat
import pytest
from documents import REPO, Block, blocks, check_line, check_python, inline_commands, pages

from dflash_lab.files import read_json
from dflash_lab.runs import ROWS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PAGES = pages()
# Lines that install or go on for ever: run without the installation, or up to the point where they work.
INSTALLED = "-o .venv/installed -o .venv/installed-test -o .venv/bin/python"


@pytest.fixture(scope="session")
def walked(checkout) -> dict[str, str]:
    """Run the README's blocks in order; return the output of each line."""
    said: dict[str, str] = {}
    for block in blocks(REPO / "README.md"):
        run_block(checkout, block, said)
    return said


def run_block(checkout, block: Block, said: dict[str, str]) -> None:
    where = f"{block.page}:{block.line}"
    if block.reason:
        return
    if block.language == "python":
        (checkout.root / "block.py").write_text(block.text)
        code, output = checkout.run("python block.py")
        assert code == 0, f"{where}\n{output[-3000:]}"
        return
    for line in block.lines:
        if line == "make test":  # this very run; what it would do is read
            code, output = checkout.run(f"make -n {INSTALLED} test")
            assert "pytest" in output and "ruff check" in output and "mypy" in output
        elif line == "make lab":
            code, output = 0, started_lab(checkout)
        elif line.startswith("make "):
            code, output = checkout.run(f"{line} {INSTALLED}")
        else:
            code, output = checkout.run(line)
        assert code == 0, f"{where}: {line}\n{output[-3000:]}"
        said[line] = output


def started_lab(checkout) -> str:
    """Start `make lab`, wait for the address it prints, and end it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    process = subprocess.Popen(
        ["make", "lab", f"PORT={port}", *INSTALLED.split()],
        cwd=checkout.root,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "BROWSER": "true"},
    )
    seen, address, deadline = "", f"http://127.0.0.1:{port}/lab", time.monotonic() + 90
    assert process.stdout is not None
    while address not in seen and time.monotonic() < deadline and (line := process.stdout.readline()):
        seen += line
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(30)
    assert address in seen and "token=" in seen, seen[-3000:]
    return seen


def test_the_readme_runs_and_closes_with_a_measured_tau(walked, checkout):
    mine = checkout.root / "runs" / "mine"
    figures = read_json(mine / "result.json")["figures"]
    assert set(figures) >= set(ROWS) - {"tau_other", "speedup_other"}
    assert figures["samples_stored"] == figures["samples_in"] == 24
    assert figures["samples_quarantined"] == 0 and figures["tau_trained"] >= 1.0
    closing = walked["dflash-lab run mine"]
    for name in ("tau_trained", "extract_tokens_per_s", "padding_waste_pct", "report"):
        assert name in closing
    assert walked["dflash-lab run demo"].count("finished before") == 7  # `make demo` made it
    compared = next(text for line, text in walked.items() if line.startswith("dflash-lab runs --compare"))
    assert "num_shards" in compared and "mine" in compared
    assert walked["dflash-lab status mine"].count("  finished") == 6


def test_every_stage_left_its_notebook_and_the_report_reads_them(walked, checkout):
    runs = checkout.root / "runs"
    stages = {"prepare", "dataset_stats", "memory_sweep", "train_drafter", "acceptance"}
    assert {path.stem for path in (runs / "mine").glob("*.ipynb")} == {*stages, "extract-0"}
    assert {path.stem for path in (runs / "demo").glob("*.ipynb")} == {*stages, "extract-0", "extract-1"}
    assert (runs / "index.html").exists() and (runs / "mine" / "report.html").stat().st_size > 4_000_000


def test_a_second_start_changes_nothing(walked, checkout):
    def files() -> dict:
        found = (path for path in (checkout.root / "runs").rglob("*") if path.is_file())
        return {path: path.stat().st_mtime_ns for path in found if path.name != ".lock"}

    before = files()
    code, output = checkout.run("dflash-lab run mine")
    assert code == 0 and output.count("finished before") == 6 and "tau_trained" in output
    assert files() == before


def test_verify_names_a_damaged_part(walked, checkout, tmp_path):
    shutil.copytree(checkout.root / "runs" / "demo" / "store", tmp_path / "store")
    part = next((tmp_path / "store").glob("shard-*/part-*.safetensors"))
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(bytes(data))
    code, output = checkout.run(f"dflash-lab verify {tmp_path / 'store'}")
    assert code == 1 and part.name in output


@pytest.mark.parametrize(
    "page", [page for page in PAGES[1:] if page.stem != "python"], ids=lambda page: page.stem
)  # that page's blocks are run as one program, by test_docs_python.py
def test_the_pages_blocks_run_after_the_readme(walked, checkout, page):
    for block in blocks(page):
        run_block(checkout, block, {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_is_not_run_is_marked_with_a_reason_and_names_what_exists(page):
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        assert not block.reason or block.reason in documents.REASONS, where
        assert block.reason != "a fragment" or block.language == "python", f"{where}: shell lines are whole"
        if block.language == "python":
            check_python(block.text)
        else:
            for line in block.lines:
                check_line(line)
    for command in inline_commands(page):
        check_line(command)


def test_every_page_is_in_the_index_and_no_command_hides_in_an_indented_block():
    assert {page.name for page in PAGES[2:]} | {"README.md"} == {
        page.name for page in (REPO / "docs").glob("*.md")
    }
    hidden = re.compile(r"^(?: {4}|\t)(?:dflash-lab|papermill|make|python) ", re.MULTILINE)
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        assert not hidden.search(text), f"{page.name}: put commands into a ```sh block, where they are run"


@pytest.mark.parametrize("path", sorted((REPO / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_commands_in_the_notebooks_words_name_what_exists(path):
    words = "\n".join(
        cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"
    )
    lines = re.findall(r"^ {4}((?:papermill|dflash-lab) .*)$", words, re.MULTILINE)
    assert lines, "the first cell shows how to run it headless"
    for line in [*lines, *documents.commands_in_text(words)]:
        check_line(line)


# The file-format page against the files of the README's run.


def table(title: str) -> list[str]:
    """First cells, without marks, of the table on the file-format page whose head begins with `title`."""
    text = (REPO / "docs" / "file_formats.md").read_text(encoding="utf-8")
    found = re.search(rf"^\| {re.escape(title)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert found, title
    return [line.split("|")[1].strip().strip("`") for line in found.group(1).splitlines()]


def test_results_have_the_fields_of_the_page(walked, checkout):
    for path in (checkout.root / "runs" / "demo").glob("*/result.json"):
        assert sorted(read_json(path)) == sorted(table("`result.json`")), path


def test_a_run_says_whose_it_is_as_the_page_has_it(walked, checkout):
    for run in ("demo", "mine"):
        found = read_json(checkout.root / "runs" / run / "run.json")
        assert list(found) == table("`run.json`")
        assert found == {"run": run, "parameters": f"../../params/{run}"}


def test_samples_have_the_columns_of_the_page(walked, checkout):
    import polars as pl

    frame = pl.read_parquet(checkout.root / "runs" / "demo" / "samples.parquet")
    assert frame.columns == table("column")
    page = (REPO / "docs" / "file_formats.md").read_text(encoding="utf-8")
    for name, kind in frame.schema.items():
        assert f"| `{name}` | {kind} |" in page, name


def test_stores_have_the_lines_and_tensors_of_the_page(walked, checkout):
    from safetensors import safe_open

    store = checkout.root / "runs" / "demo" / "store"
    assert sorted(read_json(store / "store.json")) == sorted(table("`store.json`"))
    kinds = set()
    for manifest in store.glob("shard-*/manifest.jsonl"):
        kinds |= {json.loads(line)["kind"] for line in manifest.read_text().splitlines()}
    assert kinds == {"run", "selftest", "check", "part", "end"} < set(table("`kind`"))
    part = next(store.glob("shard-*/part-*.safetensors"))
    with safe_open(part, framework="numpy") as tensors:
        assert set(tensors.keys()) == set(table("tensor")) - {"taps_scale"}  # bf16 has no scales
        page = (REPO / "docs" / "file_formats.md").read_text(encoding="utf-8")
        for name in tensors.keys():  # noqa: SIM118 - not a dict
            assert f"| `{name}` | {tensors.get_slice(name).get_dtype()}" in page, name


def test_conversations_have_the_forms_of_the_page():
    from dflash_lab.data.conversations import FORMS

    page = (REPO / "docs" / "file_formats.md").read_text(encoding="utf-8")
    assert len(table("form")) == len(FORMS)
    for form in FORMS.values():
        assert any(all(f"`{key}`" in line for key in form.needs) for line in page.splitlines()), form.name
