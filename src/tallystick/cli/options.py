"""What several commands ask for, and how it is read."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from typer.models import ArgumentInfo, OptionInfo

from tallystick.commit.encoding import parse_hex
from tallystick.dispute.terms import Party
from tallystick.errors import InvalidInput, StoreError
from tallystick.store.files import RunDirectory

if TYPE_CHECKING:
    from tallystick.execution.job import JobSource
    from tallystick.signing.keys import PublicKey

Given = TypeVar("Given")


def option(
    name: str,
    metavar: str,
    words: str,
    *,
    short: str | None = None,
    least: float | None = None,
    most: float | None = None,
    panel: str | None = None,
) -> OptionInfo:
    """Return what stands in ``Annotated`` for an option with a value: its name, what the value is, and its help.

    ``least`` and ``most`` bound a number; ``panel`` is the group that ``--help`` shows the option in.
    """
    names = (name,) if short is None else (name, short)
    return typer.Option(*names, metavar=metavar, help=words, min=least, max=most, rich_help_panel=panel)


def flag(name: str, words: str, *, panel: str | None = None) -> OptionInfo:
    """Return what stands in ``Annotated`` for an option without a value."""
    return typer.Option(name, help=words, rich_help_panel=panel)


def argument(metavar: str, words: str) -> ArgumentInfo:
    """Return what stands in ``Annotated`` for an argument: what it is, and its help."""
    return typer.Argument(metavar=metavar, help=words)


AsJson = Annotated[bool, flag("--json", "Print one JSON object instead of a page.")]
ProfileName = Annotated[
    str,
    option(
        "--profile", "NAME", "Arithmetic: native, avx2 or sse4, with threads=N and jitter, joined by commas."
    ),
]
Device = Annotated[str, option("--device", "cpu|cuda", "Where to compute.")]
JobName = Annotated[
    str | None,
    option("--job", "JOB", "The job to run; by default the shipped job that the specification names."),
]

Job = Annotated[
    str, argument("JOB", "A shipped job (digits, text, gpt2, resnet50), a dotted path or a .py file.")
]
JobOrProgram = Annotated[
    list[str],
    argument(
        "JOB | -- python FILE ...",
        "A shipped job (digits, text, gpt2, resnet50), a dotted path or a .py file; or a program that attaches itself.",
    ),
]
Program = Annotated[
    list[str] | None,
    argument("[-- python FILE ...]", "The program, with its arguments, that the run was recorded from."),
]
AnyRun = Annotated[Path, argument("DIR", "A run directory, finished or not.")]
Settings = Annotated[
    list[str] | None, option("--set", "NAME=VALUE", "A setting of the job; may be repeated.")
]
Seed = Annotated[int, option("--seed", "N", "Seed of the portable random streams.", least=0)]
RecalibrateEvery = Annotated[
    int | None,
    option(
        "--recalibrate-every",
        "N",
        "Steps between two measurements of the noise, at most the policy's own, the default.",
        least=1,
    ),
]
Arithmetic = Annotated[
    str,
    option(
        "--optimizer-arithmetic",
        "auto|portable|general",
        "Portable needs no log of the state: torch's Adam, AdamW and SGD have it. General logs any optimizer.",
    ),
]

FindingsOut = Annotated[
    Path | None,
    option("--out", "FILE", "Also write the findings there, as --json prints them."),
]
Effort = Annotated[
    float,
    option("--effort", "SECONDS", "How long to try causes of a difference out; 0 for not at all.", least=0),
]
DEFAULT_EFFORT = 60.0  # seconds

Out = Annotated[Path, option("--out", "FILE", "Where to write.")]
OwnKey = Annotated[str, option("--key", "FILE", "Your private key, or env:NAME.")]
Now = Annotated[
    int | None, option("--now", "SECOND", "UTC second since 1970; by default the clock's.", least=0)
]
_TRUST = option("--trust", "PARTY=FILE", "A party's public key; may be repeated.")
Trusted = Annotated[list[str], _TRUST]
PerhapsTrusted = Annotated[list[str] | None, _TRUST]


def second_of(now: int | None) -> int:
    """Return the second that ``--now`` names, by default the clock's."""
    return int(time.time()) if now is None else now


def parse_named(text: str, *, option: str, form: str = "PARTY=FILE") -> tuple[str, str]:
    """Return the name and the file of ``NAME=FILE``.

    Raises:
        InvalidInput: another form.
    """
    name, equals, file = text.partition("=")
    if not equals or not name or not file:
        raise InvalidInput(f"{option} {text}: must have the form {form}")
    return name, file


def parse_counts(texts: Sequence[str], *, option: str, what: str) -> dict[str, int]:
    """Return the numbers of ``NAME=N`` by name, each name once; ``what`` the names name, for the message.

    Raises:
        InvalidInput: another form, or a name twice.
    """
    found: dict[str, int] = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        if not name or not number.isascii() or not number.isdigit() or len(number) > 18 or name in found:
            raise InvalidInput(f"{option} {text}: must have the form {what.upper()}=N, each {what} once")
        found[name] = int(number)
    return found


def load_trusted(texts: Sequence[str] | None) -> dict[str, PublicKey]:
    """Return the public keys that ``--trust`` names, by party; none where it was not given.

    Raises:
        InvalidInput: another form than PARTY=FILE, or a party twice.
        StoreError: a key cannot be read.
    """
    from tallystick.store.keys import load_public_key

    found: dict[str, PublicKey] = {}
    for text in texts or ():
        name, file = parse_named(text, option="--trust")
        if name in found:
            raise InvalidInput(f"--trust {text}: {name} has a key already")
        found[name] = load_public_key(Path(file))
    return found


def load_chip_keys(texts: Sequence[str]) -> dict[str, PublicKey]:
    """Return the device keys that ``--chip UEID=FILE`` names, by UEID in hexadecimal.

    Raises:
        InvalidInput: another form, or no UEID.
        StoreError: a key cannot be read.
    """
    from tallystick.store.keys import load_public_key

    found: dict[str, PublicKey] = {}
    for text in texts:
        ueid, file = parse_named(text, option="--chip", form="UEID=FILE")
        if not 14 <= len(ueid) <= 66:
            raise InvalidInput(f"--chip {text}: must be UEID=FILE, the UEID in hexadecimal")
        parse_hex(ueid, n_bytes=len(ueid) // 2, what="--chip")
        found[ueid] = load_public_key(Path(file))
    return found


def by_party(trainer: Given | None, auditor: Given | None) -> dict[Party, Given]:
    """Return what was given for each party, without those for whom nothing was."""
    both: dict[Party, Given | None] = {"trainer": trainer, "auditor": auditor}
    return {party: given for party, given in both.items() if given is not None}


def parse_steps(text: str | None) -> tuple[int, int] | None:
    """Return the two numbers of ``A:B``.

    Raises:
        InvalidInput: another form.
    """
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", text, re.ASCII)
    if found is None:
        raise InvalidInput(
            f"--steps {text}: must be two numbers of steps with a colon between, such as 20:60"
        )
    return int(found[1]), int(found[2])


def parse_settings(texts: Sequence[str]) -> dict[str, str]:
    """Return the settings written as ``name=value``.

    Raises:
        InvalidInput: no equals sign, no name, or one name twice.
    """
    settings: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidInput(f"--set {text}: must have the form name=value")
        if name in settings:
            raise InvalidInput(f"--set {text}: {name} is already set to {settings[name]!r}")
        settings[name] = value
    return settings


def parse_root(text: str) -> bytes:
    """Return the 32 bytes of a root.

    Raises:
        InvalidInput: not 64 hexadecimal digits.
    """
    if re.fullmatch(r"[0-9a-fA-F]{64}", text, re.ASCII) is None:
        raise InvalidInput(f"--root {text}: must be 64 hexadecimal digits")
    return bytes.fromhex(text)


def existing_run(path: Path) -> RunDirectory:
    """Return the run directory that a caller named.

    Raises:
        StoreError: there is no directory.
    """
    if not path.is_dir():
        raise StoreError(f"{path}: there is no such run directory")
    return RunDirectory(path)


def find_job(name: str) -> JobSource:
    """Return the source of a job that the caller named; dotted paths are looked for in the working directory too.

    Raises:
        InvalidInput: there is none of that name.
    """
    from tallystick.execution.job import find_source

    here = str(Path.cwd())
    if not name.endswith(".py") and here not in sys.path:
        sys.path.append(here)
    return find_source(name)


def choose_source(job: str | None, stated: str) -> JobSource:
    """Return the source of ``job``, or by default of the shipped job whose name a specification states.

    Raises:
        InvalidInput: there is no such source, or the specification states no shipped job.
    """
    from tallystick.execution.job import find_shipped

    return find_shipped(stated) if job is None else find_job(job)
