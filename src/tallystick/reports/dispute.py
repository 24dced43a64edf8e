"""How a dispute ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import RenderableType

from tallystick.reports.layout import BAD, UNSURE, Row, counted, page

if TYPE_CHECKING:
    from tallystick.roles.judge import DisputeResult


@dataclass(frozen=True)
class DisputePage:
    """The judge's ruling; ``verdict_file`` is where its canonical JSON lies."""

    result: DisputeResult
    verdict_file: str

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        result = self.result
        return {
            "loser": result.loser,
            "outcome": result.outcome,
            "step": result.step,
            "rounds": result.rounds,
            "rounds_per_level": dict(result.rounds_per_level),
            "reason": result.reason,
            "moves": [list(move) for move in result.moves],
            "verdict_file": self.verdict_file,
        }

    def __rich__(self) -> RenderableType:
        """Return the page that ``tally dispute`` prints."""
        result = self.result
        where = "" if result.step is None else f" at step {result.step}"
        headline = f"nobody loses{where}" if result.loser == "none" else f"the {result.loser} loses{where}"
        levels = ", ".join(f"{count} over {level}" for level, count in result.rounds_per_level.items())
        rows: list[Row] = [
            ("outcome", result.outcome.replace("_", " ")),
            ("reason", result.reason),
            ("bisection", counted(result.rounds, "round") + (f": {levels}" if levels else "")),
            ("verdict", self.verdict_file),
        ]
        return page(headline, UNSURE if result.loser == "none" else BAD, rows)
