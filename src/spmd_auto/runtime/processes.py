"""Planning and compiling under several processes: one plans, all run the same program, or all get an error.

Each process runs the user's script. Were their programs not the same, their collectives would wait for each other for
ever; so they are compared before anything is compiled.
"""

from __future__ import annotations

import collections
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from spmd_auto import errors
from spmd_auto.errors import ProcessError, SpmdAutoError
from spmd_auto.plan.file import plan_to_json
from spmd_auto.plan.plan import Plan
from spmd_auto.plan.question import Question, digest
from spmd_auto.runtime.group import Group, named
from spmd_auto.trace import Program

# Parts of a question that a message between processes has room for, and the bytes of each.
_PARTS, _BYTES = 32, 16


@contextlib.contextmanager
def failing_together(group: Group | None, doing: str) -> Iterator[None]:
    """A process that fails in this block tells those that come out of it and are about to compare or plan."""
    try:
        yield
    except Exception as error:
        if group is not None:
            group.agree(error, doing, working=False)
        raise


def compare(group: Group, question: Question, program: Program, devices: Sequence[Any] | None = None) -> None:
    """Whether all processes ask the same.

    Args:
      devices: of the jax Mesh that the user gave, in its order.

    Raises:
      ProcessError: on all of them, if they do not; names those that differ, and the first thing that does.
    """
    group.agree(None, f"to prepare the plan of {program.name}", working=False)
    mine = np.zeros((_PARTS, _BYTES), np.uint8)
    parts = {**question.parts, "the order of the devices": tuple(str(device.id) for device in devices or ())}
    names = list(parts)
    for i, name in enumerate(names):
        mine[i] = np.frombuffer(bytes.fromhex(digest(parts[name]))[:_BYTES], np.uint8)
    rows = group.gather(mine)
    unlike = [names[i] for i in range(len(names)) if (rows[:, i] != rows[:1, i]).any()]
    if not unlike:
        return
    texts = group.first_difference(parts[unlike[0]])
    if unlike[0] == "the operations":  # the part itself is a digest
        texts = group.first_difference(re.sub(r"0x[0-9a-f]+", "0x", str(program.jaxpr)).splitlines()) or texts
    raise _unlike(group, [row.tobytes() for row in rows], program.name, ", ".join(unlike), texts)


def plan_together(group: Group, name: str, plan: Callable[[], Plan], apply: Callable[[dict[str, Any]], Plan]) -> Plan:
    """The plan that the first process finds, on all of them.

    Args:
      plan: finds it; called on the first process only.
      apply: makes it of its JSON; called on the others.

    Raises:
      SpmdAutoError: what `plan` raised, on all processes (`ProcessError` if it was no error of this package).
      ProcessError: a process could not apply the plan.
    """
    found, failure = None, None
    try:
        if group.position == 0:
            found = plan()
    except BaseException as error:  # the others wait, whatever it is
        group.send(json.dumps({"error": _error_to_json(error)}).encode())
        raise
    sent = json.loads(group.send(None if found is None else json.dumps({"plan": plan_to_json(found)}).encode()))
    if "error" in sent:
        raise _error_from_json(sent["error"], group.members[0], name)
    try:
        found = found or apply(sent["plan"])
    except Exception as error:
        failure = error
    group.agree(failure, f"to apply the plan of {name}")
    assert found is not None
    return found


def compile_together(group: Group, lower: Callable[[], Any], compile: Callable[[], Any], name: str) -> Any:
    """A compiled program, after its lowered text was compared.

    Raises:
      ProcessError: on all processes, if it is not the same on all of them, or one of them fails.
    """
    lines, compiled, failure = [], None, None
    try:
        lines = _comparable(lower().as_text())
    except Exception as error:
        failure = error
    group.agree(failure, f"to lower {name}")
    rows = group.gather(np.frombuffer(bytes.fromhex(digest(lines)), np.uint8))
    if (rows != rows[:1]).any():
        texts = group.first_difference(lines)
        raise _unlike(group, [row.tobytes() for row in rows], name, "the lowered program", texts)
    try:
        compiled = compile()
    except Exception as error:
        failure = error
    group.agree(failure, f"to compile {name}")
    return compiled


def _comparable(text: str) -> list[str]:
    """Lines of a lowered program; addresses of the host's functions in it are no difference."""
    return [re.sub(r"0x[0-9a-f]+|\d{6,}", "#", s) if "callback" in s else s for s in text.splitlines()]


def _unlike(group: Group, digests: list[bytes], name: str, what: str, texts: list[str] | None) -> ProcessError:
    most = collections.Counter(digests).most_common(1)[0][0]  # of equally many: that of the first process
    others = [member for member, mine in zip(group.members, digests, strict=True) if mine != most]
    alike = [member for member, mine in zip(group.members, digests, strict=True) if mine == most]
    why = "no single line of it differs"
    if texts is not None:
        k, i = group.members.index(alike[0]), group.members.index(others[0])
        if texts[i] == texts[k]:  # they differ further down: show one that does differ here
            i = next((j for j, text in enumerate(texts) if text != texts[k]), i)
        why = (
            f"the first difference: process {group.members[k]} has {texts[k]}\n"
            f"       process {group.members[i]} has {texts[i]}"
        )
    return ProcessError(
        f"{name} is another program on {named(others)} than on {named(alike)}; not the same: {what}",
        why,
        [
            "run the same script with the same arguments on every process",
            "give all processes batches of the same size and type",
            "make what the step closes over (seeds, sizes, flags) the same on every process",
        ],
    )


def _error_to_json(error: BaseException) -> dict[str, Any]:
    if isinstance(error, SpmdAutoError):
        return {"type": type(error).__name__, "what": error.what, "why": error.why, "fixes": list(error.fixes)}
    return {"type": type(error).__name__, "what": str(error)}


def _error_from_json(data: dict[str, Any], first: int, name: str) -> SpmdAutoError:
    cls = getattr(errors, data["type"], None)
    if "fixes" in data and isinstance(cls, type) and issubclass(cls, SpmdAutoError):
        error = cls(data["what"], data["why"], data["fixes"])
        error.add_note(f"raised by process {first}, which plans for all")
        return error
    return ProcessError(
        f"process {first}, which plans for all, failed to plan {name}: {data['type']}: {data['what']}",
        "",
        [f"see the error of process {first}"],
    )
