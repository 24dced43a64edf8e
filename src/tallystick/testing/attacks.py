"""What the scripts in ``attacks/`` share: an attack ends well if honest parties refuse or notice what they must."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from tallystick.errors import TallyError


class NotCaught(Exception):
    """An honest party let the cheat pass, or the measured limit is not what is stated."""


def must(condition: bool, otherwise: str) -> None:
    """Raise ``NotCaught`` unless the honest party did its work."""
    if not condition:
        raise NotCaught(otherwise)


def must_refuse(action: Callable[[], object], *, naming: str) -> str:
    """Return the message with which ``action`` refuses; it must be one of the product's, and say ``naming``."""
    try:
        action()
    except TallyError as problem:
        must(naming in str(problem), f"refused without naming {naming!r}: {problem}")
        return f"{type(problem).__name__}: {problem}"
    raise NotCaught(f"accepted, where {naming!r} had to be refused")


def play_attack(attack: Callable[[Path, argparse.Namespace], str], parser: argparse.ArgumentParser) -> int:
    """Print the line that ``attack`` ends in, and return the exit status: 1 if the cheat was not caught.

    It gets an empty folder, which ``--keep DIR`` names and keeps, and the options of ``parser``.
    """
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write here, and keep it; must not exist")
    given = parser.parse_args()
    if given.keep is not None and given.keep.exists():
        parser.error(f"--keep {given.keep}: is there already")
    with tempfile.TemporaryDirectory(prefix="tallystick-attack-") as scratch:
        folder = given.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            line = attack(folder, given)
        except NotCaught as problem:
            print(f"NOT CAUGHT: {problem}")
            return 1
    print(line)
    return 0
