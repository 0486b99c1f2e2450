"""The user's jaxpr, evaluated again with the plan's constraints put in.

Name stacks, source lines and contexts of every equation are kept, so profiles and `jax.named_scope` stay
readable.  Loops are traced anew through `lax.scan` / `while_loop` / `switch`; a differentiated `remat`
becomes the barrier and inlined body that JAX itself lowers it to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding

from spmd_auto import _compat
from spmd_auto.errors import LoweringError
from spmd_auto.lower.foreign import FOREIGN
from spmd_auto.lower.manual import Pending, deferred_sum, manual_op, settled
from spmd_auto.lower.moves import moved_op
from spmd_auto.lower.placement import Placements
from spmd_auto.lower.starts import bind_safely
from spmd_auto.mesh.logical import Spec
from spmd_auto.propagate.graph import CALLS, Site, behind_barrier


class Replay:
    """Evaluates a jaxpr under placements on a jax mesh. One instance per trace."""

    def __init__(self, placements: Placements, mesh: jax.sharding.Mesh):
        self.placements, self.mesh = placements, mesh
        self.logical = placements.mesh
        self.constraints = 0
        self.manual = 0
        # one constrained value per (value, spec) and loop body: a second constraint would gather again
        self._scopes: list[dict[tuple[int, Spec], tuple[Any, Any]]] = [{}]
        self._again: list[dict[int, tuple[Any, Any]]] = [{}]
        self._latest: list[Any] = [None]  # the last array computed in each loop body

    def sharding(self, spec: Spec) -> NamedSharding:
        return NamedSharding(self.mesh, self.logical.partition_spec(spec))

    def constrain(self, x: Any, spec: Spec) -> Any:
        if self.mesh.size == 1:
            return x
        scope = self._scopes[-1]
        found = scope.get((id(x), spec))
        if found is not None:
            return found[1]
        out = lax.with_sharding_constraint(x, self.sharding(spec))
        self.constraints += 1
        scope[id(x), spec] = (x, out)  # keeps x alive, so its id stays its own
        scope[id(out), spec] = (out, out)
        return out

    def _enter(self) -> None:
        self._scopes.append({})
        self._again.append({})
        self._latest.append(None)

    def _leave(self) -> None:
        self._scopes.pop()
        self._again.pop()
        self._latest.pop()

    def run(self, jaxpr: Any, args: Sequence[Any], site: Site = ()) -> list[Any]:
        inner = _compat.open_jaxpr(jaxpr)
        env: dict[Any, Any] = dict(zip(inner.constvars, _compat.consts_of(jaxpr), strict=True))
        env.update(zip(inner.invars, args, strict=True))

        def read(var: Any) -> Any:
            return var.val if isinstance(var, _compat.Literal) else env[var]

        last_use = {v: i for i, e in enumerate(inner.eqns) for v in e.invars if not isinstance(v, _compat.Literal)}
        keep = {v for v in inner.outvars if not isinstance(v, _compat.Literal)}
        for index, eqn in enumerate(inner.eqns):
            with _compat.eqn_context(eqn):
                outs = self.apply(eqn, [read(v) for v in eqn.invars], (*site, index))
            env.update(zip(eqn.outvars, outs, strict=True))
            self._latest[-1] = next((x for x in outs if isinstance(x, jax.Array)), self._latest[-1])
            for v in eqn.invars:
                if not isinstance(v, _compat.Literal) and last_use[v] == index and v not in keep:
                    env.pop(v, None)
        return [read(v) for v in inner.outvars]

    def results(self, values: list[Any]) -> list[Any]:
        """Results on the way to where the plan has them."""
        out = list(values)
        for k, path in enumerate(self.placements.last):
            for spec in path:
                out[k] = self.constrain(out[k], spec)
        return out

    def apply(self, eqn: Any, operands: list[Any], site: Site) -> list[Any]:
        name = eqn.primitive.name
        if name in ("remat2", "checkpoint"):
            return self.remat(eqn, operands, site)
        if name == "xla_metadata_call":
            with _compat.metadata_context(eqn):
                return self.run(_compat.call_jaxpr(eqn), operands, site)
        if name in CALLS:
            operands = self.user_shardings(eqn, "in_shardings", operands)
            return self.user_shardings(eqn, "out_shardings", self.run(_compat.call_jaxpr(eqn), operands, site))
        expanded = _compat.expand(eqn)
        if expanded is not None:
            return self.run(expanded, operands, site)
        if name == "custom_linear_solve":
            jaxpr, positions = _compat.linear_solve(eqn)
            return self.run(jaxpr, [operands[k] for k in positions], site)
        if site not in self.placements.sums and site not in self.placements.pending:
            operands = [settled(x) for x in operands]
        if name in FOREIGN:
            return FOREIGN[name](eqn, operands, self.mesh)
        if any(_compat.is_ref(v.aval) for v in eqn.invars):  # loops over mutable arrays are not looked into
            return _compat.bind(eqn, operands)
        if name == "scan":
            return self.scan(eqn, operands, site)
        if name == "while":
            return self.while_loop(eqn, operands, site)
        if name == "cond":
            return self.cond(eqn, operands, site)
        if name == "sharding_constraint" and site not in self.placements.by_site:
            return [self.user_constraint(eqn, operands[0])]
        placement = self.placements.by_site.get(site)
        deferred = self.placements.sums.get(site)
        if deferred is not None:
            self.manual += 1
            out = deferred_sum(eqn, operands, deferred, self.logical, self.mesh)
            return [self.constrain(out, deferred.stored)]
        if placement is None:
            return [Pending(eqn, site, operands)] if site in self.placements.pending else bind_safely(eqn, operands)
        if placement.again:
            operands = self.read_again(operands, placement.again)
        for k, specs in enumerate(placement.operands):
            for spec in specs:
                operands[k] = self.constrain(operands[k], spec)
        if site in self.placements.pending:
            return [Pending(eqn, site, operands)]
        if placement.manual is not None:
            self.manual += 1
            outs = [manual_op(eqn, operands, placement, self.logical, self.mesh)]
        elif placement.moves is not None:
            self.manual += 1
            outs = moved_op(eqn, operands, placement, self.logical, self.mesh)
        else:
            outs = bind_safely(eqn, operands)
        for k, specs in enumerate(placement.results):
            for spec in specs:
                outs[k] = self.constrain(outs[k], spec)
        return outs

    def read_again(self, operands: list[Any], again: tuple[int, ...]) -> list[Any]:
        """Operands `again` anew, not before the others are there; once per value and loop body.

        An operation without others (a reversed kernel) waits for what was computed before it.
        """
        scope = self._again[-1]
        fresh = [k for k in again if id(operands[k]) not in scope]
        if fresh:
            others = [x for k, x in enumerate(operands) if k not in again]
            if not others and self._latest[-1] is not None:
                others = [self._latest[-1]]
            barred = lax.optimization_barrier([*(operands[k] for k in fresh), *others])
            for k, x in zip(fresh, barred, strict=False):
                scope[id(operands[k])] = (operands[k], x)
        return [scope[id(x)][1] if k in again else x for k, x in enumerate(operands)]

    # ---- control flow -------------------------------------------------------------------------

    def remat(self, eqn: Any, operands: list[Any], site: Site) -> list[Any]:
        if behind_barrier(eqn, len(self._scopes) > 1):
            barred = [i for i, x in enumerate(operands) if isinstance(x, jax.Array)]
            if barred:
                for i, x in zip(barred, lax.optimization_barrier([operands[i] for i in barred]), strict=True):
                    operands[i] = x
        with jax.named_scope("checkpoint"):  # as JAX's own lowering names it
            return self.run(_compat.call_jaxpr(eqn), operands, site)

    def scan(self, eqn: Any, operands: list[Any], site: Site) -> list[Any]:
        params = eqn.params
        consts, carries = _compat.scan_counts(params)
        specs = self.placements.loops[site]
        constants = operands[:consts]

        def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            self._enter()
            carry = self._all_carried(carry, specs.start)
            outs = self.run(params["jaxpr"], [*constants, *carry, *xs], site)
            out_carry = self._all_carried(outs[:carries], specs.end)
            # as they are stacked: XLA would move each piece to where the stack lies
            pieces = [None if spec is None else spec[1:] for spec in specs.results[carries:]]
            ys = self._all_carried(outs[carries:], pieces)
            self._leave()
            return out_carry, ys

        final, ys = lax.scan(
            body,
            self._all_carried(operands[consts : consts + carries], specs.start),
            operands[consts + carries :],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        # first as the loop leaves them: XLA lets a loop carry what its result is, and would gather that in every trip
        return self._all_carried([*self._all_carried(final, specs.end), *ys], specs.results)

    def _all_carried(self, xs: Sequence[Any], specs: Sequence[Spec | None]) -> list[Any]:
        return [self._carried(x, spec) for x, spec in zip(xs, specs, strict=True)]

    def _carried(self, x: Any, spec: Spec | None) -> Any:
        return x if spec is None else self.constrain(x, spec)

    def while_loop(self, eqn: Any, operands: list[Any], site: Site) -> list[Any]:
        params = eqn.params
        c, b = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, body_consts, start = operands[:c], operands[c : c + b], operands[c + b :]
        specs = self.placements.loops[site]

        def cond(carry: list[Any]) -> Any:
            self._enter()
            out = self.run(params["cond_jaxpr"], [*cond_consts, *carry], (*site, 0))[0]
            self._leave()
            return out

        def body(carry: list[Any]) -> list[Any]:
            self._enter()
            carry = self._all_carried(carry, specs.start)
            outs = self.run(params["body_jaxpr"], [*body_consts, *carry], (*site, 1))
            outs = self._all_carried(outs, specs.end)
            self._leave()
            return outs

        final = lax.while_loop(cond, body, self._all_carried(start, specs.start))
        return self._all_carried(self._all_carried(final, specs.end), specs.results)

    def cond(self, eqn: Any, operands: list[Any], site: Site) -> list[Any]:
        if eqn.params.get("branches_platforms"):  # other platforms' branches must not be lowered at all
            return _compat.bind(eqn, operands)
        index, rest = operands[0], operands[1:]
        results = self.placements.branches[site]

        def branch(k: int) -> Any:
            def run(*args: Any) -> list[Any]:
                self._enter()
                outs = self.run(eqn.params["branches"][k], args, (*site, k))
                outs = self._all_carried(outs, results)
                self._leave()
                return outs

            return run

        outs = lax.switch(index, [branch(k) for k in range(len(eqn.params["branches"]))], *rest)
        return self._all_carried(outs, results)

    def user_shardings(self, eqn: Any, side: str, values: list[Any]) -> list[Any]:
        """Values under the shardings that a jit inside the step was given."""
        out = list(values)
        for k, sharding in _compat.own_shardings(eqn, side):
            sharding = self.of_user(sharding, _compat.source_line(eqn))
            out[k] = lax.with_sharding_constraint(settled(out[k]), sharding)
        return out

    def user_constraint(self, eqn: Any, operand: Any) -> Any:
        """A `with_sharding_constraint` of the user: kept, on the plan's mesh if it has the same axes."""
        sharding = eqn.params["sharding"]
        if isinstance(sharding, NamedSharding):
            return lax.with_sharding_constraint(operand, self.of_user(sharding, _compat.source_line(eqn)))
        return _compat.bind(eqn, [operand])[0]

    def of_user(self, sharding: NamedSharding, source: str) -> NamedSharding:
        """A sharding that the user wrote, on the plan's mesh.

        Raises:
          LoweringError: it uses a mesh axis that the plan's mesh does not have, or has in another size.
        """
        free = jax.sharding.PartitionSpec.UNCONSTRAINED
        entries = [entry for entry in sharding.spec if entry is not None and entry is not free]
        used = sorted({a for entry in entries for a in ((entry,) if isinstance(entry, str) else entry)})
        theirs, ours = dict(sharding.mesh.shape), dict(self.mesh.shape)
        if any(theirs[a] != ours.get(a) for a in used):
            raise LoweringError(
                f"a sharding of the step ({sharding.spec} at {source}) uses the mesh axes {used}",
                f"the plan's mesh is {ours}, the one of the sharding {theirs}",
                ["give that mesh to auto_shard: @auto_shard(mesh=mesh)", "remove the constraint"],
            )
        return NamedSharding(self.mesh, sharding.spec, memory_kind=sharding.memory_kind)
