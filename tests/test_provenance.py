"""What a result says of the code that made it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from dflash_lab import provenance


def test_the_source_is_named_as_git_names_it(tmp_path):
    inner = tmp_path / "package"
    for name in (
        "b.py",
        "a/x.py",
        "a-b.py",
        "a.py",
        "deep/er/é.py",
    ):  # git sorts a folder as if it ended in /
        (inner / name).parent.mkdir(parents=True, exist_ok=True)
        (inner / name).write_text(f"print({name!r})\n", encoding="utf-8")

    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("add", ".")
    tree = git("write-tree", "--prefix=package/")
    (inner / "__pycache__").mkdir()
    (inner / "__pycache__" / "a.pyc").write_bytes(b"compiled")
    assert provenance.source_tree(inner) == tree
    (inner / "a.py").write_text("changed\n")
    assert provenance.source_tree(inner) != tree


def test_whoever_copies_the_code_says_which_commit_it_is(monkeypatch):
    monkeypatch.setenv("DFLASH_LAB_COMMIT", "0123abc")
    assert provenance.git_commit() == "0123abc"
    found = provenance.provenance()
    assert found["commit"] == "0123abc" and found["source_tree"] == provenance.source_tree()


def test_every_file_of_the_package_counts():
    """What git holds of the package is code and settings, and no file of another kind goes unseen."""
    package = Path(provenance.__file__).resolve().parent
    found = {path.suffix for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert found == {".py", ".json"}
