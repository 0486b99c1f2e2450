"""The command line: `spmd-auto demo`, `spmd-auto calibrate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from spmd_auto.errors import SpmdAutoError
from spmd_auto.plan.explain import WIDTH


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return int(text)


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="spmd-auto", description="Automatic sharding for JAX.")
    commands = root.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train a small transformer on real text and check it")
    demo.add_argument("--devices", type=_positive, default=8, help="simulated CPU devices (default 8)")
    demo.add_argument("--steps", type=_positive, default=60)
    demo.add_argument("--layers", type=_positive, default=4)
    demo.add_argument("--width", type=_positive, default=128)
    demo.add_argument("--heads", type=_positive, default=4)
    demo.add_argument("--batch", type=_positive, default=32)
    demo.add_argument("--sequence", type=_positive, default=128)
    demo.add_argument("--check", type=_positive, default=4, help="steps compared with one device")
    demo.add_argument("--text", help="a folder of text files (default: the Python standard library's source)")
    demo.add_argument("--save", help="write the plan to this file")
    measure = commands.add_parser("calibrate", help="measure the devices that are there against their hardware profile")
    measure.add_argument("--devices", type=_positive, help="simulated CPU devices (default: what is there)")
    measure.add_argument("--seconds", type=_positive, default=20, help="when to stop (default 20)")
    measure.add_argument("--save", help="write the measured profile to this TOML file")
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; 0 on success, 1 if a check failed, 2 for wrong input."""
    options = vars(parser().parse_args(argv))
    command = options.pop("command")
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    try:
        if command == "calibrate":
            return _calibrate(console, **options)
        from spmd_auto.demo.run import DemoOptions, run_demo

        return run_demo(DemoOptions(**options), console)
    except SpmdAutoError as error:
        console.print(f"[red]error[/]: {escape(str(error))}", highlight=False)
        return 2
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130


def _calibrate(console: Console, devices: int | None, seconds: int, save: str | None) -> int:
    from spmd_auto.mesh.simulate import simulate_devices
    from spmd_auto.tools.calibrate import calibrate

    if devices is not None:
        simulate_devices(devices)
    with console.status("measuring") as status:
        found = calibrate(seconds=seconds, progress=status.update)
    console.print(str(found), highlight=False, markup=False)
    if save is not None:
        found.save(save)
        console.print(f"the profile is in {save}: spmd_auto.register_profile({save!r}, replace=True)", markup=False)
    return 0
