"""How a dispute ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tallystick.dispute.terms import PARTIES, Party
from tallystick.reports.layout import BAD, UNSURE, DonePage, Row, counted, picked

if TYPE_CHECKING:
    from tallystick.roles.operator_dispute import OperatorResult
    from tallystick.roles.referee import DisputeResult


def dispute_page(
    result: DisputeResult, verdict_file: str, record_file: str | None = None, *, passed: Passed | None = None
) -> DonePage:
    """Return the judge's ruling, where its canonical JSON lies, and what ``passed`` in a dispute by files."""
    found = result.operator
    operator: dict[str, object] | None = None
    if found is not None:
        operator = {
            **found.fields(),
            "seconds": dict(found.cost.seconds),
            "share_of_step": found.share_of_step,
        }
    values = {
        **picked(result, "loser outcome step rounds rounds_per_level reason"),
        "moves": [list(move) for move in result.moves],
        "objection": None if result.objection is None else result.objection.fields(),
        "operator": operator,
        "record_file": record_file,
        "verdict_file": verdict_file,
    }
    levels = ", ".join(f"{count} over {level}" for level, count in result.rounds_per_level.items())
    rows: list[Row] = [
        ("outcome", result.outcome.replace("_", " ")),
        ("reason", result.reason),
        ("bisection", counted(result.rounds, "round") + (f": {levels}" if levels else "")),
        *([] if found is None else _operator_rows(found)),
        ("verdict", verdict_file),
    ]
    if record_file is not None:
        rows.append(("record", record_file))
    if passed is not None:
        values["exchange"] = passed.fields()
        rows += passed.rows()
    where = "" if result.step is None else f" at step {result.step}"
    if result.loser == "none":
        return DonePage(f"nobody loses{where}", values, rows, UNSURE)
    return DonePage(f"the {result.loser} loses{where}", values, rows, BAD)


def awaiting_page(awaited: Sequence[Party], deadline: int | None, passed: Passed) -> DonePage:
    """Return a dispute by files that waits for answers."""
    values = {
        "awaited": list(awaited),
        "deadline": deadline,
        "exchange": passed.fields(),
        "outcome": "awaiting",
        "round": passed.rounds - 1,
    }
    until = "at any time" if deadline is None else f"until second {deadline} (UTC, since 1970)"
    rows: list[Row] = [("awaited", f"an answer of {' and '.join(awaited)} {until}"), *passed.rows()]
    return DonePage(f"round {passed.rounds - 1} is open", values, rows, UNSURE)


def _operator_rows(found: OperatorResult) -> list[Row]:
    cost = found.cost
    rows: list[Row] = []
    if found.operator is not None:
        op = found.operator
        name = f"{op.name} of {op.module}" if op.module else op.name
        rows.append(("operator", f"{found.index} of {cost.operators}: {name}, {op.phase}"))
    if found.loser is None:
        rows.append(("whole step", f"judged instead: {found.reason}"))
    sent = f"trainer {cost.trainer_bytes:,} B, auditor {cost.auditor_bytes:,} B"
    rows += [("signed", _signed(found)), ("sent", f"{sent}; opened to the auditor {cost.opened_bytes:,} B")]
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
