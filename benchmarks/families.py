"""Model families x strategies: errors against one device, all pairs. Resumes where it was interrupted.

python benchmarks/families.py [--again]
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from common import Report  # noqa: E402

from spmd_auto.mesh.simulate import simulate_devices  # noqa: E402

simulate_devices(8)

from tests.lower.test_families import PAIRS, mesh_of, worst_error  # noqa: E402


def main() -> int:
    report = Report("families")
    done: dict[str, str] = {}
    if report.path.exists() and "--again" not in sys.argv:
        head, *rows = report.path.read_text().splitlines()
        if head == report.lines[0]:  # rows of the same commit
            done = {" ".join(line.split()[:2]): line for line in rows}
    worst = 0.0
    for family, strategy in PAIRS:
        line = done.get(f"{family} {strategy}")
        if line is None:
            error = worst_error(family, strategy)
            line = f"{family:12} {strategy:8} {mesh_of(family, strategy):4} relative error {error:.1e}"
        worst = max(worst, float(line.split()[-1]))
        report.add(line)
        report.write()
    return int(worst > 1e-9)


if __name__ == "__main__":
    raise SystemExit(main())
