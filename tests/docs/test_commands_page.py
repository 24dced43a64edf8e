"""docs/commands.md is what scripts/make_commands.py makes of the code, and the script refuses prose that does not fit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import typer.main

from tallystick.cli import commands
from tallystick.execution.noise.freedom import Freedom

ROOT = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_commands", ROOT / "scripts" / "make_commands.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKER = load()
ROOM = {"tally record": dict(MAKER.commands_of(typer.main.get_command(commands.load())))["tally record"]}


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "commands.md").read_text(encoding="utf-8") == MAKER.make(), (
        "run python scripts/make_commands.py"
    )


def test_a_section_has_usage_options_defaults_and_exit_codes() -> None:
    page = MAKER.page_of(
        "## tally record\n\n<!-- options\n--seed: of the streams\nexit 9: never\n-->\n\nMore.\n", ROOM
    )

    assert "and record every step" in page  # no prose stands before the options: the code's own help
    assert "    tally record --run DIR JOB | -- python FILE ... [OPTION]...\n" in page
    assert "| `--seed N` | `0` | Of the streams. |\n" in page
    assert "| `--run DIR` | required | Where to write the run: a new or empty directory. |\n" in page
    assert "Exit codes: 9, never; [those of every command](#exit-codes).\n\nMore.\n" in page


@pytest.mark.parametrize(
    ("prose", "reason"),
    [
        ("# Commands\n", "no options for tally record"),
        ("## tally record\n\n<!-- options -->\n\n<!-- options -->\n", "twice for tally record"),
        ("## tally reckon\n\n<!-- options -->\n", "'tally reckon', which is no command"),
        ("## tally record\n\n<!-- options\n--sead: of the streams\n-->\n", "--sead, which the command lacks"),
        ("## tally record\n\n<!-- options\n--seed of the streams\n-->\n", "reads '--seed of the streams'"),
    ],
)
def test_prose_that_does_not_fit_the_commands_is_refused(prose: str, reason: str) -> None:
    with pytest.raises(MAKER.Unwritable, match=reason):
        MAKER.page_of(prose, ROOM)


def test_the_page_names_every_number_of_residual_freedom() -> None:
    (row,) = [line for line in MAKER.make().splitlines() if line.startswith("| `freedom` |")]
    for name in Freedom().fields():
        assert f"`{name}`" in row, name
