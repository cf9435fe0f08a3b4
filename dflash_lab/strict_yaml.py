"""YAML in which every value means what it looks like: `010` (8 in YAML 1.1) or `1:30` (90) are refused.

Papermill reads the same files after us by the old rules, so reading them otherwise here would only hide it.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from dflash_lab.errors import InputError

LARGEST_BYTES = 1 << 20  # of a parameter file
MOST_VALUES = 100_000  # of a document, each alias counted as what it stands for
_OCTAL = re.compile(r"[-+]?0[0-7_]+")
_MERGE = "tag:yaml.org,2002:merge"
_TAG = "tag:yaml.org,2002:"


class Ambiguous(yaml.YAMLError):
    """A value that YAML reads as another one than it looks like; the message says what to type."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line  # 1-based


class _Loader(yaml.SafeLoader):
    """SafeLoader that keeps dates as text, as papermill does, and refuses a key given twice and values that
    look like others. `flags` are the keys whose value may be yes, no, on or off.
    """

    def __init__(self, text: str, flags: Collection[str]) -> None:
        super().__init__(text)
        self._flags = flags
        self._words: set[yaml.Node] = set()  # values that may be such a word

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str | int | float | bool) and key in seen:
                raise _fault(f"{key!r} is given twice", key_node)
            if isinstance(key, str | int | float | bool):
                seen.add(key)
        self.flatten_mapping(node)  # what `<<: *other` brings comes first, and is overridden
        for key_node, value_node in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.value in self._flags:
                self._words.add(value_node)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node; a scalar that its tag or its digits cannot be is told with its line."""
        if not isinstance(node, yaml.ScalarNode):
            return super().construct_object(node, deep)
        if node.tag in (_MERGE, f"{_TAG}value"):  # a bare << or = where a value belongs
            raise _fault(f'{node.value} has a meaning of its own. Type "{node.value}" for the text', node)
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:  # how PyYAML fails on `!!int x`
            kind = node.tag.removeprefix(_TAG)
            raise _fault(f"{node.value[:60]!r} is no {kind} that can be read", node) from error

    def plain_bool(self, node: yaml.ScalarNode) -> bool:
        """true and false, and for a flag yes, no, on and off."""
        value = self.construct_yaml_bool(node)
        if node.value.lower() not in ("true", "false") and node not in self._words:
            self._refuse(node, value, str(value).lower())
        return value

    def plain_int(self, node: yaml.ScalarNode) -> int:
        """A whole number without a leading zero or a colon; hexadecimal and binary are clear."""
        value = self.construct_yaml_int(node)
        if ":" in node.value or _OCTAL.fullmatch(node.value):
            self._refuse(node, value, _as_written(node.value) or str(value))
        return value

    def plain_float(self, node: yaml.ScalarNode) -> float:
        """A number without a colon."""
        value = self.construct_yaml_float(node)
        if ":" in node.value:
            self._refuse(node, value, str(value))
        return value

    def _refuse(self, node: yaml.ScalarNode, value: Any, meant: str) -> None:
        read = str(value).lower()
        either = meant if meant == read else f"{meant} or {read}"
        problem = f'YAML reads {node.value} as {read}. Type {either}, or "{node.value}" where text is meant.'
        raise Ambiguous(problem, node.start_mark.line + 1)


def _fault(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _as_written(text: str) -> str:
    """The decimal number that `010` looks like; nothing for `1:30`."""
    digits = text.replace("_", "")
    return "" if ":" in digits else str(int(digits))


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_constructor("tag:yaml.org,2002:bool", _Loader.plain_bool)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.plain_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.plain_float)


def load(text: str, flags: Collection[str] = ()) -> Any:
    """The one document in `text`; a `yaml.YAMLError`, such as `Ambiguous`, where it cannot be read."""
    loader = _Loader(text, flags)
    try:
        found = loader.get_single_data()
    finally:
        loader.dispose()
    if _too_many(found):
        raise yaml.YAMLError(
            f"aliases (*name) that stand for each other or for themselves make more than {MOST_VALUES:,} "
            "values of it. Write the values out"
        )
    return found


def _too_many(value: Any) -> bool:
    """Whether more than `MOST_VALUES` lie in `value`, of which a part may be there many times over."""
    count, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        if (count := count + 1) > MOST_VALUES:
            return True
        if isinstance(one, dict | list | set | tuple):
            if len(one) > MOST_VALUES:
                return True
            waiting += one.values() if isinstance(one, dict) else one
    return False


def read_parameter_file(path: Path | str, flags: Collection[str] = ()) -> dict[str, Any]:
    """Read a flat YAML file of parameters; an `InputError` names the file and line of a fault. `flags` are
    the names whose value may be spelt yes, no, on or off.
    """
    return parse_parameters(parameter_text(Path(path)), str(path), flags)


def parameter_text(path: Path) -> str:
    """Return the text of a parameter file; an `InputError` for what is none."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot read parameters ({error.strerror}).") from error
    if len(data) > LARGEST_BYTES:
        raise InputError(f"{path}: {len(data)} bytes are no parameter file.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise InputError(f"{path}:{line}: not UTF-8 text. Save it as UTF-8.") from None


def parse_parameters(text: str, where: str, flags: Collection[str] = ()) -> dict[str, Any]:
    """Parse YAML text that maps parameter names to values; `where` names its source in errors."""
    try:
        values = load(text, flags)
    except Ambiguous as error:
        raise InputError(f"{where}:{error.line}: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise InputError(f"{where}:{line}: not valid YAML: {error.problem}.") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InputError(
            f"{where}:{line}: character {error.character:#06x} does not belong in text. Remove it."
        ) from None
    except RecursionError:
        raise InputError(f"{where}: nested too deeply for YAML. Parameters are `name: value`.") from None
    except yaml.YAMLError as error:
        raise InputError(f"{where}: not valid YAML: {error}.") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InputError(f"{where}: expected lines of `name: value`, got {str(values)[:40]!r}.")
    return values
