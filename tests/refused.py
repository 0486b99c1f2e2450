"""Checks of errors, and their list in `docs/errors.md`.

`pytest tests/test_errors.py --write-errors` writes the list anew; `tests/test_errors.py` checks that it is whole.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import pytest

LIST = Path(__file__).parents[1] / "docs" / "errors.md"

# test -> the errors it met, in the order of the tests
RECORDED: dict[str, list[Exception]] = {}


@contextlib.contextmanager
def refused(cls, what=(), why=(), fixes=()):
    """The block raises exactly `cls`, each part naming all the given words."""
    with pytest.raises(cls) as caught:
        yield
    error = caught.value
    assert type(error) is cls
    for part, words in ((error.what, what), (error.why, why), ("\n".join(error.fixes), fixes)):
        for word in [words] if isinstance(words, str) else words:
            assert word in part, f"{word!r} is not in {part!r} of:\n{error}"
    assert error.what in str(error)
    assert error.why in str(error)
    assert all(f"fix: {fix}" in str(error) for fix in error.fixes)
    name = os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0]
    RECORDED.setdefault(re.sub(r"\[.*", "", name), []).append(error)


def title(test: str) -> str:
    words = test.split("::")[-1].removeprefix("test_").replace("_", " ").replace("can not", "can't")
    return words[0].upper() + words[1:]


def message(error: Exception) -> str:
    return str(error).replace(f"{LIST.parents[1]}{os.sep}", "")


def as_markdown() -> str:
    """The list: one heading per kind of mistake, with the first message its test met."""
    lines = [
        "# What goes wrong, and what is said",
        "",
        "Each kind of wrong input or use has its own message: what, why, and the nearest fixes. All errors are of the",
        "family `spmd_auto.errors.SpmdAutoError`. This list is written by the tests",
        "(`pytest tests/test_errors.py --write-errors`); each entry is the message of one of them.",
    ]
    for test, errors in RECORDED.items():
        lines += [
            "",
            f"## {title(test)}",
            "",
            f"`{type(errors[0]).__name__}`",
            "",
            "```text",
            message(errors[0]),
            "```",
        ]
    return "\n".join(lines) + "\n"
