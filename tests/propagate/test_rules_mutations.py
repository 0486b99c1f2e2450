"""The oracle must tell wrong rules from right ones."""

from __future__ import annotations

import collections
import random

import pytest

from .applications import CASES, Draw, cycling
from .mutations import caught_by, meaning, mutations_of
from .test_rules_oracle import STATABLE


@pytest.mark.slow
def test_mutants_are_caught(capsys: pytest.CaptureFixture[str]) -> None:
    """All sizes are 4, so that a factor on a wrong dimension is a matter of numbers, not of shapes."""
    chosen = random.Random(0)
    score: collections.Counter[str] = collections.Counter()
    by_kind: collections.Counter[tuple[str, str]] = collections.Counter()
    survivors = []
    seen: set[object] = set()
    for name in STATABLE:
        app = CASES[name].apply(Draw(cycling(4)))
        rule = app.rule()
        everything = list(mutations_of(app, rule))
        mutants = [m for m in everything if meaning(app, m.rule) != meaning(app, rule)]
        score["equivalent"] += len(everything) - len(mutants)
        # Dozens of elementwise primitives share one rule: one mutant each, the first gets all its share.
        first = rule not in seen
        seen.add(rule)
        for mutant in chosen.sample(mutants, min(len(mutants), 6 if first else 1)):
            by = caught_by(app, rule, mutant.rule) or "nobody"
            score[by] += 1
            by_kind[mutant.kind, by] += 1
            if by == "nobody":
                survivors.append(f"{name}: {mutant.kind} {mutant.what}")
    killed = score["numbers"] + score["form"] + score["freedom"]
    with capsys.disabled():
        print(f"\nmutants: {killed}/{killed + score['nobody']} caught, {dict(score)}")
        print("by kind:", {f"{kind}/{by}": n for (kind, by), n in sorted(by_kind.items())})
        print("survivors:", *(survivors or ["none"]), sep="\n  ")
    assert killed >= 0.95 * (killed + score["nobody"])
