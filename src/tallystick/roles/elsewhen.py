"""Another calendar for a process and all that it starts: ``elsewhen.c``, compiled and preloaded (spec/dispute.md 14)."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

ELSEWHERE_SECONDS = 400 * 86400 + 12345  # another year, month, weekday, hour and minute
CALENDAR = Path(__file__).with_name("libelsewhen.so")
NO_CALENDARS = (
    "no other process can have another calendar on this machine: that takes Linux with glibc, and a compiler"
)


def has_calendars() -> bool:
    """Whether this machine can give a process another calendar: Linux with glibc, where a compiler was there to build for it."""
    return CALENDAR.is_file()


def calendar_of(number: int) -> dict[str, str]:
    """Return variables with which a process, and all that it starts, has the calendar of another machine; none for 0."""
    if not number or not has_calendars():
        return {}
    preloaded = os.environ.get("LD_PRELOAD", "")
    return {
        "LD_PRELOAD": ":".join(filter(None, (_loadable(), preloaded))),
        "TALLYSTICK_ELSEWHEN": str(number * ELSEWHERE_SECONDS),
    }


@cache
def _loadable() -> str:
    """Return the calendar's path, or a link to it where that has what separates paths for the loader."""
    if not {":", " "}.intersection(str(CALENDAR)):
        return str(CALENDAR)
    place = tempfile.mkdtemp(prefix="tally-calendar-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    link = Path(place, CALENDAR.name)
    link.symlink_to(CALENDAR)
    return str(link)
