"""The rewrite that `remat_after_ad.py` tries: one forward scan, one backward scan, all else replayed as it is."""

from __future__ import annotations

from jax import lax

from spmd_auto import _compat
from spmd_auto.propagate.graph import CALLS


def evaluate(jaxpr, args, hook=None, count=None):
    """Evaluates a jaxpr with calls inlined. `hook(index, operands, results)` may replace an equation's results."""
    inner, count = _compat.open_jaxpr(jaxpr), [0] if count is None else count
    env = dict(zip([*inner.constvars, *inner.invars], [*_compat.consts_of(jaxpr), *args], strict=True))
    for eqn in inner.eqns:
        ins = [v.val if isinstance(v, _compat.Literal) else env[v] for v in eqn.invars]
        if eqn.primitive.name in CALLS:
            outs = evaluate(_compat.call_jaxpr(eqn), ins, hook, count)
        else:
            outs = _compat.bind(eqn, ins)
            outs = hook(count[0], ins, outs) if hook else outs
            count[0] += 1
        env.update(zip(eqn.outvars, outs, strict=True))
    return [v.val if isinstance(v, _compat.Literal) else env[v] for v in inner.outvars]


def frontier(body, args, cotangents):
    """{(equation, result): value} of what needs no cotangent but is used together with one."""
    linear, made, wanted, alive = {id(x) for x in cotangents}, {}, {}, []

    def hook(index, ins, outs):
        alive.append((ins, outs))
        if any(id(x) in linear for x in ins):
            linear.update(id(x) for x in outs)
            wanted.update({made[id(x)]: x for x in ins if id(x) in made})
        else:
            made.update({id(x): (index, k) for k, x in enumerate(outs)})
        return outs

    evaluate(body, args, hook)
    return wanted


def rewrite(closed, add):
    """A function like `closed` with remat added to (or removed from) its pair of scans."""
    jaxpr = _compat.open_jaxpr(closed)
    first, second = (e for e in jaxpr.eqns if e.primitive.name == "scan")
    (c1, k1), (c2, k2) = _compat.scan_counts(first.params), _compat.scan_counts(second.params)
    names = second.invars[c2 + k2 :]
    residuals = [v for v in names if v in first.outvars[k1:]]
    length, body1, body2 = first.params["length"], first.params["jaxpr"], second.params["jaxpr"]

    def run(*args):
        env = dict(zip(jaxpr.invars, args, strict=True))

        def read(v):
            return v.val if isinstance(v, _compat.Literal) else env.get(v)

        for eqn in jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            if eqn is first:
                consts, xs1, early = ins[:c1], ins[c1 + k1 :], [read(v) for v in names]
                places = []  # of the hoisted values in the backward body

                def forward(carry, xs, consts=consts, places=places):
                    outs = evaluate(body1, [*consts, *carry, *xs[0]])
                    ys = dict(zip(first.outvars, outs, strict=True))
                    if add:
                        return outs[:k1], ([], [ys[v] for v in first.outvars[k1:] if v not in residuals], list(carry))
                    inputs = [ys[v] if v in residuals else x for v, x in zip(names, xs[1], strict=True)]
                    cotangents = [lax.full(v.aval.shape, 0, v.aval.dtype) for v in second.invars[c2 : c2 + k2]]
                    found = frontier(body2, [*map(read, second.invars[:c2]), *cotangents, *inputs], cotangents)
                    places[:] = list(found)
                    return outs[:k1], (list(found.values()), outs[k1:], [])

                last, (hoisted, ys, carries) = lax.scan(forward, ins[c1 : c1 + k1], (xs1, early), length=length)
                kept = [v for v in first.outvars[k1:] if not (add and v in residuals)]
                env.update(zip([*first.outvars[:k1], *kept], [*last, *ys], strict=True))
            elif eqn is second:

                def backward(carry, xs, constants=ins[:c2], consts=consts, places=places):
                    given, carry1, layer_xs, loaded = xs
                    if add:
                        carry1, layer_xs = lax.optimization_barrier((carry1, layer_xs))
                        outs = evaluate(body1, [*consts, *carry1, *layer_xs])
                        ys = dict(zip(first.outvars, outs, strict=True))
                        given = [ys[v] if v in residuals else x for v, x in zip(names, given, strict=True)]
                    at = dict(zip(places, loaded, strict=True))
                    load = lambda index, _, outs: [at.get((index, k), x) for k, x in enumerate(outs)]  # noqa: E731
                    outs = evaluate(body2, [*constants, *carry, *given], load)
                    return outs[:k2], outs[k2:]

                xs = (list(map(read, names)), carries, xs1 if add else [], hoisted)
                out = lax.scan(backward, ins[c2 : c2 + k2], xs, length=length, reverse=second.params["reverse"])
                env.update(zip(eqn.outvars, [*out[0], *out[1]], strict=True))
            else:
                env.update(zip(eqn.outvars, _compat.bind(eqn, ins), strict=True))
        return [read(v) for v in jaxpr.outvars]

    return run
