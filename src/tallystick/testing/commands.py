"""Commands as processes of their own that need not load torch again: a server that has loaded it is forked."""

from __future__ import annotations

import multiprocessing
import sys
from contextlib import redirect_stdout
from multiprocessing.process import BaseProcess
from pathlib import Path


def start_command(arguments: list[str], out: Path) -> BaseProcess:
    """Return the started process that runs ``tally`` with these arguments and writes what it prints to ``out``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tallystick.roles.judge"])
    process = context.Process(target=_run, args=(arguments, out), daemon=True)
    process.start()
    return process


def _run(arguments: list[str], out: Path) -> None:
    from tallystick.cli.main import main

    with out.open("w") as file, redirect_stdout(file):
        code = main(arguments)
    sys.exit(code)
