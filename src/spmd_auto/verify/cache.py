"""Summaries of compiled programs on disk: compiling for a large cluster takes minutes, reading the result none.

Keyed by what decides the compiled program: the lowered text, the target with its options, the versions of jax and of
the target's compiler. A file that can't be read counts as absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from spmd_auto.store import default_directory, write_whole
from spmd_auto.verify.program import ProgramSummary
from spmd_auto.verify.targets import Target, parse_target

# Raised whenever reading a program changes, so that no older reading is taken for a new one.
_FORMAT = 1
_COMPILERS = {"cpu": ("jaxlib",), "tpu": ("libtpu",), "gpu": ("jax-cuda12-pjrt", "jax-cuda13-pjrt")}


class SummaryCache:
    """A directory of summaries.

    Args:
      directory: None: `$SPMD_AUTO_CACHE` where set, else `~/.cache/spmd_auto`. Made when first written to.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None):
        self.directory = Path(directory) if directory is not None else default_directory()

    def key(self, lowered: Any, target: str | Target, mesh: jax.sharding.Mesh | None = None) -> str:
        """Key of a program.

        Args:
          lowered: what `jax.jit(f).lower(...)` returned, or its text.
          target: where it is compiled.
          mesh: the mesh the summary is described on; its axes' names and sizes are part of the key.
        """
        where = parse_target(target)
        text = lowered if isinstance(lowered, str) else lowered.as_text()
        axes = [] if mesh is None else [[str(name), size] for name, size in mesh.shape.items()]
        options = sorted(where.compiler_options.items())
        parts = [_FORMAT, str(where), options, axes, jax.__version__, compiler_versions(where)]
        digest = hashlib.sha256(json.dumps(parts).encode())
        digest.update(text.encode())
        return digest.hexdigest()

    def get(self, key: str) -> ProgramSummary | None:
        """The summary stored under a key, None where there is none."""
        try:
            return ProgramSummary.from_json(json.loads(self._path(key).read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, key: str, summary: ProgramSummary) -> None:
        """Stores a summary. Readers at the same time see all of it or nothing; a disk that refuses is no error."""
        write_whole(self._path(key), json.dumps(summary.to_json()))

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.json"


def compiler_versions(target: Target) -> list[str]:
    """Packages with their versions that decide what is compiled for a target, JAX itself aside."""
    found = []
    for package in _COMPILERS[target.platform]:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package)}")
    return found
