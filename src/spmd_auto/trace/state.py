"""Which arguments are state: which results replace which arguments, and what each leaf is for."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from typing import Any

from spmd_auto import _compat
from spmd_auto.trace.reach import reaches, updates

# what an argument is called whose last word says so: ema_params, frozen, model_2; not model_inputs, frozen_batch
_PARAMETERS = re.compile(r"(^|_)(params?|parameters|variables|frozen|model)(_state)?_?\d*$")


class Role(enum.Enum):
    """What a leaf of the arguments is for.

    PARAMETER  state that the results beside the state (loss, metrics) depend on, replaced or frozen;
    OPTIMIZER  state that only the new state depends on (moments, running statistics);
    COUNTER    state without dimensions;
    BATCH      an argument that no result replaces;
    KEY        a PRNG key.
    """

    PARAMETER = "parameter"
    OPTIMIZER = "optimizer"
    COUNTER = "counter"
    BATCH = "batch"
    KEY = "key"


def match(
    jaxpr: Any,
    in_paths: list[str],
    in_avals: list[Any],
    out_paths: list[str],
    out_avals: list[Any],
    arguments: list[str],
) -> list[int | None]:
    """Which argument each result looks like: a result subtree with the paths, shapes and dtypes of a whole argument.

    Tried for the result itself, its elements and theirs, in order, each argument at most once.
    A bare array is never taken for state: a function of x often returns something of x's shape, and a
    replaced argument is donated.
    """
    replaces: list[int | None] = [None] * len(out_paths)
    groups: dict[str, list[int]] = {}
    for i, path in enumerate(in_paths):
        groups.setdefault(path.split("/")[0], []).append(i)

    def signature(paths: list[str], avals: list[Any], prefix: str) -> list[tuple[str, Any, Any]]:
        return [(p[len(prefix) :].lstrip("/"), a.shape, a.dtype) for p, a in zip(paths, avals, strict=True)]

    candidates: list[tuple[str, list[int]]] = []
    for depth in (0, 1, 2):
        heads: dict[str, list[int]] = {}
        for o, path in enumerate(out_paths):
            heads.setdefault("/".join(path.split("/")[:depth]), []).append(o)
        candidates += heads.items()
    free = [name for name in arguments if name in groups]
    for prefix, outs in candidates:
        if any(replaces[o] is not None for o in outs):
            continue
        want = signature([out_paths[o] for o in outs], [out_avals[o] for o in outs], prefix)
        alike = []
        for name in free:
            ins = groups[name]
            if in_paths[ins[0]] == name:
                continue
            if signature([in_paths[i] for i in ins], [in_avals[i] for i in ins], name) == want and any(
                in_avals[i].shape for i in ins
            ):
                alike.append(name)
        if not alike:
            continue
        chosen = next((n for n in alike if len(alike) > 1 and _is_update(jaxpr, outs, groups[n])), alike[0])
        for o, i in zip(outs, groups[chosen], strict=True):
            replaces[o] = i
        free.remove(chosen)
    return replaces


def _is_update(jaxpr: Any, outs: list[int], ins: list[int]) -> bool:
    """Whether results are the next values of arguments: most arrays are elementwise updates of their own arguments.

    The gradient of a tree of parameters looks like new parameters, and a teacher like its student; but the
    caller still needs those.  Counters and keys may be made anew.
    """
    inner = _compat.open_jaxpr(jaxpr)
    arrays = [
        (o, i)
        for o, i in zip(outs, ins, strict=True)
        if inner.invars[i].aval.shape and not _compat.is_extended(inner.invars[i].aval.dtype)
    ]
    others = [o for o, i in arrays if i not in updates(jaxpr, o)]
    # placeholders (adafactor's) come out as constants: they decide nothing; some optimizers keep the last gradient too
    updated, anew = len(arrays) - len(others), sum(any(reaches(jaxpr, [o])) for o in others)
    return updated > 0 and updated >= anew


def only_updates(jaxpr: Any, matched: list[int | None], paths: list[str]) -> list[int | None]:
    """`matched` without the arguments whose results are no updates of them."""
    arguments: dict[str, list[int]] = {}
    for o, i in enumerate(matched):
        if i is not None:
            arguments.setdefault(paths[i].split("/")[0], []).append(o)
    kept: set[int] = set()
    for outs in arguments.values():
        if _is_update(jaxpr, outs, [i for o in outs if (i := matched[o]) is not None]):
            kept.update(outs)
    return [i if o in kept else None for o, i in enumerate(matched)]


def roles(
    jaxpr: Any, paths: list[str], avals: list[Any], matched: list[int | None], held: Sequence[bool]
) -> list[Role]:
    """What each argument leaf is for.

    Args:
      matched: for each result the argument that it looks like (a new state, or a gradient).
      held: for each argument leaf whether an object or a module holds it: state, also where nothing replaces it.
    """
    state = {i for i in matched if i is not None}
    aux = [o for o, i in enumerate(matched) if i is None]
    influences = reaches(jaxpr, aux) if state and aux else None
    found = []
    for i, (path, aval) in enumerate(zip(paths, avals, strict=True)):
        if _compat.is_extended(aval.dtype):
            found.append(Role.KEY)
        elif i not in state:
            parts = path.split("/")
            # where no result replaces it only its name tells: frozen parameters, or those of an evaluation
            named = "params" in parts or _PARAMETERS.search(parts[0]) or (not state and parts[0] == "state")
            if held[i]:
                found.append(Role.PARAMETER if aval.shape else Role.COUNTER)
            else:
                found.append(Role.PARAMETER if named else Role.BATCH)
        elif not aval.shape:
            found.append(Role.COUNTER)
        elif influences is not None:
            found.append(Role.PARAMETER if influences[i] else Role.OPTIMIZER)
        else:
            optimizer = re.search(r"(^|/)(opt_state|optimizer|opt|mu|nu|trace)(/|$)", path)
            found.append(Role.OPTIMIZER if optimizer else Role.PARAMETER)
    return found
