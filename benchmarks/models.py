"""Models nobody here wrote: analysed, planned, lowered and held against one device, on a (2, 4) mesh of CPU devices.

python benchmarks/models.py [--only NAME ...] [--again]

Each strategy's row is written to results/models.json as soon as it is there, with the commit it is of; what is there is
not done again unless `--again` is given. results/models.txt is the same as a table. Packages that are not installed
are left out: transformers==4.49.0, google-tunix, vitax, dantinox, flaxdiff, flaxmodels (all with Python 3.11).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

from spmd_auto.mesh.simulate import simulate_devices

simulate_devices(8)
warnings.filterwarnings("ignore")

import jax  # noqa: E402
from common import ROOT, commit  # noqa: E402

from tests.foreign import measure  # noqa: E402
from tests.foreign.other_models import MODELS  # noqa: E402
from tests.foreign.step import Training  # noqa: E402
from tests.foreign.transformers_models import ARCHITECTURES  # noqa: E402

STRATEGIES = ("found", "data", "zero3", "megatron")
STORE = ROOT / "benchmarks" / "results" / "models.json"
TABLE = STORE.with_suffix(".txt")

Row = dict[str, Any]


def builders() -> dict[str, Callable[[], Training]]:
    return {name: a.build for name, a in ARCHITECTURES.items()} | MODELS


def of_model(reference: measure.Reference) -> Row:
    """Figures of a model before any strategy; seconds of this machine."""
    graph = reference.analysis.graph
    return {
        "operations": len(graph.ops),
        "trace_seconds": round(reference.trace_seconds, 2),
        "propagation_seconds": round(reference.analysis_seconds, 2),
        "no_rule": {
            u.primitive: f"{u.source.split('site-packages/')[-1]}, {u.bytes} B" for u in graph.unknown.values()
        },
        "axes": [n for n in reference.analysis.names.values() if not n.startswith(("inner", "hidden", "window"))],
        "tolerance": reference.tolerance,
    }


def of_strategy(reference: measure.Reference, strategy: str) -> Row:
    """Figures of a strategy; bytes that one device sends per step by mesh axes, and bytes whose split ends by line."""
    outcome = measure.outcome(reference, strategy)
    plan, verification = outcome.plan, outcome.verification
    errors = {"loss": outcome.loss_error, "grads": outcome.grads_error, "state": outcome.state_error}
    return {
        "plan_seconds": round(outcome.plan_seconds, 2),
        "compile_seconds": round(outcome.compile_seconds, 1),
        "splits": {axis: "+".join(to) for axis, to in plan.axis_splits().items()},
        "predicted": {"+".join(r.axes): round(r.predicted_bytes) for r in verification.rows},
        "found": {"+".join(r.axes): round(r.found_bytes) for r in verification.rows},
        "predicted_flops": verification.predicted_flops,
        "found_flops": verification.found_flops,
        "agrees": verification.equal,
        "split_ends": dict(list(measure.lost_splits(plan).items())[:5]),
        "errors": {k: float(f"{e:.2g}") for k, e in errors.items()},
        "equal": max(errors.values()) < reference.tolerance,
    }


def lines(store: dict[str, Row]) -> list[str]:
    out = [
        f"{'model':22}{'ops':>6}{'trace':>7}{'analysis':>9}  {'strategy':10}{'plan s':>7}{'predicted':>11}{'found':>11}"
        f"  {'bytes':7}{'error':>9}  parity"
    ]
    for name, row in store.items():
        head = f"{name:22}"
        if "failed" in row:
            out.append(f"{head} failed: {row['failed']}")
            continue
        head += f"{row['operations']:6}{row['trace_seconds']:7.1f}{row['propagation_seconds']:9.1f}  "
        for strategy, cell in row["strategies"].items():
            if "failed" in cell:
                out.append(f"{head}{strategy:10} failed: {cell['failed']}")
            else:
                out.append(
                    f"{head}{strategy:10}{cell['plan_seconds']:7.1f}{sum(cell['predicted'].values()):11}"
                    f"{sum(cell['found'].values()):11}  {'agree' if cell['agrees'] else 'DIFFER':7}"
                    f"{max(cell['errors'].values()):9.1e}  {'equal' if cell['equal'] else 'DIFFERS'}"
                )
            head = " " * len(head)
        for primitive, where in row["no_rule"].items():
            out.append(f"{'':22} no rule for {primitive} at {where}")
        ends = {k: b for cell in row["strategies"].values() for k, b in cell.get("split_ends", {}).items()}
        out += [f"{'':22} a split ends at {where}: {b} B" for where, b in ends.items()]
    return out


def save(store: dict[str, Row]) -> None:
    STORE.parent.mkdir(exist_ok=True)
    partial = STORE.with_suffix(".part")
    partial.write_text(json.dumps(store, indent=1) + "\n")
    partial.replace(STORE)
    TABLE.write_text(
        "\n".join([f"jax {jax.__version__}; commits of the rows are in models.json", *lines(store)]) + "\n"
    )


def run(name: str, build: Callable[[], Training], store: dict[str, Row]) -> None:
    """Fills in what is missing of a model, and saves after each strategy."""
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"{datetime.datetime.now():%H:%M:%S} {name} (+{time.perf_counter() - start:.0f} s): {text}", flush=True)

    done = store.get(name, {}).get("strategies", {})
    missing = [s for s in STRATEGIES if "failed" in done.get(s, {"failed": "not tried"})]
    if not missing:
        return
    with jax.enable_x64(True):
        try:
            reference = measure.refer(build())
        except ImportError as error:
            say(f"not installed: {error}")
            return
        except Exception as error:  # the next model may fare better
            store[name] = {"commit": commit(), "failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
            say(store[name]["failed"])
            save(store)
            return
        row = store[name] = of_model(reference) | {"strategies": store.get(name, {}).get("strategies", {})}
        say(f"{row['operations']} operations, traced in {row['trace_seconds']} s")
        for strategy in missing:
            try:
                cell = of_strategy(reference, strategy)
            except Exception as error:
                cell = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
            row["strategies"][strategy] = {"commit": commit(), **cell}
            parity = "equal" if cell.get("equal") else cell.get("failed", "DIFFERS")
            say(f"{strategy}: {parity}, bytes {'agree' if cell.get('agrees') else 'DIFFER'}")
            save(store)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(builders()), metavar="NAME", default=None)
    parser.add_argument("--again", action="store_true", help="do rows anew that are there")
    options = parser.parse_args()
    store: dict[str, Row] = json.loads(Path(STORE).read_text()) if STORE.exists() else {}
    for name, build in builders().items():
        if options.only and name not in options.only:
            continue
        if options.again or "failed" in store.get(name, {}):
            store.pop(name, None)
        run(name, build, store)
        jax.clear_caches()
    print("\n".join(lines(store)))
    cells = [cell for row in store.values() for cell in row.get("strategies", {}).values()]
    return 0 if all(cell.get("equal") for cell in cells) and not any("failed" in row for row in store.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
