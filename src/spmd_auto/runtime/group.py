"""Processes that run one program together, and what they tell each other before they do.

Only public JAX: a mesh of one device of each process, arrays over it, and `jit`. All processes of a group have to make
the same calls in the same order; a call that not all of them make ends with an error after a while, not never.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from spmd_auto import _compat
from spmd_auto.errors import ProcessError

# Seconds that processes wait for each other, where all of them should arrive at about the same time.
WAIT = 600.0
# Seconds that they wait for one that works for all: as long as it lives. (JAX itself ends all if it dies.)
_WORK = 7 * 86400.0
# Bytes of a message.
_TEXT = 1024


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Several processes.

    Attributes:
      members: their indices, ascending; the first one works for all.
      mesh: one device of each.
    """

    members: tuple[int, ...]
    mesh: jax.sharding.Mesh

    @property
    def position(self) -> int:
        return self.members.index(jax.process_index())

    def gather(self, mine: np.ndarray, working: bool = False) -> np.ndarray:
        """Bytes of all members, one row each. `mine` has the same shape on all of them.

        Args:
          working: members may come late, as some have more to do than others: they are waited for as long as they live.

        Raises:
          ProcessError: another member did not come.
        """
        self._wait(_WORK if working else _seconds())
        return self._together(mine, _rows)

    def text(self, mine: str, working: bool = False) -> list[str]:
        """A message of each member, cut after 1 kB."""
        data = mine.encode()[:_TEXT]
        rows = self.gather(np.frombuffer(data.ljust(_TEXT, b"\0"), np.uint8), working)
        return [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in rows]

    def send(self, data: bytes | None) -> bytes:
        """What the first member has, on all members; the others give None, and wait for it as long as it takes."""
        own = data if data is not None else b""
        sizes = self.gather(np.frombuffer(len(own).to_bytes(8, "big"), np.uint8), working=True)
        size = int.from_bytes(sizes[0].tobytes(), "big")
        # A gather, and not the largest of all: with jax 0.12 that reduction of bytes never ends on CPUs.
        return self._together(np.frombuffer(own.ljust(size, b"\0"), np.uint8), _rows)[0].tobytes()

    def agree(self, failure: BaseException | None, doing: str, working: bool = True) -> None:
        """Goes on only if no member has failed.

        Args:
          doing: what the members have tried, "to ...".
          working: see `gather`.

        Raises:
          ProcessError: on members that have not, if another one has; those that have raise their own failure.
        """
        said = self.text("" if failure is None else f"{type(failure).__name__}: {_first_line(failure)}", working)
        if failure is not None:
            raise failure
        failed = {member: text for member, text in zip(self.members, said, strict=True) if text}
        if failed:
            first = next(iter(failed))
            raise ProcessError(
                f"{named(list(failed))} failed {doing}: {failed[first]}",
                f"process {jax.process_index()} did not fail, and can't go on alone",
                [f"see the error of process {first}"],
            )

    def first_difference(self, lines: Sequence[str]) -> list[str] | None:
        """Each member's text of the first line that is not the same on all of them; None if all are."""
        counts = self.gather(np.frombuffer(len(lines).to_bytes(8, "big"), np.uint8))
        longest = max(int.from_bytes(row.tobytes(), "big") for row in counts)
        short = b"".join(hashlib.sha256(line.encode()).digest()[:8] for line in lines)
        rows = self.gather(np.frombuffer(short.ljust(8 * longest, b"\0"), np.uint8).reshape(longest, 8))
        unlike = np.flatnonzero((rows != rows[:1]).any(axis=(0, 2)))
        if not len(unlike):
            return None
        at = int(unlike[0])
        return self.text(lines[at].strip() if at < len(lines) else "nothing")

    def _wait(self, seconds: float) -> None:
        name = f"spmd_auto of {hashlib.sha256(str(self.members).encode()).hexdigest()[:16]}"
        if not _compat.wait_for_processes(name, seconds, self.members):
            raise ProcessError(
                f"process {jax.process_index()} waited {seconds:.0f} s for the others, and not all of them came",
                "a step is planned and compiled by all processes together: all of them have to call it, with arrays of "
                "the same shapes, in the same order",
                [
                    "call the step, its .plan, .explain and .compile on every process",
                    "give all processes batches of the same size, the last one too",
                    f"SPMD_AUTO_PROCESS_WAIT={2 * seconds:.0f} (seconds) if they are only late",
                ],
            )

    def _together(self, mine: np.ndarray, what: Any) -> np.ndarray:
        own = mine[None]
        with jax.ensure_compile_time_eval():  # the caller may be inside of jit
            split = jax.sharding.NamedSharding(self.mesh, jax.P("process"))
            array = jax.make_array_from_callback((len(self.members), *mine.shape), split, lambda _: own)
            return np.asarray(jax.jit(what, out_shardings=jax.sharding.NamedSharding(self.mesh, jax.P()))(array))


def group_of(mesh: Any) -> Group | None:
    """The processes that run a step on a mesh (a jax Mesh; anything else: all devices); None if it is this one only.

    Raises:
      ProcessError: this process has no device in the mesh.
    """
    if not jax.distributed.is_initialized():  # nothing here makes JAX look for devices before it has to
        return None
    devices = mesh.devices.flat if isinstance(mesh, jax.sharding.Mesh) else jax.devices()
    return _group(tuple(devices))


@functools.lru_cache(maxsize=16)
def _group(devices: tuple[Any, ...]) -> Group | None:
    first: dict[int, Any] = {}
    for device in devices:
        known = first.setdefault(device.process_index, device)
        if device.id < known.id:
            first[device.process_index] = device
    members = tuple(sorted(first))
    here = jax.process_index()
    if here not in first:
        raise ProcessError(
            f"process {here} has no device in the mesh",
            f"its devices belong to {named(list(members))}",
            ["call the step only there", "a mesh over jax.devices(), which are those of all processes"],
        )
    if len(members) == 1:
        return None
    grid = np.array([first[member] for member in members], dtype=object)
    return Group(members, jax.sharding.Mesh(grid, ("process",), axis_types=_compat.axis_types_auto(1)))


def named(processes: Sequence[int]) -> str:
    return f"process {processes[0]}" if len(processes) == 1 else f"processes {', '.join(map(str, processes))}"


def _seconds() -> float:
    try:
        return float(os.environ["SPMD_AUTO_PROCESS_WAIT"])
    except (KeyError, ValueError):
        return WAIT


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")


def _rows(x: Any) -> Any:
    return x
