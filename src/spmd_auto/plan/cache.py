"""Plans that earlier runs found, on disk: a restart with the same program does not search.

A plan is kept under the digest of its question (`plan/question.py`), as the JSON of a plan file with a digest of its
own. An entry that can't be read, or does not do here what it says, counts as absent, and is written anew. Deleting the
directory is always safe.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spmd_auto.errors import SpmdAutoError
from spmd_auto.plan.file import plan_from_json, plan_to_json
from spmd_auto.plan.pins import Pins
from spmd_auto.plan.plan import Plan
from spmd_auto.plan.question import Question
from spmd_auto.store import default_directory, write_whole
from spmd_auto.trace import Program

logger = logging.getLogger("spmd_auto")

FORMAT = "spmd_auto kept plan 1"
SWITCH = "SPMD_AUTO_PLAN_CACHE"
# A plan's price in another process may differ by the order in which NumPy adds.
_CLOSE = 1e-9


def is_on() -> bool:
    """Whether `$SPMD_AUTO_PLAN_CACHE` leaves plans to be kept: "0", "off", "no" and "false" turn it off."""
    return os.environ.get(SWITCH, "").strip().lower() not in ("0", "off", "no", "false")


class PlanCache:
    """A directory of plans.

    Args:
      directory: None: `plans` in `$SPMD_AUTO_CACHE` where set, else in `~/.cache/spmd_auto`. Made when first
        written to.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None):
        self._directory = directory

    def path(self, question: Question) -> Path | None:
        """The file for a question; None if its plan can't be kept: no home directory, or no question for later."""
        if not question.lasting:
            return None
        try:
            directory = default_directory() / "plans" if self._directory is None else Path(self._directory)
        except RuntimeError:
            return None
        return directory / f"{question.key}.json"

    def get(
        self,
        question: Question,
        program: Program,
        *,
        pins: Pins,
        memory: float | None = None,
        devices: Sequence[Any] | None = None,
    ) -> Plan | None:
        """The plan kept for a question; None where there is none. Warns of an entry that is damaged."""
        path = self.path(question)
        if path is None:
            return None
        try:
            text = path.read_text()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            return _damaged(path, error)
        try:
            entry = json.loads(text)
            if entry["format"] != FORMAT or entry["digest"] != _digest(entry["plan"]):
                return _damaged(path, "it is not what was written")
            plan = plan_from_json(
                entry["plan"], program, str(path), pins=pins, devices=devices, memory=memory, origin="cache"
            )
            expected = entry["plan"]["price"]["seconds"]
            if abs(plan.seconds - expected) > _CLOSE * abs(expected):
                return _damaged(path, f"it takes {plan.seconds} s here, and {expected} s where it was made")
        except (SpmdAutoError, ValueError, KeyError, TypeError, RecursionError) as error:
            return _damaged(path, error)
        return plan

    def put(self, question: Question, plan: Plan) -> bool:
        """Keeps a plan, if it is one to keep: not what a time limit left.

        Returns:
          Whether it was written; a disk that refuses is no error.
        """
        path = self.path(question)
        if path is None or plan.search.stopped == "time limit":
            return False
        data = plan_to_json(plan)
        return write_whole(path, json.dumps({"format": FORMAT, "digest": _digest(data), "plan": data}))


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _damaged(path: Path, reason: object) -> None:
    why = str(reason).splitlines()[0] if str(reason) else type(reason).__name__
    logger.warning("the plan kept in %s can't be used (%s): planned anew", path, why)
