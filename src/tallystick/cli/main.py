"""The command tally: one command a module, and what becomes of their errors.

Exit codes: 0 match or done, 1 mismatch or violation, 2 bad usage or malformed input, 3 cannot reproduce,
70 a defect (of the program, or of the job's code), 130 interrupted. A defect must not pass for a verdict,
and Python's own exit code for it is 1.
Starting loads no torch, and no command but the one called; a command that trains loads torch then.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import typer
import typer.main

from tallystick.cli import benchmarks, commands
from tallystick.cli.profiles import interrupt_once
from tallystick.cli.terminal import print_json, say
from tallystick.errors import JobFailed, Mismatch, Nondeterminism, OtherProgram, TallyError

# The root of click's usage errors, which typer carries under a name that changes between its versions.
UNUSABLE: type[Exception] = typer.BadParameter.__mro__[2]
NEEDS = {  # what brings a module that is not always there
    "torch": "pip install 'tallystick[torch]'",
    "sklearn": "pip install 'tallystick[jobs]'",
    "transformers": "pip install 'tallystick[transformers]'",
    benchmarks.PACKAGE: benchmarks.WHERE,
}

BUILDS_JOBS = ("audit", "bench", "calibrate", "chip", "demo", "diff", "dispute", "monitor", "record")
"""Commands in whose process a job may run. There sets of strings have one order, everybody's."""


COMPLETION = "_TALLY_COMPLETE"  # a shell asks what a command could go on with


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Without ``arguments`` the process is the command's own, and begins anew if its hash seed has to be fixed.
    """
    if (
        arguments is None
        and sys.argv[1:2]
        and sys.argv[1] in BUILDS_JOBS
        and "PYTHONHASHSEED" not in os.environ
    ):
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    # Before torch loads: idle threads that spin would starve all other processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    given, completes = list(sys.argv[1:] if arguments is None else arguments), COMPLETION in os.environ
    called = given[0] if given and not completes else ""
    interrupt_once()
    try:
        code = _command(called).main(given, prog_name="tally", standalone_mode=False, obj=given)
        sys.stdout.flush()
    except UNUSABLE as problem:
        return _refuse(given, *_usage(problem), code=2)
    except TallyError as problem:
        return _refuse(given, str(problem), type(problem).__name__, code=_code_of(problem))
    except ModuleNotFoundError as problem:
        needs = NEEDS.get((problem.name or "").partition(".")[0])
        if needs is None:
            traceback.print_exc()
            return _refuse(given, str(problem), "Defect", code=70)
        text = f"{problem.name} is not installed and this command needs it: {needs}"
        return _refuse(given, text, "MissingExtra", code=2)
    except (KeyboardInterrupt, typer.Abort):
        say("interrupted")
        return 130
    except BrokenPipeError:
        return _unread()
    except SystemExit as ended:
        if isinstance(
            ended.__context__, BrokenPipeError
        ):  # which click turns into exit code 1, that of a verdict
            return _unread()
        if completes:
            raise
        text = f"a job or program ended the process, with exit code {ended.code}; nothing is said of it"
        return _refuse(given, text, "JobFailed", code=_code_of(JobFailed(text)))
    except BaseException as problem:  # noqa: BLE001 (reported with its traceback; see the exit codes)
        traceback.print_exc()
        return _refuse(given, f"{type(problem).__name__}: {problem}", "Defect", code=70)
    return code if isinstance(code, int) else 0


def _unread() -> int:
    """Return the exit code of a process that SIGPIPE ended: nobody reads what is printed, and no verdict was given."""
    # Otherwise the interpreter complains once more when it ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
    return 141


@functools.cache
def _command(called: str) -> Any:
    """Return the command that is called, or all, as click has them; typer takes an eighth of a second to make all."""
    return typer.main.get_command(
        commands.load([called] if called in commands.COMMANDS else commands.COMMANDS)
    )


def _code_of(problem: TallyError) -> int:
    if isinstance(problem, Mismatch):
        return 1
    return 3 if isinstance(problem, (Nondeterminism, OtherProgram)) else 2


def _usage(problem: Exception) -> tuple[str, str]:
    context = getattr(problem, "ctx", None)
    path = getattr(context, "command_path", "tally")
    text = str(getattr(problem, "format_message", problem.__str__)()).strip()
    return f"{text.rstrip('.') or 'which command is missing'} (see {path} --help)", "Usage"


def _refuse(arguments: Sequence[str], text: str, kind: str, *, code: int) -> int:
    """Say in one line what is wrong, as JSON too where that was asked for."""
    if "--json" in arguments:
        print_json({"error": text, "kind": kind})
    say(f"tally: {text}", style="red")
    return code


if __name__ == "__main__":
    sys.exit(main())
