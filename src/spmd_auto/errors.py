"""Every error a user can meet: one family, one form (what, why, the nearest fixes)."""

from __future__ import annotations


class SpmdAutoError(Exception):
    """Base of all errors raised on purpose by this package.

    Args:
      what: what went wrong, with the user's path, operation, shape and source line where known.
      why: the reason.
      fixes: the nearest things that would work, one per entry.
    """

    def __init__(self, what: str, why: str = "", fixes: tuple[str, ...] | list[str] = ()):
        self.what, self.why, self.fixes = what, why, tuple(fixes)
        lines = [what]
        if why:
            lines.append(f"  why: {why}")
        lines += [f"  fix: {fix}" for fix in self.fixes]
        super().__init__("\n".join(lines))


class RuleError(SpmdAutoError):
    """A factor rule does not fit its operation."""


class TraceError(SpmdAutoError):
    """The step cannot be traced to a jaxpr."""


class MeshError(SpmdAutoError):
    """A mesh or cluster that cannot be: unknown axes, wrong device count, unlike devices."""


class ProfileError(SpmdAutoError):
    """A hardware profile that cannot be read, or whose figures cannot be meant."""


class PinError(SpmdAutoError):
    """A pinned sharding that cannot hold: no such leaf, unknown axis, indivisible dimension."""


class StrategyError(SpmdAutoError):
    """A strategy given by hand names a logical axis or mesh axis that the program does not have."""


class MemoryBudgetError(SpmdAutoError):
    """No plan fits the memory of a device."""


class PlanFileError(SpmdAutoError):
    """A plan file that cannot be read, or belongs to another program."""


class LoweringError(SpmdAutoError):
    """A plan that cannot be applied to the program or the devices at hand."""


class VerifyError(SpmdAutoError):
    """A compiled program that cannot be read, or a platform that cannot be compiled for here."""


class BatchError(SpmdAutoError):
    """A batch that the mesh cannot split."""


class ProcessError(SpmdAutoError):
    """Processes of one program that do not do the same, or one that failed while the others wait for it."""
