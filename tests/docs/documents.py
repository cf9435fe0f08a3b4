"""The commands of a document: fenced blocks with their marks, commands in running text, and checks of both
that need no run.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import papermill

from dflash_lab import cli
from dflash_lab.launch import plan
from dflash_lab.run_params import read_given
from dflash_lab.runs import run_status
from dflash_lab.stages import STAGES, params_class

REPO = Path(__file__).resolve().parents[2]
REASONS = {
    "needs Slurm",
    "needs SSH",
    "needs several GPUs",
    "needs a GPU",
    "needs vLLM",
    "needs SGLang",
    "needs a server",
    "a fragment",  # Python whose names are the reader's own
}
_BLOCK = re.compile(
    r"(?:<!-- not run: ([^\n]*?) -->\n)?^```(sh|bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
_INLINE = re.compile(r"`((?:dflash-lab|papermill|make|python)(?: [^`\n]+))`")


@dataclass(frozen=True)
class Block:
    """One fenced block: `language` sh, bash or python; `reason` why it is not run, empty if it is."""

    page: str
    line: int
    language: str
    text: str
    reason: str

    @property
    def lines(self) -> list[str]:
        """The shell lines, continued ones joined, comments and empty ones left out."""
        joined = self.text.replace("\\\n", " ").splitlines()
        kept = [re.sub(r"\s+# .*$", "", line).strip() for line in joined]
        return [line for line in kept if line and not line.startswith("#")]


def pages() -> list[Path]:
    """The README first, then the pages of docs in the order of their index."""
    index = (REPO / "docs" / "README.md").read_text(encoding="utf-8")
    listed = [REPO / "docs" / name for name in re.findall(r"\]\((\w+\.md)\)", index)]
    return [REPO / "README.md", REPO / "docs" / "README.md", *listed]


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page.name, text[: m.start()].count("\n") + 1, m.group(2), m.group(3), m.group(1) or "")
        for m in _BLOCK.finditer(text)
    ]


def inline_commands(page: Path) -> list[str]:
    """Commands in a page's running text."""
    text = page.read_text(encoding="utf-8")
    return commands_in_text(re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def commands_in_text(text: str) -> list[str]:
    """Commands between backticks, without those that have a place to fill in."""
    found = [m.group(1) for m in _INLINE.finditer(text)]
    return [command for command in found if not re.search(r"<[a-z]+>|\.\.\.", command)]


def check_line(line: str) -> None:
    """Assert that a shell line names commands, files and parameters that exist."""
    words = [word for word in shlex.split(line.rstrip("& ")) if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    name = Path(words[0]).name if words else ""
    if name == "dflash-lab":
        _check_lab(words[1:])
    elif name == "papermill":
        _check_papermill(words[1:])
    elif name == "make":
        targets = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), re.MULTILINE))
        assert {word for word in words[1:] if "=" not in word and not word.startswith("-")} <= targets, line
    elif name.startswith("python") and len(words) > 1 and words[1].endswith(".py"):
        script = (REPO / words[1]).read_text(encoding="utf-8")
        for word in words[2:]:
            assert not word.startswith("--") or f'"{word}"' in script, f"{line}: {words[1]} has no {word}"


def made_in_the_pages() -> dict[str, str]:
    """Runs that a reader makes on the way, by `dflash-lab new`, and whose parameters they begin with."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages())
    found = re.findall(r"dflash-lab new ([a-z]+)\b([^`\n]*)", text)
    runs = {name: (re.search(r"--from (\S+)", rest) or ["", "own"])[1] for name, rest in found}
    return {name: runs.get(source, source) for name, source in runs.items()}


def _check_lab(words: list[str]) -> None:
    if words[0] in ("--help", "--version") or words[1:] in ([], ["--help"]):  # a command named in a sentence
        assert words[0].startswith("--") or words[0] in cli.COMMANDS
        return
    options, _ = cli.build_parser().parse_known_args(words)  # leaves the program when it is no such line
    if options.command in ("run", "status", *STAGES):
        options.run = made_in_the_pages().get(options.run, options.run)
    if options.command == "status":
        assert run_status(options.run)
    elif options.command == "run":
        given = cli.given(options)
        assert plan(given)
        for parameter, _ in [*given.typed, *given.raw]:
            assert any(parameter in params_class(stage).model_fields for stage in STAGES), parameter
    elif options.command in STAGES:
        read_given(params_class(options.command), cli.given(options))


def _check_papermill(words: list[str]) -> None:
    notebooks = [word for word in words if word.endswith(".ipynb")]
    if not notebooks:  # `papermill --log-output`: an option in running text
        return
    path = REPO / notebooks[0]  # papermill finds a bare name of ours
    path = path if path.exists() else REPO / "notebooks" / notebooks[0]
    known = set(papermill.inspect_notebook(str(path)))
    for place, word in enumerate(words):
        if word in ("-p", "-r"):
            assert words[place + 1] in known, f"{notebooks[0]} has no parameter {words[place + 1]}"
        if word == "-f":
            assert (REPO / words[place + 1]).exists(), words[place + 1]


def check_python(text: str) -> None:
    """Assert that code is Python, that what it imports of ours exists and is called by parameters it has."""
    tree = ast.parse(text)
    ours = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("dflash_lab"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                ours[alias.asname or alias.name] = getattr(module, alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ours:
            known = inspect.signature(ours[node.func.id]).parameters
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
                unknown = {word.arg for word in node.keywords if word.arg} - set(known)
                assert not unknown, f"{node.func.id} has no parameter {unknown}"
