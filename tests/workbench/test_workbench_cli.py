"""The command line: fast help, near matches, checks before a kernel starts, papermill's precedence."""

from __future__ import annotations

import base64
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.wording import refused

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


def cpu_seconds(words: list[str]) -> tuple[float, subprocess.CompletedProcess]:
    """Processor time of a child (wall time depends on what else runs here)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(words, capture_output=True, text=True, cwd=REPO, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done


@pytest.mark.parametrize("words", [["--help"], ["completion", "--help"]])
def test_help_answers_within_half_a_second_without_heavy_imports(words):
    code = (
        "import sys; from dflash_lab.cli import main\n"
        f"try: main({words!r})\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'polars', 'plotly', 'papermill', 'numpy', 'yaml'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))"
    )
    seconds, done = min(
        (cpu_seconds([sys.executable, "-c", code]) for _ in range(2)), key=lambda pair: pair[0]
    )
    assert done.returncode == 0 and "HEAVY []" in done.stdout and "dflash-lab" in done.stdout
    assert seconds < 0.5


@pytest.mark.parametrize("module", ["dflash_lab", "dflash_lab.stage_run", "dflash_lab.params"])
def test_importing_the_package_is_cheap(module):
    heavy = "{'torch', 'transformers', 'plotly'}"
    code = f"import sys, {module}; print('HEAVY', sorted({heavy} & set(sys.modules)))"
    seconds, done = min(
        (cpu_seconds([sys.executable, "-c", code]) for _ in range(2)), key=lambda pair: pair[0]
    )
    assert "HEAVY []" in done.stdout, done.stderr
    assert seconds < 0.5


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


def test_unknown_command_has_its_near_match(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["extrct"])
    assert left.value.code == 2 and "did you mean 'extract'" in capsys.readouterr().err


def test_unknown_argument_of_a_plain_command_is_refused(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["stages", "--fast"])
    assert left.value.code == 2 and "--fast" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["extract", "-p", "shrad", "0"], "did you mean 'shard'"),
        (["extract", "-p", "shard", "-1"], "at least 0"),
        (["extract", "-y", "{shard: [}"], "-y:1"),
        (["extract", "-f", "nowhere.yaml"], "nowhere.yaml: cannot read"),
        (["extract", "--run", "params/nowhere"], "no such folder"),
        (["extract", "-b", "%%%"], "not base64"),
        (["run", "params/nowhere"], "params/nowhere"),
        (["run", "params/demo", "-p", "shrad", "0"], "no stage has a parameter 'shrad'"),
        (["verify", "nowhere"], "no such store"),
        (["report", "nowhere"], "no such run folder"),
        (["runs", "nowhere"], "no such folder of runs"),
    ],
)
def test_bad_input_stops_before_papermill_with_exit_code_1(words, message, capsys, monkeypatch):
    monkeypatch.setattr(launch, "_papermill", lambda words: pytest.fail("papermill was started"))
    assert cli.main(words) == 1
    assert message in capsys.readouterr().err


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
    assert (made.target, made.max_batch, made.window, made.num_taps, made.store) == (
        "b",
        4,
        5,
        6,
        "7",
    )
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: 1\nb: [1, 2\n", ":3: not valid YAML"),
        (b"a: 1\na: 2\n", ":2: not valid YAML: 'a' is given twice"),
        (b"a: 1\n\xff\xfe\n", ":2: not UTF-8"),
        (b"- a\n- b\n", "expected lines of `name: value`"),
        (b"just text", "expected lines"),
        (b"a: 1\nb: \x00b\n", ":2: character 0x0000 does not belong in text. Remove it."),
        (b"a: 1\nb: !!bool x\n", ":2: not valid YAML: 'x' is no bool that can be read"),
        (b"a: !!int ''\n", ":1: not valid YAML: '' is no int"),
        (b"a: !!timestamp x\n", ":1: not valid YAML: 'x' is no timestamp"),
        (b"a: 1\nseed: " + b"9" * 5000, ":2: not valid YAML: '999"),
        (b"a: =\n", ':1: not valid YAML: = has a meaning of its own. Type "="'),
        (b"a: &x [*x]\n", "aliases (*name)"),
        (_BOMB, "aliases (*name)"),
        (b"a: !!python/object/apply:os.system [ls]\n", ":1: not valid YAML"),
        (b"[" * 5000, "nested too deeply"),
        (b"a: 1\n" * 300_000, "no parameter file"),
        (b"a: 1\nseed: 010\n", ':2: YAML reads 010 as 8. Type 10 or 8, or "010" where text is meant.'),
        (b"seed: -0_17\n", ":1: YAML reads -0_17 as -15. Type -17 or -15, or "),
        (b"a: 1\nb: [1, 010]\n", ":2: YAML reads 010 as 8."),
        (b"limit: 1:30\n", ':1: YAML reads 1:30 as 90. Type 90, or "1:30" where text is meant.'),
        (b"lr: 1:30.5\n", ":1: YAML reads 1:30.5 as 90.5. Type 90.5, or "),
        (
            b"a: 1\nregenerate: off\n",
            ':2: YAML reads off as false. Type false, or "off" where text is meant.',
        ),
        (b"extra: {a: Yes}\n", ":1: YAML reads Yes as true. Type true, or "),
        (b"a: &a {b: no}\nc: {<<: *a, d: 1, d: 2}\n", ":1: YAML reads no as false"),
        (b"a: &a {b: 1}\nc: {<<: *a, d: 1, d: 2}\n", ":2: not valid YAML: 'd' is given twice"),
        (b"? [a]\n: 1\n", "not valid YAML"),
        (b"no: 1\n", ':1: YAML reads no as false. Type false, or "no" where text is meant.'),
    ],
)
def test_bad_parameter_files_are_named_with_their_line(tmp_path, content, message):
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_parameter_file(path, {"force"})
    assert str(path) in str(caught.value) and message in str(caught.value)


def test_what_an_anchor_names_is_merged_and_overridden(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("base: &base {lr: 1, seed: 2, force: no}\nextra: {<<: *base, seed: 3}\n")
    found = read_parameter_file(path, {"force"})
    assert found["extra"] == {"lr": 1, "seed": 3, "force": False}


def test_an_earlier_name_of_a_parameter_is_told_with_the_one_of_today(tmp_path, monkeypatch):
    path = tmp_path / "train_drafter.yaml"
    path.write_text("processes: 2\n")
    told = r"processes.* is now called gpus. Type gpus in its place"
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
    ("lines", "typed", "words"),
    [
        (
            "seed: 1\nlimit: 1.5\n",
            [],
            r"limit=1\.5: expected a whole number, got float 1\.5 \(.*prepare\.yaml:2\)",
        ),
        ("limit: -1\n", [], r"limit=-1: must be at least 0 .*prepare\.yaml:1\)"),
        ('"force": maybe\n', [], r"force='maybe': expected true or false.*prepare\.yaml:1\)"),
        ('input: "\\ud800"\n', [], r"input=.*half of one \(.*prepare\.yaml:1\)"),
        ("limit: 3\n", [("limit", "x")], r"limit='x': expected a whole number.*\(given with -p\)"),
        ('input: ""\n', [], r"input='': give one, .*prepare\.yaml:1\)"),
    ],
)
def test_a_wrong_value_is_told_with_the_file_and_line_that_gave_it(tmp_path, lines, typed, words):
    (tmp_path / "prepare.yaml").write_text(lines)
    with refused(InputError):
        read_given(params_class("prepare"), Given(run=str(tmp_path), typed=typed))


def test_values_that_mean_what_they_look_like_are_read():
    text = "a: 0\nb: 10\nc: 0x10\nd: 1_000\ne: 0.5\nf: '010'\ng: \"off\"\nh: True\ni: 089\nj: 1.5\n"
    values = {"a": 0, "b": 10, "c": 16, "d": 1000, "e": 0.5, "f": "010", "g": "off", "h": True, "i": "089"}
    assert parse_parameters(text, "x") == {**values, "j": 1.5}


@pytest.mark.parametrize("word", ["yes", "On", "true", "True"])
def test_a_flag_may_be_any_of_yamls_words_and_nothing_else_may(tmp_path, word):
    path = tmp_path / "prepare.yaml"
    path.write_text(f"thinking: {word}\nregenerate: greedy\n")
    assert read_given(params_class("prepare"), Given(run=str(tmp_path))).thinking is True
    for line, words in (("regenerate: off", "Type false, or"), ("target: no", "YAML reads no as false")):
        path.write_text(f"thinking: {word}\n{line}\n")
        with refused(InputError):
            read_given(params_class("prepare"), Given(run=str(tmp_path)))


def test_empty_and_dated_files():
    assert parse_parameters("# nothing\n", "x") == {}
    assert parse_parameters("a: 2024-01-01\nlr: 1e-4\n", "x") == {"a": "2024-01-01", "lr": "1e-4"}


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


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_names_commands_and_parameters(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert "train_drafter" in text and "num_shards" in text


def test_bash_completion_completes(tmp_path, capsys):
    cli.main(["completion", "bash"])
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)
    ask = (
        f"source {script}; "
        "COMP_WORDS=(dflash-lab ext); COMP_CWORD=1; _dflash_lab; echo ${COMPREPLY[@]}; "
        "COMP_WORDS=(dflash-lab extract -p num_sh); COMP_CWORD=3; _dflash_lab; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=30)
    assert done.stdout.split() == ["extract", "num_shards"]


def test_output_path_is_in_the_run_folder_and_survives_braces():
    params = ExtractParams(run_dir="runs/{odd}", shard=1, num_shards=2)
    assert launch.output_notebook(params) == Path("runs/{odd}/extract-1.ipynb")
    assert literal(Path("runs/{odd}/x.ipynb")).format() == "runs/{odd}/x.ipynb"


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
