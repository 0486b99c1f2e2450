"""A failing program, cut as small as it still fails."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.programs import FuzzProgram, smaller


def shrink(program: FuzzProgram, fails: Callable[[FuzzProgram], bool], most: int = 200) -> FuzzProgram:
    """The first smaller program that fails, over and over; tries at most `most`."""
    tried = {program}
    while True:
        for candidate in smaller(program):
            if candidate in tried:
                continue
            tried.add(candidate)
            if len(tried) > most:
                return program
            if fails(candidate):
                program = candidate
                break
        else:
            return program
