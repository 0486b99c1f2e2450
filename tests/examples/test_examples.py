"""Training scripts as users write them, before and after: one import and one line, the same losses."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = [path.stem for path in sorted((ROOT / "examples" / "before").glob("*.py"))]


def run(path: Path) -> list[float]:
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]


def test_there_is_one_for_each_library():
    assert NAMES == ["equinox_text", "linen_text", "nnx_text"]


@pytest.mark.parametrize("name", NAMES)
def test_one_import_and_one_line(name):
    before, after = ((ROOT / "examples" / side / f"{name}.py").read_text().splitlines() for side in ("before", "after"))
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-" and line[2:].strip()]
    assert len(changed) == 3, changed
    assert changed[0] == "+ from spmd_auto import auto_shard"
    assert changed[2] == "+ @auto_shard"


@pytest.mark.parametrize("name", NAMES)
def test_the_same_losses(name):
    if name.startswith("equinox"):
        pytest.importorskip("equinox")
    expected, losses = (run(ROOT / "examples" / side / f"{name}.py") for side in ("before", "after"))
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(expected, abs=2e-3)
