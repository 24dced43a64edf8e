"""How a dispute ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import RenderableType

from tallystick.dispute.terms import PARTIES, Party
from tallystick.reports.layout import BAD, UNSURE, Row, counted, page

if TYPE_CHECKING:
    from tallystick.roles.operator_dispute import OperatorResult
    from tallystick.roles.referee import DisputeResult


@dataclass(frozen=True)
class DisputePage:
    """The judge's ruling; ``verdict_file`` is where its canonical JSON lies."""

    result: DisputeResult
    verdict_file: str
    record_file: str | None = None

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
            "objection": None if result.objection is None else result.objection.fields(),
            "operator": self._operator(),
            "record_file": self.record_file,
            "verdict_file": self.verdict_file,
        }

    def _operator(self) -> dict[str, object] | None:
        found = self.result.operator
        if found is None:
            return None
        return {**found.fields(), "seconds": dict(found.cost.seconds), "share_of_step": found.share_of_step}

    def __rich__(self) -> RenderableType:
        """Return the page that ``tally dispute`` prints."""
        result = self.result
        where = "" if result.step is None else f" at step {result.step}"
        headline = f"nobody loses{where}" if result.loser == "none" else f"the {result.loser} loses{where}"
        return page(headline, UNSURE if result.loser == "none" else BAD, self.rows())

    def rows(self) -> list[Row]:
        """Return the rows of the page."""
        result = self.result
        levels = ", ".join(f"{count} over {level}" for level, count in result.rounds_per_level.items())
        rows: list[Row] = [
            ("outcome", result.outcome.replace("_", " ")),
            ("reason", result.reason),
            ("bisection", counted(result.rounds, "round") + (f": {levels}" if levels else "")),
            *self._operator_rows(),
            ("verdict", self.verdict_file),
        ]
        if self.record_file is not None:
            rows.append(("record", self.record_file))
        return rows

    def _operator_rows(self) -> list[Row]:
        found = self.result.operator
        if found is None:
            return []
        cost = found.cost
        rows: list[Row] = []
        if found.operator is not None:
            op = found.operator
            name = f"{op.name} of {op.module}" if op.module else op.name
            rows.append(("operator", f"{found.index} of {cost.operators}: {name}, {op.phase}"))
        if found.loser is None:
            rows.append(("whole step", f"judged instead: {found.reason}"))
        rows.append(("signed", _signed(found)))
        sent = f"trainer {cost.trainer_bytes:,} B, auditor {cost.auditor_bytes:,} B"
        rows.append(("sent", f"{sent}; opened to the auditor {cost.opened_bytes:,} B"))
        if found.loser is not None:
            share = found.share_of_step
            time = "" if share is None else f", {share:.2%} of a step's time"
            rows.append(("judge read", f"{cost.judge_bytes:,} B{time}"))
        return rows


def _signed(found: OperatorResult) -> str:
    """Return in words whose moves over operators are signed."""
    who = ", ".join(f"{party} {key.key_id[:16]}.." for party, key in found.signed.items())
    missing = [party for party in PARTIES if party not in found.signed]
    if not missing:
        return f"the moves of {who}"
    options = " and ".join(f"--{party}-key" for party in missing)
    left = "the moves are unsigned" if len(missing) == 2 else f"those of the {missing[0]} are unsigned"
    return (f"the moves of {who}; " if who else "") + f"{left}: who made them is the judge's word ({options})"


@dataclass(frozen=True)
class Passed:
    """What passed in a dispute by files.

    Attributes:
        rounds: of questions and answers.
        parties: by party ``questions``, ``sent_bytes``, ``received_bytes``, and ``seconds`` between question and answer.
        refused: by file, why an answer was not taken.
        seconds, cpu_seconds: what this call of the referee took, without waiting.
    """

    rounds: int
    parties: Mapping[Party, Mapping[str, int]]
    refused: Mapping[str, str]
    seconds: float
    cpu_seconds: float

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        return {
            "parties": {party: dict(each) for party, each in self.parties.items()},
            "referee": {"cpu_seconds": round(self.cpu_seconds, 3), "seconds": round(self.seconds, 3)},
            "refused": dict(self.refused),
            "rounds": self.rounds,
        }

    def rows(self) -> list[Row]:
        """Return the rows of a page."""
        rows: list[Row] = [("exchanged", counted(self.rounds, "round"))]
        for party, each in self.parties.items():
            sent, seconds = (
                f"sent {each['sent_bytes']:,} B, got {each['received_bytes']:,} B",
                each["seconds"],
            )
            rows.append(
                (party, f"{counted(each['questions'], 'question')}, {sent}, answered in {seconds:,} s")
            )
        rows.append(("referee", f"worked {self.seconds:,.1f} s in this call"))
        return rows + [("refused", f"{file}: {why}") for file, why in self.refused.items()]


@dataclass(frozen=True)
class RuledPage(DisputePage):
    """The ruling of a dispute by files, and what passed."""

    passed: Passed = field(kw_only=True)

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        return {**super().fields(), "exchange": self.passed.fields()}

    def rows(self) -> list[Row]:
        """Return the rows of the page."""
        return [*super().rows(), *self.passed.rows()]


@dataclass(frozen=True)
class AwaitingPage:
    """A dispute by files that waits for answers."""

    awaited: tuple[Party, ...]
    deadline: int | None
    passed: Passed

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        return {
            "awaited": list(self.awaited),
            "deadline": self.deadline,
            "exchange": self.passed.fields(),
            "outcome": "awaiting",
            "round": self.passed.rounds - 1,
        }

    def __rich__(self) -> RenderableType:
        """Return the page that ``tally dispute rule`` prints."""
        until = "at any time" if self.deadline is None else f"until second {self.deadline} (UTC, since 1970)"
        rows: list[Row] = [
            ("awaited", f"an answer of {' and '.join(self.awaited)} {until}"),
            *self.passed.rows(),
        ]
        return page(f"round {self.passed.rounds - 1} is open", UNSURE, rows)
