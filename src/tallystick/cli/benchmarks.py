"""tally bench, where its code is: the package ``tallystick_bench`` of the source tree, which no wheel carries."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import typer

import tallystick

PACKAGE = "tallystick_bench"
WHERE = "run tally from the source tree, or pip install ./bench there"
HELP = f"Measure what recording costs and whether it holds. Not installed here: {WHERE}."
ANY_WORDS = {"allow_extra_args": True, "ignore_unknown_options": True}


def register(app: typer.Typer) -> None:
    """Add ``tally bench`` to ``app``: the benchmarks where they are found, else a command that says what it needs."""
    source = Path(tallystick.__file__).resolve().parents[1]
    beside = str(source.with_name("bench"))
    if source.name == "src" and beside not in sys.path:
        sys.path.append(beside)
    try:
        found = import_module(f"{PACKAGE}.commands")
    except ModuleNotFoundError as problem:
        if problem.name != PACKAGE:
            raise
        app.command("bench", help=HELP, context_settings=ANY_WORDS)(absent)
    else:
        app.add_typer(found.app, name="bench")


def absent() -> int:
    """Say what ``tally bench`` needs.

    Raises:
        ModuleNotFoundError: always.
    """
    raise ModuleNotFoundError(f"No module named {PACKAGE!r}", name=PACKAGE)
