"""Reading a hardware profile: every figure checked for its name, its unit and its range."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

from spmd_auto.errors import ProfileError
from spmd_auto.mesh.hardware import LINE, RING, SWITCH, Chip, Link, Profile

# figure -> (unit, smallest and largest value that can be meant); a figure in GB or microseconds lies far outside
_FIGURES: dict[str, tuple[str, float, float]] = {
    "memory": ("bytes", 1e6, 1e15),
    "memory_bandwidth": ("bytes/s", 1e6, 1e16),
    "memory_efficiency": ("a share", 1e-3, 1.0),
    "flops_efficiency": ("a share", 1e-3, 1.0),
    "kernel_overhead": ("seconds", 0.0, 0.1),
    "per_host": ("a number of devices", 1, 1e6),
    "torus": ("a number of dimensions", 0, 6),
    "wraps_at": ("a number of devices", 2, 1e6),
    "combine": ("bytes", 0.0, math.inf),
    "hidden": ("a share", 0.0, 0.99),
    "slowdown": ("a share", 0.0, 1.0),
}
_LINK = {"bandwidth": ("bytes/s", 1e5, 1e15), "latency": ("seconds", 0.0, 0.1)}
_RATE = ("FLOP/s", 1e7, 1e19)
_WHOLE = ("per_host", "torus", "wraps_at")
_NEEDED = ("platform", "source", "memory", "memory_bandwidth", "flops", "inside")
_TABLES = ("flops", "inside", "between", "sources")
_KNOWN = (*_NEEDED, *_FIGURES, *_TABLES)
PLATFORMS = ("cpu", "gpu", "tpu")


def read_profile(name: str, data: Mapping[str, Any]) -> Profile:
    """A profile from the figures of its file.

    Args:
      data: `platform` ("cpu", "gpu", "tpu"), `source`, `memory` (bytes), `memory_bandwidth` (bytes/s), `flops` (bytes
        per element -> FLOP/s), `inside` and, for switched links, `between` (`bandwidth` in bytes/s of one device one
        way, `latency` in seconds per hop, `form`); optional: `memory_efficiency` and `flops_efficiency` (shares that
        real programs attain), `kernel_overhead` (seconds), `per_host`, `torus` (dimensions) with `wraps_at` (length
        from which it is closed), `combine` (bytes), `hidden` and `slowdown` (shares), `sources` (figure -> text).

    Raises:
      ProfileError: a figure that is not known, is missing, or can't be meant in its unit.
    """
    for key in data:
        if key not in _KNOWN:
            near = difflib.get_close_matches(str(key), _KNOWN, n=1, cutoff=0.5)
            raise ProfileError(
                f"the hardware profile {name!r} has {key!r}",
                f"a profile has {', '.join(dict.fromkeys(_KNOWN))}",
                [f"did you mean {near[0]!r}?"] if near else [f"leave out {key!r}"],
            )
    for key in _NEEDED:
        if key not in data:
            unit = f" = ...  # {_FIGURES[key][0]}" if key in _FIGURES else ""
            raise ProfileError(f"the hardware profile {name!r} has no {key!r}", "every chip has one", [f"{key}{unit}"])
    if data["platform"] not in PLATFORMS:
        raise ProfileError(
            f"platform = {data['platform']!r} of the hardware profile {name!r}",
            "programs are compiled for one of three platforms",
            [f"platform = {p!r}" for p in PLATFORMS],
        )
    if not isinstance(data["source"], str) or not data["source"].strip():
        raise ProfileError(
            f"source = {data['source']!r} of the hardware profile {name!r}",
            "figures without a source can't be checked",
            ['source = "datasheet ..., or measured on ..."'],
        )
    figures = {key: _figure(name, key, data[key], *_FIGURES[key]) for key in _FIGURES if key in data}
    for key in _WHOLE:
        if key in figures and figures[key] != int(figures[key]):
            raise ProfileError(f"{key} = {figures[key]} of the hardware profile {name!r}", "it is a whole number")
    flops = _table(name, "flops", data)
    if not flops or not all(str(size).isdecimal() and int(size) in (1, 2, 4, 8) for size in flops):
        raise ProfileError(
            f"flops = {dict(flops)!r} of the hardware profile {name!r}",
            "rates are given by bytes per element: 1, 2, 4 or 8",
            ["flops = {2 = 9.89e14, 4 = 4.95e14}"],
        )
    attained = figures.get("flops_efficiency", 1.0)
    rates = sorted((int(s), attained * _figure(name, f"flops.{s}", rate, *_RATE)) for s, rate in flops.items())
    chip = Chip(
        name,
        data["platform"],
        tuple(rates),
        figures["memory"],
        figures["memory_bandwidth"] * figures.get("memory_efficiency", 1.0),
        figures.get("kernel_overhead", 0.0),
        figures.get("combine", math.inf),
        figures.get("hidden", 0.0),
        figures.get("slowdown", 0.0),
    )
    torus, wraps_at = int(figures.get("torus", 0)), int(figures.get("wraps_at", 0))
    if bool(torus) != bool(wraps_at) or (torus and "between" in data):
        raise ProfileError(
            f"the hardware profile {name!r} has torus = {torus} and wraps_at = {wraps_at}",
            "a torus says from which length a ring is closed, and has no links between hosts",
            ["torus = 2, wraps_at = 16", "neither of them, and a [between]: switched links"],
        )
    return Profile(
        chip,
        _link(name, "inside", data, LINE if torus else RING),
        _link(name, "between", data, RING) if "between" in data else None,
        int(figures.get("per_host", 1)),
        torus,
        wraps_at,
        data["source"],
        tuple((str(k), str(v)) for k, v in _table(name, "sources", data).items()) if "sources" in data else (),
    )


def _table(name: str, key: str, data: Mapping[str, Any]) -> Mapping[Any, Any]:
    if not isinstance(data[key], Mapping):
        raise ProfileError(
            f"{key} = {data[key]!r} of the hardware profile {name!r}", "it is a table of figures", [f"[{key}]"]
        )
    return data[key]


def _link(name: str, key: str, data: Mapping[str, Any], form: str) -> Link:
    table = _table(name, key, data)
    for field in (*_LINK, *table):
        if field not in (*_LINK, "form") or (field in _LINK and field not in table):
            raise ProfileError(
                f"[{key}] of the hardware profile {name!r} has the fields {', '.join(map(str, table)) or 'none'}",
                "links have a bandwidth in bytes/s of one device one way, a latency in seconds per hop, and a form",
                [f"[{key}] bandwidth = 4e11, latency = 3e-6, form = 'switch'"],
            )
    given = table.get("form", form)
    if given not in ((LINE,) if form == LINE else (RING, SWITCH)):
        raise ProfileError(
            f"{key}.form = {given!r} of the hardware profile {name!r}",
            "a torus has its form from its shape, other links are a ring or a switch",
            ["form = 'switch'", "form = 'ring'"],
        )
    bandwidth, latency = (_figure(name, f"{key}.{field}", table[field], *_LINK[field]) for field in _LINK)
    return Link(bandwidth, latency, given)


def _figure(name: str, key: str, value: Any, unit: str, least: float, most: float) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and least <= value <= most:
        return float(value)
    if not number:
        why = f"it is a {type(value).__name__}"
    elif value < 0:
        why = "it can't be negative"
    else:
        why = f"in {unit} it lies between {least:g} and {most:g}: another unit may be meant"
    raise ProfileError(f"{key} = {value!r} of the hardware profile {name!r}", why, [f"{key} in {unit}"])
