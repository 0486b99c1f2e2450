"""Hardware profiles by name: those of the package, one data file per chip, and those that users add."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from spmd_auto.errors import MeshError, ProfileError
from spmd_auto.mesh.hardware import Profile
from spmd_auto.mesh.schema import read_profile

_ADDED: dict[str, Profile] = {}


@cache
def _packaged() -> tuple[str, ...]:
    folder = resources.files("spmd_auto.mesh") / "profiles"
    return tuple(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def profile_names() -> list[str]:
    return sorted({*_packaged(), *_ADDED})


@cache
def _read(name: str) -> Profile:
    text = (resources.files("spmd_auto.mesh") / "profiles" / f"{name}.toml").read_text()
    return read_profile(name, tomllib.loads(text))


def load_profile(name: str) -> Profile:
    """A profile by name.

    Raises:
      MeshError: no such profile; the nearest names are offered.
    """
    if name in _ADDED:
        return _ADDED[name]
    names = profile_names()
    if name not in names:
        near = difflib.get_close_matches(str(name), names, n=2, cutoff=0.3) or names
        raise MeshError(
            f"no hardware profile {name!r}",
            f"profiles are: {', '.join(names)}",
            [f"did you mean {candidate!r}?" for candidate in near],
        )
    return _read(name)


def register_profile(
    profile: str | os.PathLike[str] | Mapping[str, Any], name: str | None = None, *, replace: bool = False
) -> str:
    """Adds a hardware profile, which `cluster(name, ...)` then finds; it is kept until the process ends.

    A profile that takes the place of "cpu", or another chip's, is used for the devices at hand too.

    Args:
      profile: a TOML file, or its figures as a mapping; see `spmd_auto.mesh.schema.read_profile` for figures and units
        (bytes, bytes/s, FLOP/s, seconds), and the files under `spmd_auto/mesh/profiles` for examples.
      name: what it is called (default: the file's name).
      replace: take the place of a profile that is there.

    Returns:
      The name.

    Raises:
      ProfileError: the file can't be read, a figure is wrong, or the name is taken.
    """
    if isinstance(profile, Mapping):
        data = profile
    elif not isinstance(profile, (str, os.PathLike)):
        raise ProfileError(
            f"{profile!r} as a hardware profile",
            f"it is a {type(profile).__name__}, neither a file nor its figures",
            ['register_profile("my_chip.toml")', 'register_profile({"platform": "gpu", ...}, "my_chip")'],
        )
    else:
        path = Path(profile)
        try:
            data = tomllib.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ProfileError(
                f"{path} can't be read as a hardware profile",
                f"{type(error).__name__}: {error}",
                ["a TOML file like those under spmd_auto/mesh/profiles"],
            ) from error
        name = name or path.stem
    if not name or not str(name).isidentifier():
        raise ProfileError(f"a hardware profile named {name!r}", "a name is letters and digits", ['name="my_chip"'])
    if name in profile_names() and not replace:
        raise ProfileError(
            f"there is a hardware profile {name!r} already",
            "two profiles of one name could not be told apart",
            [f'name="my_{name}"', "replace=True"],
        )
    _ADDED[name] = read_profile(name, data)
    return name
