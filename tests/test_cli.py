"""The command line: exit codes, messages, and a small run from start to end."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

import spmd_auto
from spmd_auto.cli import main, parser
from spmd_auto.demo.run import DemoOptions
from spmd_auto.demo.text import batches, load_bytes
from spmd_auto.errors import SpmdAutoError

SMALL = ["demo", "--layers", "1", "--width", "16", "--heads", "2", "--batch", "8", "--sequence", "16"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: command"),
        (["dance"], "invalid choice: 'dance'"),
        (["demo", "--devices", "0"], "0 is not a positive number"),
        (["demo", "--steps", "-3"], "-3 is not a positive number"),
        (["demo", "--width", "wide"], "wide is not a positive number"),
        (["demo", "--no-such"], "unrecognized arguments: --no-such"),
    ],
)
def test_wrong_arguments_exit_with_two(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "512"], "simulate_devices(512) comes too late"),
        (["--text", "no/such/folder"], "no folder no/such/folder"),
        (["--heads", "3"], "--width 16 --heads 3"),
        (["--save", "no/such/folder/plan.json"], "there is no folder no/such/folder"),
    ],
)
def test_wrong_input_exits_with_two_and_says_what(arguments, message, capsys, devices):
    assert main([*SMALL, *arguments]) == 2
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("error: ")
    assert message in out


def test_heads_that_do_not_divide_offer_the_nearest(capsys):
    assert main([*SMALL, "--heads", "3"]) == 2
    out = capsys.readouterr().out
    assert "fix: --heads 2" in out
    assert "fix: --heads 4" in out


def test_errors_are_printed_as_they_are(capsys):
    """Brackets in a message are no markup."""
    assert main([*SMALL, "--text", "a[bold]b[/]c"]) == 2
    assert "no folder a[bold]b[/]c" in capsys.readouterr().out


def test_options_are_those_of_the_demo():
    options = vars(parser().parse_args(["demo"]))
    assert options.pop("command") == "demo"
    assert DemoOptions(**options) == DemoOptions()
    assert set(options) == {field.name for field in dataclasses.fields(DemoOptions)}


@pytest.mark.slow
def test_demo_trains_and_checks_and_saves(tmp_path, capsys):
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    plan = tmp_path / "plan.json"
    code = main([*SMALL, "--steps", "3", "--check", "2", "--text", str(text), "--save", str(plan)])
    out = capsys.readouterr().out
    assert code == 0, out
    for part in ("1. text", "2. plan", "3. compile", "4. train", "5. verdict", "all checks hold", "step 1: loss"):
        assert part in out
    assert json.loads(plan.read_text())["program"] == "train_step"


def test_module_runs_as_a_program():
    done = subprocess.run([sys.executable, "-m", "spmd_auto", "demo", "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--devices" in done.stdout
    done = subprocess.run([sys.executable, "-m", "spmd_auto"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "required: command" in done.stderr


# ---- the demo's text ----------------------------------------------------------------------------------------


def test_text_batches_are_windows_shifted_by_one(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(97, 123)) * 10)
    text = load_bytes(str(tmp_path))
    stream = batches(text, 4, 8)
    first = next(stream)
    assert first["x"].shape == first["y"].shape == (4, 8)
    assert (first["x"][:, 1:] == first["y"][:, :-1]).all()
    assert (next(batches(text, 4, 8))["x"] == first["x"]).all()  # the same each time
    assert (next(stream)["x"] != first["x"]).any()


def test_folder_without_text_and_too_little_text(tmp_path):
    with pytest.raises(SpmdAutoError, match="no text files"):
        load_bytes(str(tmp_path))
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(SpmdAutoError, match="5 bytes of text are too few for a sequence of 128"):
        next(batches(load_bytes(str(tmp_path)), 1, 128))


def test_standard_library_is_text_enough():
    assert len(load_bytes()) > 1_000_000


def test_everything_public_is_there():
    for name in spmd_auto.__all__:
        assert getattr(spmd_auto, name) is not None
    assert spmd_auto.__all__ == sorted(spmd_auto.__all__)
