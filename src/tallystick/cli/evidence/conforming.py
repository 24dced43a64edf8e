"""tally conformance: asks another implementation every test vector, answers as this one, or prints the schema of both."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import RenderableType

from tallystick.cli.options import AsJson, argument, option
from tallystick.cli.terminal import answer as show
from tallystick.cli.terminal import say
from tallystick.errors import InvalidInput
from tallystick.evidence.conformance import (
    CaseAnswer,
    Query,
    answer,
    drive,
    load_questions,
    schema,
)
from tallystick.evidence.questions import ASKED_AS, OPERATIONS
from tallystick.fleet.questions import FLEET_OPERATIONS
from tallystick.reports.layout import BAD, GOOD, UNSURE, Row, counted, page

app = typer.Typer(help="Check another implementation against the test vectors.", no_args_is_help=True)

ASKED: Mapping[str, Query] = {**OPERATIONS, **FLEET_OPERATIONS}
UNSUPPORTED = 3  # exit code where no answer is wrong, and some operations are unknown to the program
SHOWN = 20


@dataclass(frozen=True)
class ConformancePage:
    """What an implementation answered."""

    program: str
    answers: tuple[CaseAnswer, ...]

    @property
    def wrong(self) -> tuple[CaseAnswer, ...]:
        """Answers that are not the vectors', those it does not support left out."""
        return tuple(each for each in self.answers if not each.agreed and not each.unsupported)

    @property
    def unsupported(self) -> tuple[CaseAnswer, ...]:
        """Questions that the implementation says it does not support."""
        return tuple(each for each in self.answers if each.unsupported)

    @property
    def suites(self) -> dict[str, dict[str, int]]:
        """By suite, how many cases and questions were asked, and how many answers agreed, were unsupported or wrong."""
        found: dict[str, list[CaseAnswer]] = {}
        for each in self.answers:
            found.setdefault(each.question.suite, []).append(each)
        return {suite: _numbers(answers) for suite, answers in found.items()}

    @property
    def code(self) -> int:
        """Return the exit code: 0 if every answer agreed, 1 if one is wrong, 3 if some are only unsupported."""
        return 1 if self.wrong else UNSUPPORTED if self.unsupported else 0

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        return {
            "program": self.program,
            "conforms": self.code == 0,
            **_numbers(self.answers),
            "suites": self.suites,
            "answers": [_shown(each) for each in self.answers if not each.agreed],
        }

    def __rich__(self) -> RenderableType:
        """Return the page for people."""
        rows: list[Row] = []
        for suite, numbers in self.suites.items():
            unsupported = f", {numbers['unsupported']} unsupported" if numbers["unsupported"] else ""
            rows.append((suite, f"{numbers['agreed']} of {numbers['asked']}{unsupported}"))
        for each in self.wrong[:SHOWN]:
            rows.append((each.question.name, f"must be {each.question.expected}, was {each.said}"))
        if len(self.wrong) > SHOWN:
            rows.append(("", f"and {len(self.wrong) - SHOWN} more (--json names all)"))
        numbers = _numbers(self.answers)
        asked = f"{counted(numbers['asked'], 'question')} about {counted(numbers['cases'], 'case')}"
        if self.wrong:
            return page(f"does not conform: {counted(len(self.wrong), 'wrong answer')} to {asked}", BAD, rows)
        if self.unsupported:
            left = f"{len(self.unsupported)} of {asked} are unsupported"
            return page(f"no wrong answer, and {left}", UNSURE, rows)
        return page(f"conforms: {asked} answered as the vectors say", GOOD, rows)


def _shown(each: CaseAnswer) -> dict[str, str]:
    asked = each.question
    return {"case": asked.name, "expected": asked.expected, "operation": asked.operation, "said": each.said}


def _numbers(answers: Sequence[CaseAnswer]) -> dict[str, int]:
    agreed = sum(each.agreed for each in answers)
    unsupported = sum(each.unsupported for each in answers)
    return {
        "cases": len({each.question.name for each in answers}),
        "asked": len(answers),
        "agreed": agreed,
        "unsupported": unsupported,
        "wrong": len(answers) - agreed - unsupported,
    }


def register(parent: typer.Typer) -> None:
    """Add ``tally conformance`` to ``parent``."""
    parent.add_typer(app, name="conformance")


@app.command(context_settings={"ignore_unknown_options": True})
def run(
    program: Annotated[list[str], argument("PROGRAM [ARGUMENT]...", "The implementation; after --.")],
    vectors: Annotated[Path, option("--vectors", "DIR", "The vectors' folder.")] = Path("vectors"),
    suite: Annotated[
        list[str] | None, option("--suite", "NAME", "Ask about this folder of vectors alone; repeatable.")
    ] = None,
    timeout: Annotated[float, option("--timeout", "SECONDS", "For one answer.", least=0.1)] = 30.0,
    as_json: AsJson = False,
) -> int:
    """Ask PROGRAM every question; exit code 1 if one answer is wrong, 3 if none is and some are unsupported."""
    if not vectors.is_dir():
        raise InvalidInput(f"--vectors {vectors}: there is no such folder")
    questions = load_questions(vectors, ASKED, ASKED_AS, suite or ())
    found = ConformancePage(" ".join(program), tuple(drive(program, questions, timeout_s=timeout)))
    show(found, as_json=as_json)
    return found.code


@app.command()
def serve() -> int:
    """Answer questions on standard input with this package's own readers, one JSON line each."""
    for line in sys.stdin:
        try:
            question = cast("dict[str, object]", json.loads(line))
        except ValueError:
            say(f"tally: not a JSON line: {line[:60]!r}", style="red")
            return 2
        print(json.dumps({"id": question.get("id"), **answer(question, ASKED)}), flush=True)
    return 0


@app.command("schema")
def print_schema() -> int:
    """Print the JSON Schema of questions and answers, which is spec/vectors.schema.json."""
    print(schema_text(), end="")
    return 0


def schema_text() -> str:
    """Return the schema of every operation as JSON, each definition on a line."""
    whole = schema(ASKED)
    definitions = whole.pop("$defs")
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in whole.items()]
    inner = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in definitions.items())
    return "{\n" + "".join(f" {line},\n" for line in lines) + ' "$defs": {\n' + inner + "\n }\n}\n"
