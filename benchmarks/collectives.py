"""Collectives predicted and compiled, for 12 programs x 5 assignments x {TPU, GPU}: bytes by mesh axes.

python benchmarks/collectives.py [--only PROGRAM ...] [--again] [--collect COMMIT ...]

Rows are made by `compiled.py`, resumably; `--collect` makes none, and reads those made at these commits, the first
that has a row. Results with the commit of each row go to results/collectives.json, the same as a table to .txt.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from common import ROOT
from compiled import Result, Row, line_of, options_of, rows, run_all

from spmd_auto.cost.report import Collective as Predicted
from spmd_auto.store import write_whole
from spmd_auto.verify.check import negligible
from spmd_auto.verify.program import Collective as Found
from spmd_auto.verify.rewrites import EQUAL, REWRITTEN, Outcome, find_rewrites

PROGRAMS = (
    "mlp",
    "gpt_scan_remat",
    "gpt_unroll",
    "gpt_scan",
    "llama_scan_remat",
    "moe_scan_remat",
    "resnet",
    "vit",
    "recommender",
    "lstm",
    "unet",
    "bert_unroll",
)
STORE = ROOT / "benchmarks" / "results" / "collectives.json"

Entry = dict[str, Any]


def axis_rows(result: Result) -> list[Entry]:
    """A row's bytes by mesh axes, with what became of them; sets of axes over which nothing that matters moves are
    left out."""
    predicted = [
        Predicted(**{**_known(c, Predicted), "axes": tuple(c["axes"])}) for c in result["predicted_collectives"]
    ]
    found = [
        Found(**{**c, "axes": tuple(c["axes"]), "dtypes": tuple(c["dtypes"])}) for c in result["found_collectives"]
    ]
    totals = sum(c.bytes for c in predicted), sum(c.ring_bytes * c.times for c in found)
    ignored = negligible(max(totals))
    out = []
    for axes in sorted({c.axes for c in (*predicted, *found)}):
        before, after = [c for c in predicted if c.axes == axes], [c for c in found if c.axes == axes]
        a, b = sum(c.bytes for c in before), sum(c.ring_bytes * c.times for c in after)
        if max(a, b) <= ignored:
            continue
        finding = find_rewrites(before, after, ignored)
        entry: Entry = {"axes": "+".join(axes), "predicted": round(a), "found": round(b)}
        entry |= {"outcome": finding.outcome.name.lower(), "rewrites": sorted(r.name.lower() for r in finding.rewrites)}
        if finding.outcome is Outcome.DIFFERENT:
            entry["kinds"] = {
                kind: [sum(m.get(k, 0) for k in m if k == f"{kind}@{'+'.join(axes)}") for m in _sides(result)]
                for kind in sorted(
                    {k.split("@")[0] for m in _sides(result) for k in m if k.endswith(f"@{'+'.join(axes)}")}
                )
            }
            entry["line"] = next((line.source for line in finding.lines if line.source), "")
        out.append(entry)
    return out


def _sides(result: Result) -> tuple[dict[str, int], dict[str, int]]:
    return result["predicted"], result["found"]


def _known(data: dict[str, Any], of: type) -> dict[str, Any]:
    """Rows of an older commit may lack fields of a record, or have others."""
    names = {f.name for f in dataclasses.fields(of)}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k in names}


def entry_of(row: Row, result: Result) -> Entry:
    head: Entry = {"program": row.program, "assignment": row.assignment, "platform": row.platform}
    head["commit"] = result["commit"]
    if "failed" in result:
        return head | {"failed": result["failed"]}
    memory = result["found_memory"] or {}
    return head | {
        "bytes": axis_rows(result),
        "flops": [result["predicted_flops"], result["found_flops"]],
        "memory": [round(result["predicted_memory"]["total"]), memory],
        "seconds": result["seconds"],
    }


def shares(entries: Iterable[Entry]) -> dict[str, Any]:
    """Rows of mesh axes: how many, those within 2 %, those explained within 10 %, the rest; and rewrites of those."""
    entries = list(entries)
    measured = [row for e in entries for row in e.get("bytes", ())]
    near = [
        row for row in measured if abs(row["predicted"] - row["found"]) <= EQUAL * max(row["predicted"], row["found"])
    ]
    rest = [row for row in measured if row not in near]
    explained = [
        row
        for row in rest
        if row["outcome"] == "rewritten"
        and abs(row["predicted"] - row["found"]) <= REWRITTEN * max(row["predicted"], row["found"])
    ]
    unexplained = [row for row in rest if row not in explained and row["outcome"] != "equal"]
    return {
        "programs": len(entries),
        "failed": sum("failed" in e for e in entries),
        "rows": len(measured),
        "within": len(near),
        "small": len(rest) - len(explained) - len(unexplained),  # what differs is less than matters
        "explained": len(explained),
        "unexplained": len(unexplained),
        "rewrites": dict(Counter(name for row in explained for name in row["rewrites"])),
    }


def table(entries: list[Entry]) -> Iterator[str]:
    yield f"{'program / assignment / platform':48}{'axes':6}{'predicted':>11}{'compiled':>11} MB"
    for e in entries:
        name = f"{e['program']}/{e['assignment']}/{e['platform']}"
        if "failed" in e:
            yield f"{name:48}failed ({e['commit']}): {e['failed'][:120]}"
        for row in e.get("bytes", ()):
            off = 100 * (row["predicted"] / row["found"] - 1) if row["found"] else float("inf")
            how = row["outcome"] + (f" ({', '.join(row['rewrites'])})" if row["rewrites"] else "")
            line = f" {row['line']}" if row.get("line") else ""
            sizes = f"{row['predicted'] / 1e6:11.2f}{row['found'] / 1e6:11.2f} {off:+8.2f} %"
            yield f"{name:48}{row['axes']:6}{sizes}  {how}{line}"
    for platform in ("gpu", "tpu", ""):
        s = shares(e for e in entries if platform in ("", e["platform"]))
        if s["rows"]:
            yield (
                f"{platform or 'all'}: {s['programs']} programs ({s['failed']} failed), {s['rows']} rows of mesh axes; "
                f"{s['within']} within {EQUAL:.0%} ({s['within'] / s['rows']:.1%}), {s['small']} differ by less than "
                f"matters, {s['explained']} rewritten within {REWRITTEN:.0%} {s['rewrites']}, {s['unexplained']} others"
            )


def collected(wanted: Iterable[Row], commits: list[str]) -> Iterator[tuple[Row, Result]]:
    for row in wanted:
        paths = [row.path(at) for at in commits if row.path(at).exists()]
        found = [json.loads(path.read_text()) for path in paths]
        if found:
            yield row, next((r for r in found if "failed" not in r), found[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options_of(parser, PROGRAMS)
    parser.add_argument("--collect", nargs="+", metavar="COMMIT", help="make no rows: read those of these commits")
    options = parser.parse_args()
    wanted = rows(options.only, options.assignments, options.platforms)
    entries = []
    results = collected(wanted, options.collect) if options.collect else run_all(wanted, options.again)
    for row, result in results:
        entries.append(entry_of(row, result))
        print(line_of(row, result), flush=True)
    write_whole(STORE, "[\n" + ",\n".join(json.dumps(e) for e in entries) + "\n]\n")
    lines = list(table(entries))
    write_whole(STORE.with_suffix(".txt"), "\n".join(["commits of the rows are in collectives.json", *lines]) + "\n")
    print("\n".join(lines))
    return int(shares(entries)["unexplained"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
