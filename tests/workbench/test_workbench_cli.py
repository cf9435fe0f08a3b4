"""The command line: fast help, near matches, checks before a kernel starts, papermill's precedence."""

from __future__ import annotations

import base64
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.wording import check_wording, refused

from dflash_lab import cli, launch, workspace
from dflash_lab.errors import InputError
from dflash_lab.launch import literal
from dflash_lab.params import defaults
from dflash_lab.run_params import Given, from_notebook, read_given
from dflash_lab.stages import STAGES, params_class
from dflash_lab.stages.extract import ExtractParams
from dflash_lab.stages.train_drafter import TrainDrafterParams
from dflash_lab.strict_yaml import parse_parameters, read_parameter_file

REPO = Path(__file__).resolve().parents[2]


HELP = """
import sys
from dflash_lab.cli import main
for words in (["--help"], ["completion", "--help"]):
    try: main(words)
    except SystemExit as left: assert left.code == 0
"""


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        (HELP, {"torch", "transformers", "polars", "plotly", "papermill", "numpy", "yaml"}),
        ("import sys, dflash_lab.stage_run", {"torch", "transformers", "plotly"}),
    ],
    ids=["help", "import"],
)
def test_help_and_imports_take_half_a_second_without_heavy_modules(code, heavy):
    code = f"{code}\nprint('HEAVY', sorted({heavy} & set(sys.modules)))"
    for _ in range(3):  # of processor time: wall time depends on what else runs here
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert "HEAVY []" in done.stdout, done.stderr
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if seconds < 0.5:
            return
    pytest.fail(f"{seconds:.2f} s")


@pytest.mark.parametrize("stage", STAGES)
def test_stage_help_lists_each_parameter_with_type_and_default(stage, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([stage, "--help"])
    text = capsys.readouterr().out
    assert left.value.code == 0
    for name in params_class(stage).model_fields:
        assert f"  {name} (" in text
    assert "default" in text and "--run RUN" in text


def test_stages_are_listed_in_order_with_their_purpose(capsys):
    assert cli.main(["stages"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(STAGES) and all(
        len(line.split()) > 3 for line in lines
    )


@pytest.mark.parametrize("words", [["extrct"], ["stages", "--fast"]], ids=" ".join)
def test_a_line_that_means_nothing_ends_with_2_and_the_near_match(words, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    assert left.value.code == 2
    check_wording(capsys.readouterr().err.splitlines()[-1])


@pytest.mark.parametrize(
    "words",
    [
        ["extract", "-p", "shrad", "0"],
        ["extract", "-p", "shard", "-1"],
        ["extract", "-y", "{shard: [}"],
        ["extract", "-f", "nowhere.yaml"],
        ["extract", "--run", "params/nowhere"],
        ["extract", "-b", "%%%"],
        ["run", "params/nowhere"],
        ["run", "params/demo", "-p", "shrad", "0"],
        ["verify", "nowhere"],
        ["report", "nowhere"],
        ["runs", "nowhere"],
        ["lab"],
    ],
    ids=" ".join,
)
def test_bad_input_stops_before_papermill_with_exit_code_1(words, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "_papermill", lambda words: pytest.fail("papermill was started"))
    if "params/demo" not in words:  # anywhere but in the repository
        monkeypatch.chdir(tmp_path)
        (tmp_path / "params" / "demo").mkdir(parents=True)
        (tmp_path / "params" / "demo" / "common.yaml").touch()
    assert cli.main(words) == 1
    check_wording(capsys.readouterr().err)


def test_precedence_is_papermills_and_the_runs_folder_is_the_weakest(tmp_path):
    (tmp_path / "common.yaml").write_text("seed: 1\ntarget: a\ndtype: float32\n")
    (tmp_path / "extract.yaml").write_text("seed: 2\nmax_batch: 3\nwindow: 3\nnum_taps: 3\n")
    (tmp_path / "more.yaml").write_text("max_batch: 4\nwindow: 4\nnum_taps: 4\n")
    made = read_given(
        ExtractParams,
        Given(
            run=str(tmp_path),
            base64=[base64.b64encode(b"{target: b, max_batch: 2}").decode()],
            files=[str(tmp_path / "more.yaml")],
            yaml=["{window: 5, num_taps: 5}"],
            typed=[("num_taps", "6")],
            raw=[("store", "7")],
        ),
    )
    assert (made.dtype, made.seed) == ("float32", 2)
    assert (made.target, made.max_batch, made.window, made.num_taps, made.store) == ("b", 4, 5, 6, "7")
    assert made.interactive is False


def test_papermill_gets_what_was_typed_in_the_same_order_and_the_run_by_name(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("window: 3\n")
    given = Given(run="7", files=[str(path)], yaml=["{}"], typed=[("shard", "0")], raw=[("store", "7")])
    typed = ["-f", str(path), "-y", "{}", "-p", "shard", "0", "-r", "store", "7"]
    assert given.arguments("extract") == [*typed, "-r", "run", "7"]
    assert Given(files=["params/own/extract.yaml"]).arguments("extract")[-3:] == ["-r", "run", "params/own"]
    assert Given(typed=[("shard", "0")]).arguments("extract") == ["-p", "shard", "0"]


_BOMB = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(  # a few hundred bytes that stand for 9^9 values
    b"%c: &%c [%s]\n" % (name, name, b",".join([b"*%c" % (name - 1)] * 9)) for name in b"bcdefghi"
)


BAD_FILES = {
    "list left open": b"a: 1\nb: [1, 2\n",
    "name twice": b"a: 1\na: 2\n",
    "not UTF-8": b"a: 1\n\xff\xfe\n",
    "list": b"- a\n- b\n",
    "text": b"just text",
    "NUL": b"a: 1\nb: \x00b\n",
    "no bool": b"a: 1\nb: !!bool x\n",
    "no int": b"a: !!int ''\n",
    "no time": b"a: !!timestamp x\n",
    "many digits": b"a: 1\nseed: " + b"9" * 5000,
    "value key": b"a: =\n",
    "itself": b"a: &x [*x]\n",
    "bomb": _BOMB,
    "code": b"a: !!python/object/apply:os.system [ls]\n",
    "deep": b"[" * 1000,
    "large": b"a: 1\n" * 300_000,
    "octal": b"a: 1\nseed: 010\n",
    "octal below 0": b"seed: -0_17\n",
    "octal in a list": b"a: 1\nb: [1, 010]\n",
    "base 60": b"limit: 1:30\n",
    "base 60 and a half": b"lr: 1:30.5\n",
    "off": b"a: 1\nregenerate: off\n",
    "yes within": b"extra: {a: Yes}\n",
    "no in an anchor": b"a: &a {b: no}\nc: {<<: *a, d: 1, d: 2}\n",
    "twice in a merge": b"a: &a {b: 1}\nc: {<<: *a, d: 1, d: 2}\n",
    "list as a name": b"? [a]\n: 1\n",
    "no as a name": b"no: 1\n",
}


@pytest.mark.parametrize("content", BAD_FILES.values(), ids=BAD_FILES)
def test_bad_parameter_files_are_named_with_their_line(tmp_path, content):
    (tmp_path / "x.yaml").write_bytes(content)
    with refused(InputError):
        read_parameter_file(tmp_path / "x.yaml", {"force"})


def test_what_an_anchor_names_is_merged_and_overridden(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("base: &base {lr: 1, seed: 2, force: no}\nextra: {<<: *base, seed: 3}\n")
    found = read_parameter_file(path, {"force"})
    assert found["extra"] == {"lr": 1, "seed": 3, "force": False}


def test_an_earlier_name_of_a_parameter_is_told_with_the_one_of_today(tmp_path, monkeypatch):
    path = tmp_path / "train_drafter.yaml"
    path.write_text("processes: 2\n")
    with refused(InputError):
        read_given(TrainDrafterParams, Given(files=[str(path)]))
    with refused(InputError):
        read_given(TrainDrafterParams, Given(typed=[("processes", "2")]))
    cell = {**dict.fromkeys(defaults(TrainDrafterParams)), "run": "demo", "processes": 2}
    del cell["gpus"]
    with refused(InputError):
        from_notebook(TrainDrafterParams, cell)
    with refused(InputError):
        TrainDrafterParams(processes=2)  # such as a launch.json of then


@pytest.mark.parametrize(
    ("lines", "typed"),
    [
        ("seed: 1\nlimit: 1.5\n", []),
        ("limit: -1\n", []),
        ('"force": maybe\n', []),
        ('input: "\\ud800"\n', []),
        ("limit: 3\n", [("limit", "x")]),
        ('input: ""\n', []),
    ],
    ids=["fraction", "below 0", "no flag", "half a character", "typed", "empty"],
)
def test_a_wrong_value_is_told_with_the_file_and_line_that_gave_it(tmp_path, lines, typed):
    (tmp_path / "prepare.yaml").write_text(lines)
    with refused(InputError):
        read_given(params_class("prepare"), Given(run=str(tmp_path), typed=typed))


def test_values_that_mean_what_they_look_like_are_read():
    text = "a: 0\nb: 10\nc: 0x10\nd: 1_000\ne: 0.5\nf: '010'\ng: \"off\"\nh: True\ni: 089\nj: 1.5\n"
    values = {"a": 0, "b": 10, "c": 16, "d": 1000, "e": 0.5, "f": "010", "g": "off", "h": True, "i": "089"}
    assert parse_parameters(text, "x") == {**values, "j": 1.5}
    assert parse_parameters("# nothing\n", "x") == {}
    assert parse_parameters("a: 2024-01-01\nlr: 1e-4\n", "x") == {"a": "2024-01-01", "lr": "1e-4"}


def test_a_flag_may_be_any_of_yamls_words_and_nothing_else_may(tmp_path):
    path = tmp_path / "prepare.yaml"
    for word in ("yes", "On", "true", "True"):
        path.write_text(f"thinking: {word}\nregenerate: greedy\n")
        assert read_given(params_class("prepare"), Given(run=str(tmp_path))).thinking is True
    for line in ("regenerate: off", "target: no"):
        path.write_text(f"thinking: yes\n{line}\n")
        with refused(InputError):
            read_given(params_class("prepare"), Given(run=str(tmp_path)))


@settings(max_examples=50)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_mapping_or_an_input_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("yaml") / "x.yaml"
    path.write_bytes(data)
    try:
        values = read_parameter_file(path, {"force"})
    except InputError as error:
        assert str(path) in str(error)
    else:
        assert isinstance(values, dict)


def test_completion_names_commands_and_parameters(tmp_path, capsys):
    for shell in ("zsh", "fish", "bash"):
        assert cli.main(["completion", shell]) == 0
        text = capsys.readouterr().out
        assert "train_drafter" in text and "num_shards" in text
    script = tmp_path / "completion.bash"
    script.write_text(text)
    ask = (
        f"source {script}; "
        "COMP_WORDS=(dflash-lab ext); COMP_CWORD=1; _dflash_lab; echo ${COMPREPLY[@]}; "
        "COMP_WORDS=(dflash-lab extract -p num_sh); COMP_CWORD=3; _dflash_lab; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=30)
    assert done.stdout.split() == ["extract", "num_shards"]


def test_output_path_is_in_the_run_folder_and_survives_braces():
    path = launch.output_notebook(ExtractParams(run_dir="runs/{odd}", shard=1, num_shards=2))
    assert path == Path("runs/{odd}/extract-1.ipynb") and literal(path).format() == str(path)


def test_log_defaults_give_way_to_the_callers_choice():
    ours = ["-k", "python3", "--engine", "dflash-lab", "--log-output", "--no-progress-bar"]
    assert launch._defaults([]) == ours
    assert launch._defaults(["--kernel", "x", "--engine", "y", "--no-log-output", "--progress-bar"]) == []


def test_workspace_is_found_from_the_notebooks_folder(tmp_path):
    (tmp_path / "notebooks" / "deep").mkdir(parents=True)
    (tmp_path / "params").mkdir()
    assert workspace.workspace(tmp_path / "notebooks" / "deep") == tmp_path
    assert workspace.workspace(tmp_path.parent) == tmp_path.parent


@pytest.mark.parametrize("folder", ["", "notebooks"])
@pytest.mark.parametrize("words", [["report", "nowhere"], ["runs"], ["runs", "--compare", "demo", "mine"]])
def test_commands_about_runs_enter_the_workspace(tmp_path, monkeypatch, capsys, folder, words):
    for name in ("notebooks", "params", "runs/demo", "runs/mine"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / folder)
    code = cli.main(words)
    said = capsys.readouterr()
    assert Path.cwd() == tmp_path and code == (words[0] == "report"), said
    assert "no such folder of runs" not in said.err
