"""Where each command is. A process loads the one that it was called for; the help, and whoever completes words, loads all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Annotated

import typer

from tallystick import __version__

HELP = "Training runs that somebody else can check, on other hardware, to the last bit."
COMMANDS: Mapping[str, str] = {
    "record": "run.recording",
    "audit": "run.auditing",
    "check": "run.checking",
    "show": "evidence.inspecting",
    "verify": "evidence.inspecting",
    "prove": "evidence.inspecting",
    "diff": "run.comparing",
    "report": "run.reporting",
    "demo": "run.demo",
    "bench": "benchmarks",
    "plan": "fleet.planning",
    "simulate": "fleet.simulating",
    "registry": "fleet.registry",
    "draw": "fleet.inspection",
    "inspect": "fleet.inspection",
    "calibrate": "run.calibrating",
    "noise-pass": "run.calibrating",
    "key": "evidence.keys",
    "conformance": "evidence.conforming",
    "dispute": "run.disputing",
    "chip": "fleet.chips",
    "monitor": "fleet.monitoring",
    "fleet": "fleet.judging",
    "neutral": "fleet.neutral",
    "rules": "fleet.rules",
    "log": "evidence.logs",
    "sign": "evidence.signing",
    "export": "evidence.signing",
    "bundle": "evidence.bundling",
    "policy": "evidence.bundling",
}
"""Each in a module that registers it, or has a function of its name; in the order of the help."""


def load(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """Return tally with the commands that stand beside the ``names`` in their modules."""
    app = typer.Typer(name="tally", help=HELP, add_completion=False, pretty_exceptions_enable=False)
    app.callback(invoke_without_command=True)(start)
    modules = dict[str, list[str]]()
    for name in names:
        modules.setdefault(COMMANDS[name], []).append(name)
    for place, held in modules.items():
        module = import_module(f"tallystick.cli.{place}")
        register = getattr(module, "register", None)
        if register is not None:
            register(app)
        else:
            for name in held:
                app.command()(getattr(module, name))
    return app


def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> int | None:
    """Training runs that somebody else can check, on other hardware, to the last bit."""
    if version:
        print(f"tallystick {__version__}")
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)
    return None
