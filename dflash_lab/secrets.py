"""Access tokens stay out of everything that is saved or logged: results, failures, logs and notebooks.

A value is secret when a variable of the environment whose name says so holds it, or if it looks like a token.
"""

from __future__ import annotations

import logging
import os
import re
from typing import Any

HIDDEN = "[hidden]"
_NAMES = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|(API|ACCESS|SERVER)_?KEY|CREDENTIAL)", re.IGNORECASE)
_SHAPES = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|AKIA[0-9A-Z]{16})\b"
)
_SHORTEST = 8  # a shorter value of such a variable (1, true, /tmp) would blank out ordinary text


def secret_values() -> list[str]:
    """Return the secret values of the environment, the longest first."""
    values = {value for name, value in os.environ.items() if _NAMES.search(name) and len(value) >= _SHORTEST}
    return sorted((value for value in values if not os.path.exists(value)), key=len, reverse=True)


def redact(text: str) -> str:
    """Return `text` with every secret replaced."""
    for value in secret_values():
        text = text.replace(value, HIDDEN)
    return _SHAPES.sub(HIDDEN, text)


def redact_tree(value: Any) -> Any:
    """Return JSON-like data with every secret in its strings and keys replaced."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {
            redact(key) if isinstance(key, str) else key: redact_tree(item) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)([redact_tree(item) for item in value])
    return value


class RedactingFormatter(logging.Formatter):
    """A log formatter whose lines, tracebacks included, carry no secret."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))
