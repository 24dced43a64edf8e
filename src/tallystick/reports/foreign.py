"""JSON that somebody else may have written, read without trust: what has another form than expected is left out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tallystick.commit.encoding import parse_hex_float
from tallystick.errors import InvalidInput
from tallystick.reports.layout import printable

LISTED = 40  # members of a list or object that are shown
LARGEST, LARGEST_DISTANCE = 1 << 53, 1 << 64  # of a count, and of a distance in ulp


@dataclass(frozen=True)
class Foreign:
    """One value of such a document; asking it for what it does not hold gives nothing. ``file`` is the document's name."""

    value: object
    file: str = ""

    def __bool__(self) -> bool:
        """Whether it is an object with members."""
        return isinstance(self.value, Mapping) and bool(self.value)

    def __getitem__(self, name: str) -> Foreign:
        """Return a member of an object."""
        return Foreign(self.value.get(name) if isinstance(self.value, Mapping) else None)

    def members(self, limit: int = LISTED) -> list[tuple[str, Foreign]]:
        """Return the members of an object with their names, the first ``limit``."""
        found = list(self.value.items())[:limit] if isinstance(self.value, Mapping) else []
        return [(str(name), Foreign(item)) for name, item in found]

    def items(self, limit: int = LISTED) -> Iterator[Foreign]:
        """Return the members of a list, the first ``limit``."""
        return map(Foreign, self.value[:limit] if isinstance(self.value, (list, tuple)) else ())

    def text(self, limit: int = 400) -> str:
        """Return a text or number as short text without control characters; empty for anything else."""
        value = self.value
        if isinstance(value, str):
            return printable(value[:limit]) + (".." if len(value) > limit else "")
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, int):
            return f"{value:,}" if abs(value) < 1 << 63 else "a very large number"
        return f"{value:.6g}" if isinstance(value, float) else ""

    def word(self) -> str:
        """Return a name as people write it."""
        return self.text(60).replace("_", " ")

    def any_text(self) -> str:
        """Return a value of any form in short."""
        if isinstance(self.value, (dict, list)):
            return Foreign(json.dumps(self.value, ensure_ascii=True)[:2000]).text()
        return self.text()

    def readable(self) -> str:
        """Return a hexadecimal number with its decimal form beside it."""
        text = self.text(80)
        try:
            return f"{text} ({parse_hex_float(text, what='value'):.9g})"
        except InvalidInput:
            return text

    def whole(self, below: int = LARGEST) -> int | None:
        """Return a count, or None."""
        value = self.value
        return (
            value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < below else None
        )

    def number(self) -> float | None:
        """Return a finite number, or None."""
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            return None
        try:
            number = float(self.value)
        except OverflowError:
            return None
        return number if math.isfinite(number) else None
