"""How much the tests notice: change one place of a room's code at a time and see whether a test fails.

    python benchmarks/mutations.py --count 24 --jobs 2 --json benchmarks/results/cpu/mutations.json

The same seed picks the same places of the same code, so two states of the tests are compared by running both
(`--tests` names the tests of another checkout). `--again RESULT` runs the mutations of an earlier result.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import copy
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dflash_lab import files, provenance

REPO = Path(__file__).resolve().parents[1]
# A room's code and the tests that are asked about it; `workbench` is what lies at the top of the package.
ROOMS: dict[str, tuple[str, list[str]]] = {
    "models": ("models/*.py", ["models", "acceptance/test_acceptance_decode.py"]),
    "data": ("data/*.py", ["data", "workbench/test_stage_prepare.py"]),
    "extraction": ("extraction/*.py", ["extraction", "workbench/test_stage_extract.py"]),
    "drafter": ("drafter/**/*.py", ["drafter", "workbench/test_stage_train_drafter.py"]),
    "memory": ("memory/*.py", ["memory", "workbench/test_stage_memory_sweep.py"]),
    "acceptance": ("acceptance/*.py", ["acceptance", "workbench/test_stage_acceptance.py"]),
    "stages": ("stages/*.py", ["workbench"]),
    "views": ("views/*.py", ["workbench"]),
    "workbench": ("*.py", ["workbench", "test_*.py"]),
}
QUICK = "not browser and not gpu and not slow"
COMPARE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
BINARY = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
}


def changes(tree: ast.Module) -> list[tuple[int, str, ast.AST, ast.AST]]:
    """Every place of a module that can be changed: line, what is done, the node, what replaces it.

    Annotations, docstrings, module constants of text, what only a type checker reads and the arguments of
    `__slots__`-like declarations are left alone: no test can notice them.
    """
    found: list[tuple[int, str, ast.AST, ast.AST]] = []

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if inside:
            new = changed(node)
            if new is not None:
                found.append((node.lineno, new[0], node, new[1]))  # type: ignore[attr-defined]
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, inside)

    visit(tree, False)
    return found


def changed(node: ast.AST) -> tuple[str, ast.AST] | None:
    """One change of a node, or None for a node that is left alone."""
    new: Any = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARE:
        new.ops[0] = COMPARE[type(node.ops[0])]()
        return f"{type(node.ops[0]).__name__} -> {type(new.ops[0]).__name__}", new
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        if any(
            isinstance(side, (ast.JoinedStr, ast.Constant)) and not _number(side)
            for side in (node.left, node.right)
        ):
            return None  # text put together
        new.op = BINARY[type(node.op)]()
        return f"{type(node.op).__name__} -> {type(new.op).__name__}", new
    if isinstance(node, ast.BoolOp):
        new.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return f"{type(node.op).__name__} -> {type(new.op).__name__}", new
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return "not -> bool", ast.Call(ast.Name("bool", ast.Load()), [node.operand], [])
    if isinstance(node, ast.Constant) and _number(node):
        new.value = node.value + 1
        return f"{node.value} -> {new.value}", new
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        new.value = not node.value
        return f"{node.value} -> {new.value}", new
    if isinstance(node, ast.IfExp):
        new.body, new.orelse = new.orelse, new.body
        return "arms of a conditional exchanged", new
    return None


def _number(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, (int, float))
        and not isinstance(node.value, bool)
    )


def pick(room: str, count: int, seed: int) -> list[dict[str, Any]]:
    """`count` places of a room's code, drawn by seed: file, line, number in the file, what is done."""
    pattern, _ = ROOMS[room]
    places = []
    for path in sorted((REPO / "dflash_lab").glob(pattern)):
        if path.name == "__init__.py":
            continue
        for number, (line, what, _, _) in enumerate(changes(ast.parse(path.read_text()))):
            places.append(
                {
                    "room": room,
                    "file": str(path.relative_to(REPO)),
                    "line": line,
                    "what": what,
                    "number": number,
                }
            )
    return sorted(
        random.Random(f"{seed} {room}").sample(places, count), key=lambda one: (one["file"], one["number"])
    )


def mutate(path: Path, number: int) -> None:
    """Write a module anew with its change of this number made."""
    tree = ast.parse(path.read_text())
    _, _, node, new = changes(tree)[number]

    class Exchange(ast.NodeTransformer):
        def visit(self, at: ast.AST) -> ast.AST:
            return ast.copy_location(new, at) if at is node else super().visit(at)

    path.write_text(ast.unparse(ast.fix_missing_locations(Exchange().visit(tree))))


def test_files(tests: Path, room: str, changed_file: str) -> list[str]:
    """The room's test files, those first that name the changed module, then the quick ones."""
    files = [
        file
        for entry in ROOMS[room][1]
        for found in sorted(tests.glob(entry))
        for file in (sorted(found.rglob("test_*.py")) if found.is_dir() else [found])
    ]
    dotted = changed_file.removesuffix(".py").replace("/", ".")
    stem = dotted.rsplit(".", 1)[-1]

    def key(file: Path) -> tuple[bool, bool, int]:
        text = file.read_text()
        return dotted not in text, stem not in text, len(text)

    return [str(file) for file in sorted(dict.fromkeys(files), key=key)]


def attempt(job: tuple[dict[str, Any], str, float, list[str]]) -> dict[str, Any]:
    """Run the tests on one changed copy of the repository in a forked process; say what caught the change."""
    place, tests, limit_s, deselect = job
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "repo"
        root.mkdir()
        for entry in REPO.iterdir():
            if entry.name not in ("dflash_lab", "tests", ".git", "runs"):
                (root / entry.name).symlink_to(entry)
        shutil.copytree(
            REPO / "dflash_lab", root / "dflash_lab", ignore=shutil.ignore_patterns("__pycache__")
        )
        shutil.copytree(tests, root / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        if place.get("number") is not None:
            mutate(root / place["file"], place["number"])
        out = Path(folder) / "out"
        child = os.fork()
        if child == 0:
            os.setsid()
            with out.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.chdir(root)
            for name in [name for name in sys.modules if name.partition(".")[0] == "dflash_lab"]:
                del sys.modules[name]  # this process's own, of the unchanged code
            elsewhere = [path for path in sys.path if path not in (str(REPO), str(REPO / "benchmarks"))]
            sys.path[:] = [str(root), *elsewhere]
            path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
            os.environ.update(PYTHONPATH=path, TMPDIR=folder, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
            tempfile.tempdir = folder
            import pytest

            args = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", "--tb=line", "-m", QUICK]
            args += ["-x"] if place["file"] else []
            args += [f"--deselect={name}" for name in deselect]
            code = pytest.main([*args, *test_files(root / "tests", place["room"], place["file"])])
            sys.stdout.flush()
            os._exit(int(code))
        status: int | None = None
        while time.monotonic() - began < limit_s:
            ended, raw = os.waitpid(child, os.WNOHANG)
            if ended:
                status = os.waitstatus_to_exitcode(raw)
                break
            time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # the rest of a group whose leader has ended, or all of it
        if status is None:
            os.waitpid(child, 0)
        said = out.read_text(errors="replace").splitlines()
    failed = [line for line in said if line.startswith(("FAILED", "ERROR"))]
    if not place["file"]:
        by = " ".join(line.split(" - ")[0].split(" ")[1] for line in failed)
    elif status is None:
        by = f"not ended after {limit_s:.0f} s"
    else:
        by = failed[0].split(" - ")[0] if failed else said[-1] if said else ""
    verdict = "unended" if status is None else "lived" if status == 0 else "caught"
    by = by.replace(str(folder), "")
    return {**place, "verdict": verdict, "by": by, "seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rooms", nargs="*", default=list(ROOMS), choices=list(ROOMS))
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit-s", type=float, default=300)
    parser.add_argument("--tests", type=Path, default=REPO / "tests")
    parser.add_argument("--again", type=Path, help="an earlier result whose places are changed again")
    parser.add_argument("--lived", action="store_true", help="with --again: only those that no test caught")
    parser.add_argument("--unchanged", action="store_true", help="run the rooms' tests on unchanged code")
    parser.add_argument("--deselect", nargs="*", default=[], help="tests that fail here on unchanged code")
    parser.add_argument("--json", type=Path, help="write what was found here, anew after each change")
    args = parser.parse_args()
    if args.unchanged:
        places = [{"room": room, "file": "", "line": 0, "what": "nothing"} for room in args.rooms]
    elif args.again:
        places = json.loads(args.again.read_text())["mutations"]
        places = [
            one
            for one in places
            if one["room"] in args.rooms and not (args.lived and one["verdict"] == "caught")
        ]
    else:
        places = [place for room in args.rooms for place in pick(room, args.count, args.seed)]
    import hypothesis  # noqa: F401  what every run imports is imported once, before the forks
    import ipywidgets  # noqa: F401
    import plotly.graph_objects  # noqa: F401
    import polars  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    torch.set_num_threads(1)
    done: list[dict[str, Any]] = []
    random.Random(args.seed).shuffle(places)  # stopped early, all rooms have their share
    jobs = [(place, str(args.tests), args.limit_s, args.deselect) for place in places]
    with concurrent.futures.ProcessPoolExecutor(args.jobs, multiprocessing.get_context("fork")) as pool:
        for ended in concurrent.futures.as_completed([pool.submit(attempt, job) for job in jobs]):
            one = ended.result()
            done.append(one)
            place = f"{one['room']}: {one['file']}:{one['line']} {one['what']}"
            print(f"{one['verdict']:6} {one['seconds']:6.1f} s  {place}  {one['by']}", flush=True)
            if args.json:
                files.write_json(args.json, {"seed": args.seed, "mutations": done, **provenance.provenance()})
    for room in args.rooms:
        of_room = [one for one in done if one["room"] == room]
        print(f"{room}: {sum(one['verdict'] == 'caught' for one in of_room)} of {len(of_room)} caught")


if __name__ == "__main__":
    main()
