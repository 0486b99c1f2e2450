"""Real text that every machine has: the source of the Python standard library, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from spmd_auto.errors import SpmdAutoError

LIMIT = 8_000_000  # bytes: more than a demo reads


def load_bytes(folder: str | None = None) -> np.ndarray:
    """All text of a folder (default: the standard library's .py files) as uint8, at most 8 MB, in sorted order.

    Raises:
      SpmdAutoError: no such folder, or no text in it.
    """
    root = Path(folder) if folder is not None else Path(sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise SpmdAutoError(f"no folder {root}", "", ["--text FOLDER with text files in it"])
    patterns = ["*.py"] if folder is None else ["**/*.py", "**/*.txt", "**/*.md", "**/*.rst"]
    parts, total = [], 0
    for path in sorted(p for pattern in patterns for p in root.glob(pattern)):
        data = path.read_bytes()
        parts.append(np.frombuffer(data, np.uint8))
        total += len(data)
        if total >= LIMIT:
            break
    if not parts:
        raise SpmdAutoError(f"no text files in {root}", f"looked for {', '.join(patterns)}", ["another --text FOLDER"])
    return np.concatenate(parts)[:LIMIT]


def batches(text: np.ndarray, batch: int, sequence: int, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless random windows: `{"x": int32[batch, sequence], "y": the same, one byte later}`."""
    if len(text) <= sequence + 1:
        raise SpmdAutoError(f"{len(text)} bytes of text are too few for a sequence of {sequence}")
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - sequence - 1, batch)
        windows = np.stack([text[s : s + sequence + 1] for s in starts]).astype(np.int32)
        yield {"x": windows[:, :-1], "y": windows[:, 1:]}
