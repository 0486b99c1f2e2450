"""Joint refinement: forms of operations switched together where a price is shared.

Each operation chose its form by itself.  Then: any single operation may switch; all consumers of an edge
may agree on one target; all leaves of a sum may stay partial, or none.
"""

from __future__ import annotations

from collections.abc import Callable

from spmd_auto.cost.operation import OpForm
from spmd_auto.cost.pricer import Priced, Pricer

ROUNDS = 4
GAIN = 1e-9  # a switch must save this share of the step


def refine(pricer: Pricer, priced: Priced, rounds: int = ROUNDS) -> Priced:
    """A price at most as high, with the same specs. Within the memory budget if `priced` was."""
    specs, structure = priced.specs, pricer.structure
    forms, edges, sums = list(priced.forms), list(priced.edge_seconds), list(priced.sum_seconds)
    seconds, held, overlap = priced.apart, list(priced.held), pricer.overlap
    saved = overlap.saved(held)
    choices = {i: pricer.forms(i, specs) for i in structure.active}
    improved_ever = False

    def attempt(switch: dict[int, OpForm]) -> bool:
        nonlocal seconds, held, saved
        switch = {i: form for i, form in switch.items() if form != forms[i]}
        if not switch:
            return False
        before = {i: forms[i] for i in switch}
        delta = 0.0
        now = list(held)
        edge_ids: set[int] = set()
        sum_ids: set[int] = set()
        for i, form in switch.items():
            old = forms[i]
            assert old is not None
            delta += pricer.op_seconds(i, form) - pricer.op_seconds(i, old)
            overlap.operation(now, i, old, -1)
            overlap.operation(now, i, form)
            edge_ids.update(structure.edges_of_op.get(i, ()))
            sum_ids.update(structure.sums_of_op.get(i, ()))
            forms[i] = form
        new_edges = {e: pricer.edge(e, specs, forms) for e in edge_ids}
        new_sums = {g: pricer.sum_group(g, forms)[0] for g in sum_ids}
        delta += sum(s - edges[e] for e, s in new_edges.items()) + sum(s - sums[g] for g, s in new_sums.items())
        for e, s in new_edges.items():
            overlap.edge(now, e, s - edges[e])
        for g, s in new_sums.items():
            overlap.sum_group(now, g, s - sums[g])
        more = overlap.saved(now) - saved
        if delta - more < -GAIN * (seconds - saved):
            seconds, held, saved = seconds + delta, now, saved + more
            for e, s in new_edges.items():
                edges[e] = s
            for g, s in new_sums.items():
                sums[g] = s
            return True
        for i, form in before.items():
            forms[i] = form
        return False

    for _ in range(rounds):
        improved = False
        for switch in _switches(pricer, choices):
            improved |= attempt(switch)
        improved_ever |= improved
        if not improved:
            break
    if not improved_ever:
        return priced
    better = pricer.assemble(priced.assignment, specs, forms)
    return better if better.score <= priced.score else priced


def _switches(pricer: Pricer, choices: dict[int, tuple[OpForm, ...]]) -> list[dict[int, OpForm]]:
    structure = pricer.structure
    out: list[dict[int, OpForm]] = []
    for i, forms in choices.items():
        if len(forms) > 1:
            out += [{i: form} for form in forms]
    for edge in structure.edges:
        if len(edge.consumers) < 2:
            continue
        targets = dict.fromkeys(form.targets[k] for c, k in edge.consumers for form in choices[c])
        for target in targets:
            agree = {}
            for c, k in edge.consumers:
                form = _first(choices[c], lambda f, k=k, target=target: f.targets[k] == target)
                if form is not None:
                    agree[c] = form
            if len(agree) > 1:
                out.append(agree)
    for group in structure.sums:
        for partial in (True, False):
            agree = {}
            for c in dict.fromkeys(c for c, _ in group.leaves):
                form = _first(choices[c], lambda f, partial=partial: bool(f.reductions) == partial)
                if form is not None:
                    agree[c] = form
            if agree:
                out.append(agree)
    return out


def _first(forms: tuple[OpForm, ...], wanted: Callable[[OpForm], bool]) -> OpForm | None:
    return next((form for form in forms if wanted(form)), None)
