"""Creating a state so that it is born in pieces."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax

from spmd_auto.errors import LoweringError, TraceError
from spmd_auto.runtime.across import compare_values
from spmd_auto.runtime.group import Group
from spmd_auto.runtime.leaves import place
from spmd_auto.runtime.processes import compile_together
from spmd_auto.trace import Call, take_apart
from spmd_auto.trace.program import abstract


class Creation:
    """A function that makes a step's first argument or arguments, looked at without running it.

    Args:
      step: the user's step.
      create: makes its state; a tuple is several arguments if the step then has as many as it needs.
      others: how many arguments follow the state, or None if not known.

    Raises:
      TraceError: `create` can't be traced.
    """

    call: Call  # the state it makes, taken apart as the step's argument
    abstract: list[jax.ShapeDtypeStruct]

    def __init__(
        self,
        step: Callable[..., Any],
        create: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        others: int | None,
    ):
        self.step, self.args, self.kwargs = step, args, kwargs
        self._create = create
        self.several = False
        try:
            made = self._look()
            if isinstance(made, tuple) and not hasattr(made, "_fields") and made:
                self.several = _fits(step, len(made), others)
                self._look()
        except Exception as error:
            raise TraceError(
                f"{getattr(step, '__name__', 'step')}.init: the state can't be created under tracing: "
                f"{type(error).__name__}",
                "the state is created by a compiled program, so that it is born in pieces (see the cause above)",
                ["functools.partial(create, size=...) for arguments that are no arrays"],
            ) from error

    def _look(self) -> Any:
        made: list[Any] = []

        def flat(*args: Any, **kwargs: Any) -> list[Any]:
            made.append(self._create(*args, **kwargs))
            self.call = self._apart(made[-1])
            return self.call.leaves

        self._flat = flat
        self.abstract = jax.eval_shape(flat, *self.args, **self.kwargs)
        return made[-1]

    def _apart(self, made: Any) -> Call:
        return take_apart(self.step, made if self.several else (made,), {}, tracked=False)

    def states(self, leaves: list[Any]) -> tuple[Any, ...]:
        """The step's first arguments, of flat arrays."""
        return tuple(self.call.put_together(leaves)[0])

    def run(
        self,
        specs: dict[str, Any],
        mesh: jax.sharding.Mesh,
        shapes: dict[str, tuple[int, ...]],
        group: Group | None = None,
    ) -> Any:
        """Runs the creation; each array comes to be as its spec says.

        Args:
          group: the processes that do so together.

        Raises:
          LoweringError: the created state has a leaf that the planned one has not.
        """
        shardings = []
        for path, leaf in zip(self.call.paths(), self.abstract, strict=True):
            if shapes.get(path) != leaf.shape:
                raise LoweringError(
                    f"{getattr(self.step, '__name__', 'step')}.init: the created state has a leaf {path!r} of shape "
                    f"{leaf.shape}",
                    "the planned state has none like it",
                    ["create the state that the step was planned for"],
                )
            shardings.append(jax.sharding.NamedSharding(mesh, specs[path]))
        create = jax.jit(self._flat, out_shardings=shardings)
        states = self.states(
            create(*self.args, **self.kwargs) if group is None else self._run_together(create, mesh, group)
        )
        return states if self.several else states[0]

    def _run_together(self, create: Any, mesh: jax.sharding.Mesh, group: Group) -> list[Any]:
        name = f"{getattr(self.step, '__name__', 'step')}.init"
        flat, tree = jax.tree_util.tree_flatten_with_path((self.args, self.kwargs))
        paths, leaves = [f"create{jax.tree_util.keystr(path[1:])}" for path, _ in flat], [leaf for _, leaf in flat]
        compare_values(group, name, paths, leaves)
        whole = jax.sharding.NamedSharding(mesh, jax.P())
        placed = [place(x, whole, abstract(x), path)[0] for path, x in zip(paths, leaves, strict=True)]
        args, kwargs = jax.tree_util.tree_unflatten(tree, placed)
        lowered = create.lower(*args, **kwargs)
        return compile_together(group, lambda: lowered, lowered.compile, name)(*args, **kwargs)


def _fits(step: Callable[..., Any], made: int, others: int | None) -> bool:
    """Whether a tuple of `made` elements is that many arguments of the step, and not one."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in positional)
    after = others if others is not None else 1
    return 1 + after < required and made + after <= len(positional)
