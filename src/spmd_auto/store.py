"""Where things found once are kept on disk, and how a file is written that several processes may read and write."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def default_directory() -> Path:
    """`$SPMD_AUTO_CACHE`, or `~/.cache/spmd_auto`."""
    return Path(os.environ.get("SPMD_AUTO_CACHE") or Path.home() / ".cache" / "spmd_auto")


def write_whole(path: Path, text: str) -> bool:
    """Writes a file so that readers at the same time see all of it or what was there before.

    Returns:
      Whether it was written: a disk that refuses is no error.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return False
    return True
