"""tally conformance: asks another implementation of the verifier every vector, or answers as this one."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from tallystick.cli.options import AsJson
from tallystick.cli.terminal import answer as show
from tallystick.cli.terminal import say
from tallystick.errors import InvalidInput
from tallystick.evidence.conformance import OPERATIONS, Answered, Operation, answer, drive, load_questions
from tallystick.fleet.sampling.draw import draw_sample, parse_announcement
from tallystick.reports.layout import BAD, GOOD, Row, counted, page

app = typer.Typer(
    help="Check another implementation of the verifier against the vectors.", no_args_is_help=True
)


def _draw(announcement: str, beacon: str) -> None:
    draw_sample(parse_announcement(announcement.encode()), bytes.fromhex(beacon))


ASKED: Mapping[str, Operation] = {**OPERATIONS, "draw": Operation(("announcement", "beacon"), _draw)}


@dataclass(frozen=True)
class ConformancePage:
    """What an implementation answered."""

    program: str
    answers: tuple[Answered, ...]

    @property
    def wrong(self) -> tuple[Answered, ...]:
        """Answers that are not the vectors'."""
        return tuple(each for each in self.answers if not each.agreed)

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        return {
            "program": self.program,
            "conforms": not self.wrong,
            "asked": len(self.answers),
            "wrong": [
                {"case": each.question.name, "expected": _expected(each), "said": each.said}
                for each in self.wrong
            ],
        }

    def __rich__(self) -> RenderableType:
        """Return the page for people."""
        rooms: dict[str, list[int]] = {}
        for each in self.answers:
            tally = rooms.setdefault(each.question.name.partition("/")[0], [0, 0])
            tally[0] += each.agreed
            tally[1] += 1
        rows: list[Row] = [(room, f"{good} of {total}") for room, (good, total) in rooms.items()]
        rows += [
            (each.question.name, f"must be {_expected(each)}, was {each.said}") for each in self.wrong[:20]
        ]
        if len(self.wrong) > 20:
            rows.append(("", f"and {len(self.wrong) - 20} more (--json names all)"))
        if self.wrong:
            return page(
                f"does not conform: {counted(len(self.wrong), 'wrong answer')} of {len(self.answers)}",
                BAD,
                rows,
            )
        return page(f"conforms: {counted(len(self.answers), 'case')} answered as the vectors say", GOOD, rows)


def _expected(each: Answered) -> str:
    return "accepted" if each.question.accepted else "refused"


def register(parent: typer.Typer) -> None:
    """Add ``tally conformance`` to ``parent``."""
    parent.add_typer(app, name="conformance")


@app.command(context_settings={"ignore_unknown_options": True})
def run(
    program: Annotated[
        list[str], typer.Argument(metavar="PROGRAM [ARGUMENT]...", help="The implementation; after --.")
    ],
    vectors: Annotated[Path, typer.Option("--vectors", metavar="DIR", help="The vectors' folder.")] = Path(
        "vectors"
    ),
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.1, help="For one answer.")
    ] = 30.0,
    as_json: AsJson = False,
) -> int:
    """Ask PROGRAM every question; exit code 1 if one answer is not the vectors'."""
    if not vectors.is_dir():
        raise InvalidInput(f"--vectors {vectors}: there is no such folder")
    questions = load_questions(vectors, ASKED)
    found = ConformancePage(" ".join(program), tuple(drive(program, questions, timeout_s=timeout)))
    show(found, as_json=as_json)
    return 1 if found.wrong else 0


@app.command()
def serve() -> int:
    """Answer questions on standard input with this package's own verifier, one JSON line each."""
    for line in sys.stdin:
        try:
            question = json.loads(line)
        except ValueError:
            say(f"tally: not a JSON line: {line[:60]!r}", style="red")
            return 2
        print(json.dumps({"id": question.get("id"), "accepted": answer(question, ASKED)}), flush=True)
    return 0
