"""Random programs under random strategies on (8,), (2, 4) and (2, 2, 2) simulated devices: order, results, bytes.

python benchmarks/fuzz.py [--programs 2000] [--again]

Rows are written to .cache/fuzz.jsonl as they come, each with its commit; what is there and did not fail is not done
again unless `--again` is given. results/fuzz.txt is the summary. Programs run in a process of their own, so that one
that aborts the compiler is a row too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import warnings
from collections import Counter
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

from spmd_auto.mesh.simulate import simulate_devices

simulate_devices(8)
warnings.filterwarnings("ignore")

import jax  # noqa: E402
from common import ROOT, Report, commit  # noqa: E402

from tests.fuzz.check import OneDeviceFails, check_all  # noqa: E402
from tests.fuzz.draft import Call  # noqa: E402
from tests.fuzz.programs import generate  # noqa: E402

STORE = ROOT / ".cache" / "fuzz.jsonl"
EDGES = (0.0, 0.5, 0.9, 0.98, 1.02, 1.1, 1.5, 2.0, 4.0, math.inf)  # compiled over predicted bytes
SMALL = 256  # bytes: rows below are sums to scalars

Row = dict[str, Any]


def examine(seed: int, version: str) -> Row:
    program = generate(seed)
    recipes = sorted({node.recipe for node in program.nodes if isinstance(node, Call)})
    row: Row = {"seed": seed, "commit": version, "gradient": program.gradient, "recipes": recipes}
    try:
        outcome = check_all(program, seed)
    except OneDeviceFails as error:
        return row | {"refused": str(error)[:160]}
    except Exception as error:
        return row | {"failed": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"}
    return row | {"split": outcome.split, "error": outcome.error, "moved": outcome.moved}


def work(seeds: list[int]) -> None:
    """In a process of its own: rows to the standard output."""
    version = commit()
    for k, seed in enumerate(seeds):
        print(json.dumps({"begun": seed}), flush=True)
        print(json.dumps(examine(seed, version)), flush=True)
        if k % 25 == 24:
            jax.clear_caches()


def run(seeds: list[int], store: dict[int, Row]) -> None:
    """Fills in rows; a process that dies is a failure of the program that it had begun."""
    left = list(seeds)
    while left:
        batch, begun = left[:200], None
        command = [sys.executable, __file__, "--seeds", *map(str, batch)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                row = json.loads(line)
                if "begun" in row:
                    begun = row["begun"]
                    continue
                store[row["seed"]] = row
                begun = None
                if len(store) % 20 == 0:
                    save(store)
                if "failed" in row:
                    print(f"{row['seed']}: {row['failed']}", flush=True)
        if begun is not None:
            store[begun] = {"seed": begun, "commit": commit(), "failed": f"the process ended ({process.returncode})"}
            print(f"{begun}: {store[begun]['failed']}", flush=True)
        elif process.returncode:
            raise SystemExit(f"the worker ended with {process.returncode} before its first program")
        left = [seed for seed in left if seed not in store]
        save(store)
        print(f"{len(store)} programs", flush=True)


def save(store: dict[int, Row]) -> None:
    STORE.parent.mkdir(exist_ok=True)
    partial = STORE.with_suffix(".part")
    partial.write_text("".join(json.dumps(store[seed]) + "\n" for seed in sorted(store)))
    partial.replace(STORE)


def summarise(store: dict[int, Row]) -> None:
    report = Report("fuzz")
    rows = list(store.values())
    failed = [row for row in rows if "failed" in row]
    refused = [row for row in rows if "refused" in row]
    fine = [row for row in rows if "moved" in row]
    report.add("commits of the rows: " + ", ".join(f"{k} ({n})" for k, n in Counter(r["commit"] for r in rows).items()))
    report.add(f"{len(rows)} programs, {sum(row.get('gradient', False) for row in rows)} with gradients")
    report.add(f"{len(failed)} failed; {sum(row['split'] > 0 for row in fine)} of the others have split arguments")
    report.add(f"largest relative error {max((row['error'] for row in fine), default=0.0):.2g}")
    report.add(f"{len(refused)} are refused by the compiler on one device: {sorted(row['seed'] for row in refused)}")
    for row in failed:
        report.add(f"  seed {row['seed']}: {row['failed']}")
    ratios: Counter[int] = Counter()
    predicted = found = 0.0
    for row in fine:
        for _, p, f in row["moved"]:
            predicted, found = predicted + p, found + f
            if max(p, f) >= SMALL:
                ratio = f / p if p else math.inf
                ratios[next(k for k, edge in enumerate(EDGES[1:]) if ratio < edge or edge == math.inf)] += 1
    total = sum(ratios.values())
    report.add(f"bytes that one device sends, by mesh axes, compiled over predicted ({total} of at least {SMALL} B):")
    for k, (low, high) in enumerate(zip(EDGES, EDGES[1:], strict=False)):
        report.add(f"  {low:4.2f} to {high:4.2f} {ratios[k]:6} {100 * ratios[k] / max(total, 1):5.1f} %")
    report.add(f"all bytes: predicted {predicted:.0f}, compiled {found:.0f}")
    uses = Counter(name for row in rows for name in row.get("recipes", ()))
    report.add("programs with: " + ", ".join(f"{name} {n}" for name, n in uses.most_common()))
    report.write()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--again", action="store_true", help="do rows anew that are there")
    parser.add_argument("--seeds", type=int, nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.seeds:
        work(options.seeds)
        return 0
    rows = [json.loads(line) for line in STORE.read_text().splitlines()] if STORE.exists() and not options.again else []
    store: dict[int, Row] = {row["seed"]: row for row in rows if "failed" not in row}
    run([seed for seed in range(options.programs) if seed not in store], store)
    summarise(store)
    return 1 if any("failed" in row for row in store.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
