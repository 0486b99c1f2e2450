"""Rows of the benchmarks: a program, an assignment and a platform, planned, compiled and read. Resumable.

python benchmarks/compiled.py [--only PROGRAM ...] [--assignments NAME ...] [--platforms tpu gpu] [--again]

Each row runs in a process of its own, so that a compiler that crashes or takes too long costs one row.  Its result is
written under `$SPMD_AUTO_CACHE/rows/<commit>`, and is not made again at that commit unless `--again` is given.
Compiled programs are kept as text by the digest of what was compiled: at another commit only what lowers to another
program is compiled anew, and all are read by the reader of that commit.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
warnings.filterwarnings("ignore")

from common import ROOT, commit  # noqa: E402

from spmd_auto import cluster  # noqa: E402
from spmd_auto.mesh import LogicalMesh  # noqa: E402
from spmd_auto.plan import Plan  # noqa: E402
from spmd_auto.plan.make import analyse_for, make_plan  # noqa: E402
from spmd_auto.store import default_directory, write_whole  # noqa: E402
from spmd_auto.trace import trace  # noqa: E402
from spmd_auto.verify.cache import compiler_versions  # noqa: E402
from spmd_auto.verify.hlo import read_hlo, read_memory  # noqa: E402
from spmd_auto.verify.program import MemoryUse, ProgramSummary  # noqa: E402
from spmd_auto.verify.targets import compile_for, parse_target  # noqa: E402
from tests.strategies import priced  # noqa: E402

ASSIGNMENTS = ("found", "data", "zero3", "megatron", "megatron+sequence+zero3")
TARGETS = {"tpu": "tpu:v5e:4x4", "gpu": "gpu:h100:2x8"}
LIMIT = 400.0  # seconds of one row

Result = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Row:
    program: str
    assignment: str
    platform: str

    def __str__(self) -> str:
        return f"{self.program}/{self.assignment}/{self.platform}"

    def path(self, at: str) -> Path:
        name = f"{self.program}-{self.assignment}-{self.platform}.json"
        return default_directory() / "rows" / at.replace(" + changes", "-changed") / name


def mesh_of(platform: str) -> LogicalMesh:
    """16 devices as 4 x 4."""
    chips = cluster("v5e", topology="4x4") if platform == "tpu" else cluster("h100", hosts=2)
    return chips.mesh(a=4, b=4)


def rows(
    programs: Iterable[str], assignments: Iterable[str] = ASSIGNMENTS, platforms: Iterable[str] = tuple(TARGETS)
) -> list[Row]:
    """All rows, ordered so that each program and platform is seen early."""
    programs, platforms = list(programs), list(platforms)
    return [Row(p, a, where) for a in assignments for where in platforms for p in programs]


# ---- one row, in its own process ----------------------------------------------------------------------


def plan_of(row: Row) -> tuple[Plan, dict[str, float]]:
    """(the row's plan, seconds of tracing and of planning)."""
    from programs import PROGRAMS

    start = time.perf_counter()
    step, state, batch = PROGRAMS[row.program]()
    program = trace(step, state, batch)
    traced = time.perf_counter()
    mesh = mesh_of(row.platform)
    if row.assignment == "found":
        plan = make_plan(program, mesh)
    else:
        plan = priced(program, mesh, row.assignment, analyse_for(program, mesh, {}))
    return plan, {"trace": traced - start, "plan": time.perf_counter() - traced}


def compiled(plan: Plan, target: str) -> tuple[ProgramSummary, str, dict[str, float]]:
    """(what the plan's program contains, its digest, seconds); compiled if no equal one was before."""
    where = parse_target(target)
    mesh = plan.mesh.build(where.devices(plan.mesh.device_count))
    start = time.perf_counter()
    lowered = plan.lower_step(mesh).lower()
    seconds = {"lower": time.perf_counter() - start}
    parts = [str(where), sorted(where.compiler_options.items()), list(mesh.shape.items()), compiler_versions(where)]
    digest = hashlib.sha256((json.dumps(parts) + lowered.as_text()).encode()).hexdigest()[:32]
    path = default_directory() / "texts" / f"{digest}.gz"
    if not path.exists():
        start = time.perf_counter()
        program = compile_for(where, lowered)
        seconds["compile"] = time.perf_counter() - start
        memory = read_memory(program)
        kept = {"memory": memory and dataclasses.asdict(memory), "seconds": seconds["compile"]}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        with gzip.open(partial, "wt") as file:
            file.write(json.dumps(kept) + "\n" + program.as_text())
        partial.replace(path)
    start = time.perf_counter()
    with gzip.open(path, "rt") as file:
        kept = json.loads(file.readline())
        text = file.read()
    summary = read_hlo(text, mesh.axis_names, mesh.devices.shape)
    summary = dataclasses.replace(summary, memory=kept["memory"] and MemoryUse(**kept["memory"]))
    return summary, digest, seconds | {"read": time.perf_counter() - start, "compiled_once": kept["seconds"]}


def evaluate(row: Row) -> Result:
    """All figures of a row. Bytes are those that one device sends per step, by `kind@axes`."""
    plan, seconds = plan_of(row)
    summary, digest, more = compiled(plan, TARGETS[row.platform])
    return {
        "program": row.program,
        "assignment": row.assignment,
        "platform": row.platform,
        "target": TARGETS[row.platform],
        "digest": digest,
        "seconds": {k: round(s, 2) for k, s in (seconds | more).items()},
        "splits": {axis: "+".join(to) for axis, to in plan.axis_splits().items()},
        "zero": {form: "+".join(to) for form, to in plan.zero_axes().items()},
        "predicted": _by_kind(plan.report.bytes_by_kind_and_axes()),
        "found": _by_kind(summary.bytes_by_kind_and_axes()),
        "predicted_flops": plan.report.flops,
        "found_flops": summary.dot_flops,
        "predicted_seconds": plan.seconds,
        "predicted_memory": dataclasses.asdict(plan.report.memory) | {"total": plan.memory},
        "found_memory": summary.memory and dataclasses.asdict(summary.memory),
        "predicted_collectives": [_plain(dataclasses.asdict(c)) for c in plan.report.collectives],
        "found_collectives": [_plain(dataclasses.asdict(c)) for c in summary.collectives],
        "notes": list(summary.notes),
    }


def _by_kind(moved: dict[tuple[str, tuple[str, ...]], float]) -> dict[str, int]:
    return {f"{kind}@{'+'.join(axes)}": round(b) for (kind, axes), b in moved.items()}


def _plain(collective: dict[str, Any]) -> dict[str, Any]:
    """Without the parts of paths that differ from machine to machine."""
    source = str(collective["source"]).replace(f"{ROOT}/", "")
    return collective | {"source": source.split("site-packages/")[-1]}


# ---- all rows -----------------------------------------------------------------------------------------


def run_all(wanted: Iterable[Row], again: bool = False) -> Iterator[tuple[Row, Result]]:
    """Each row with its result: `{"failed": why}` where it has none. Failed rows are tried again."""
    at = commit()
    for row in wanted:
        path = row.path(at)
        done = None if again or "changes" in at or not path.exists() else json.loads(path.read_text())
        if done is None or "failed" in done:
            done = _in_process(row, path) | {"commit": at}
            write_whole(path, json.dumps(done) + "\n")
        yield row, done


def _in_process(row: Row, path: Path) -> Result:
    path.parent.mkdir(parents=True, exist_ok=True)
    part, log = path.with_suffix(".part"), path.with_suffix(".log")
    part.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--row", row.program, row.assignment, row.platform, str(part)]
    with log.open("w") as out:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            child.wait(LIMIT)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {LIMIT:.0f} s"}
        finally:
            if child.poll() is None:  # out of time, or interrupted
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    if child.returncode == 0 and part.exists():
        result: Result = json.loads(part.read_text())
        part.unlink()
        log.unlink()
        return result
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    why = next((x for x in reversed(said) if "Error" in x or "Check fail" in x), said[-1] if said else "")
    return {"failed": f"exit {child.returncode}: {why[:300]}"}


def line_of(row: Row, result: Result) -> str:
    if "failed" in result:
        return f"{row!s:48} failed: {result['failed']}"
    predicted, found = (sum(result[k].values()) for k in ("predicted", "found"))
    off = f"{100 * (predicted / found - 1):+7.2f} %" if found else ""
    seconds = result["seconds"]
    return (
        f"{row!s:48} {predicted / 1e6:10.1f} {found / 1e6:10.1f} MB {off}   plan {seconds['plan']:.0f} s, "
        f"lower {seconds['lower']:.0f} s, compile {seconds.get('compile', 0.0):.0f} s"
    )


def options_of(parser: argparse.ArgumentParser, programs: Iterable[str]) -> None:
    """Adds what chooses rows."""
    parser.add_argument("--only", nargs="+", metavar="PROGRAM", default=list(programs))
    parser.add_argument("--assignments", nargs="+", choices=ASSIGNMENTS, default=ASSIGNMENTS)
    parser.add_argument("--platforms", nargs="+", choices=tuple(TARGETS), default=tuple(TARGETS))
    parser.add_argument("--again", action="store_true", help="make rows anew that are there")


def main() -> int:
    if sys.argv[1:2] == ["--row"]:
        *row, path = sys.argv[2:]
        Path(path).write_text(json.dumps(evaluate(Row(*row))))
        return 0
    from programs import PROGRAMS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options_of(parser, PROGRAMS)
    options = parser.parse_args()
    failed = 0
    for row, result in run_all(rows(options.only, options.assignments, options.platforms), options.again):
        failed += "failed" in result
        print(f"{time.strftime('%H:%M:%S')} {line_of(row, result)}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
