"""Executes notebooks from top to bottom in a fresh kernel; the first cell that fails ends it with its traceback.

usage: python scripts/run_notebooks.py notebooks/*.ipynb

Nothing is written: what a notebook shows in the repository is up to its author.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def main(paths: list[str]) -> None:
    for path in map(Path, paths):
        start = time.monotonic()
        print(f"executing {path}", flush=True)
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
        print(f"  {len(notebook.cells)} cells in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
