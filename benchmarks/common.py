"""What the benchmarks share: models, compiling and reading, and results written with the commit they are of."""

from __future__ import annotations

import datetime
import subprocess
import sys
import time
from pathlib import Path

import jax

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from spmd_auto.plan import Plan  # noqa: E402
from spmd_auto.verify.check import Verification, compare  # noqa: E402
from spmd_auto.verify.hlo import read_compiled  # noqa: E402
from spmd_auto.verify.targets import compile_for, parse_target  # noqa: E402

GPT = {"layers": 6, "batch": 64, "sequence": 512, "width": 1024, "heads": 16, "vocab": 32_768}


def compile_and_read(plan: Plan, target: str) -> tuple[Verification, float]:
    """(plan against the program compiled for `target`, seconds of lowering and compiling)."""
    where = parse_target(target)
    mesh = plan.mesh.build(where.devices(plan.mesh.device_count))
    start = time.perf_counter()
    compiled = compile_for(where, plan.lower_step(mesh).lower())
    seconds = time.perf_counter() - start
    return compare(plan, read_compiled(compiled, mesh), target), seconds


def moved(verification: Verification) -> float:
    """Bytes that one device sends per step in the compiled program."""
    return sum(row.found_bytes for row in verification.rows)


def commit() -> str:
    """The commit that is checked out, and whether files that matter are changed."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    dirty = git("status", "--porcelain", "src", "tests/models", "tests/foreign", "benchmarks")
    return git("rev-parse", "--short", "HEAD") + (" + changes" if ".py" in dirty else "")


class Report:
    """Prints lines and keeps them for a file under `results/`, headed by commit, date and versions."""

    def __init__(self, name: str):
        self.path = ROOT / "benchmarks" / "results" / f"{name}.txt"
        python = ".".join(map(str, sys.version_info[:3]))
        self.lines = [f"commit {commit()}, {datetime.date.today()}, jax {jax.__version__}, Python {python}"]
        print(self.lines[0])

    def add(self, line: str = "") -> None:
        print(line, flush=True)
        self.lines.append(line)

    def write(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text("\n".join(self.lines) + "\n")
        print(f"written to {self.path.relative_to(ROOT)}")
