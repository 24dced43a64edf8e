"""What the scripts in ``attacks/`` share: an attack ends well if honest parties refuse or notice what they must."""

from __future__ import annotations

from collections.abc import Callable

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
