"""Conformance: whether another implementation answers the test vectors as they say (spec/vectors.md 3).

The implementation is a program that reads one JSON question a line and answers each with one JSON line::

    {"id": "case 17", "operation": "note", "note": "..", "vkeys": [..]}
    {"id": "case 17", "accepted": true, "values": {"signed": {..}}}
    {"id": "case 17", "unsupported": true}

A question holds what goes in and nothing of what must come out. What is accepted comes with the values that the
operation has, and these are compared. ``evidence.questions`` and ``fleet.questions`` list the operations; ``answer`` is
this package's own implementation, which ``tally conformance serve`` offers; ``schema`` is all of it as JSON Schema.
"""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tallystick.commit.encoding import is_same_json
from tallystick.errors import InvalidInput, Mismatch, ProtocolViolation

Json = dict[str, Any]
Schema = Mapping[str, Any]
LONGEST_ANSWER = 1 << 24  # bytes of a line
QUANTILE_TOLERANCE = 4e-15  # relative: the values of that one operation come of another method


@dataclass(frozen=True)
class Refused:
    """What is not accepted, with the values that the operation gives of a refusal."""

    values: Mapping[str, object]


@dataclass(frozen=True)
class Query:
    """What an implementation can be asked, and this package's own way to answer.

    Attributes:
        about: what is asked, in one sentence.
        fields: of the question, with the JSON Schema of each.
        values: of an answer that accepts, likewise.
        ask: takes the fields in order and returns the values, or ``Refused``; raises ``InvalidInput``, ``Mismatch`` or
            ``ProtocolViolation`` where it refuses without values.
        prepare: makes of a case what holds the fields by name, where the case has not all of them.
        refused: values of an answer that refuses.
        tolerance: how far, relative, real numbers may be from the vectors'; bit for bit if it is 0.
    """

    about: str
    fields: Mapping[str, Schema]
    ask: Callable[..., Mapping[str, object] | Refused | None]
    values: Mapping[str, Schema] = field(default_factory=dict[str, Schema])
    prepare: Callable[[Json], Json] = dict
    refused: Mapping[str, Schema] = field(default_factory=dict[str, Schema])
    tolerance: float = 0.0


@dataclass(frozen=True)
class ConformanceCase:
    """One case as the implementation sees it, and what it must answer.

    Attributes:
        number: place among all questions.
        name: ``SUITE/CASE``; the implementation does not see it.
        operation, fields: what is asked.
        accepted: whether it must be accepted.
        values: what the answer's values must be, by name.
        tolerance: of real numbers among them.
    """

    number: int
    name: str
    operation: str
    fields: Mapping[str, object]
    accepted: bool
    values: Mapping[str, object]
    tolerance: float = 0.0

    @property
    def suite(self) -> str:
        """The folder of vectors that the case stands in."""
        return self.name.partition("/")[0]

    @property
    def asked_as(self) -> str:
        """The identity that the implementation sees; the case's own name would give the answer away."""
        return f"case {self.number}"

    @property
    def expected(self) -> str:
        """What the implementation must say, in a word."""
        return "accepted" if self.accepted else "refused"

    def line(self) -> bytes:
        """Return the JSON line that asks it."""
        asked = {"id": self.asked_as, "operation": self.operation, **self.fields}
        return json.dumps(asked, sort_keys=True).encode() + b"\n"


@dataclass(frozen=True)
class CaseAnswer:
    """What became of one question: ``accepted``, ``refused``, ``unsupported``, or why there is no such word in ``said``."""

    question: ConformanceCase
    said: str

    @property
    def agreed(self) -> bool:
        """Whether the implementation says what the vectors say, values included."""
        return self.said == self.question.expected

    @property
    def unsupported(self) -> bool:
        """Whether the implementation says that it does not know the operation: no wrong answer, and no pass."""
        return self.said == "unsupported"


def answer(question: Mapping[str, Any], operations: Mapping[str, Query]) -> Json:
    """Return this package's answer to ``question``, without its ``id``.

    Raises:
        InvalidInput: an operation that is not in ``operations``, or a question without its fields.
    """
    fields = dict(question)
    fields.pop("id", None)
    operation = fields.pop("operation", None)
    if operation not in operations:
        raise InvalidInput(f"operation {operation!r}: must be one of {', '.join(operations)}")
    asked = operations[operation]
    if fields.keys() != set(asked.fields):
        raise InvalidInput(
            f"{operation}: must have the fields {', '.join(asked.fields)}, has {', '.join(fields)}"
        )
    try:
        found = asked.ask(*(fields[name] for name in asked.fields))
    except (InvalidInput, Mismatch, ProtocolViolation):
        return {"accepted": False}
    if isinstance(found, Refused):
        return {"accepted": False, "values": dict(found.values)}
    return {"accepted": True, "values": dict(found or {})}


def load_questions(
    vectors: Path,
    operations: Mapping[str, Query],
    asked_as: Mapping[str, Sequence[str]],
    suites: Sequence[str] = (),
) -> list[ConformanceCase]:
    """Return the questions about every case in the folder ``vectors``, in order of their names.

    Args:
        vectors: has a folder for each suite, with one for each case.
        operations: by name.
        asked_as: which operations ask about a case, by the case's ``operation``, or by its suite where it has none; one
            of the same name where nothing is said.
        suites: those to ask about; all if empty.

    Raises:
        InvalidInput: there are none, a suite is not there, or a case has no operation that asks about it.
    """
    found: list[ConformanceCase] = []
    for suite in suites:
        if not (vectors / suite).is_dir():
            raise InvalidInput(f"vectors {vectors}: there is no suite {suite}")
    for path in sorted(vectors.glob("*/*/input.json")):
        suite, name = path.parent.parent.name, path.parent.name
        if suites and suite not in suites:
            continue
        case = cast(Json, json.loads(path.read_text(encoding="utf-8")))
        kind = str(case.pop("operation", suite))
        for operation in asked_as.get(kind, (kind,)):
            if operation not in operations:
                raise InvalidInput(f"vectors {suite}/{name}: no operation {operation!r} asks about it")
            found.append(_question(len(found), f"{suite}/{name}", operation, operations[operation], case))
    if not found:
        raise InvalidInput(f"vectors {vectors}: there is no case")
    return found


def _question(number: int, name: str, operation: str, asked: Query, case: Json) -> ConformanceCase:
    prepared = asked.prepare(case)
    accepted = not name.endswith("_fail")
    values = asked.values if accepted else asked.refused
    return ConformanceCase(
        number,
        name,
        operation,
        {each: prepared[each] for each in asked.fields},
        accepted,
        {each: prepared[each] for each in values if each in prepared},
        asked.tolerance,
    )


def drive(
    program: Sequence[str], questions: Sequence[ConformanceCase], *, timeout_s: float = 30.0
) -> Iterator[CaseAnswer]:
    """Ask ``program`` every question, one process for all, and yield its answers as they come.

    A program that ends, is silent for ``timeout_s`` or answers nonsense is not asked further: what was
    still to be asked counts as not answered.

    Raises:
        InvalidInput: the program cannot be started.
    """
    try:
        child = subprocess.Popen(list(program), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    except OSError as problem:
        raise InvalidInput(f"program {program[0]}: cannot be started ({problem.strerror})") from problem
    assert child.stdin is not None
    assert child.stdout is not None
    lines: queue.Queue[bytes] = queue.Queue()
    reader = threading.Thread(target=_read, args=(child.stdout, lines), daemon=True)
    reader.start()
    gone = ""
    try:
        for question in questions:
            said = gone
            if not said:
                try:
                    child.stdin.write(question.line())
                    said = _said(question, lines.get(timeout=timeout_s))
                except (OSError, queue.Empty) as problem:
                    said = "silent" if isinstance(problem, queue.Empty) else "ended"
                if said in ("ended", "silent") or said.startswith("malformed"):
                    gone = f"not asked, it was {said} before"
            yield CaseAnswer(question, said)
    finally:
        child.kill()
        child.wait()
        reader.join(timeout=timeout_s)
        child.stdin.close()
        child.stdout.close()


def _read(stream: Any, lines: queue.Queue[bytes]) -> None:
    """Hand over whole lines; an empty one says that no more will come."""
    held = b""
    while data := stream.read(1 << 16):
        *whole, held = (held + data).split(b"\n")
        for line in whole:
            lines.put(line)
        if len(held) > LONGEST_ANSWER:
            break
    lines.put(b"")


def _said(question: ConformanceCase, line: bytes) -> str:
    """Return in words what a line says: ``accepted`` only where every value is the one expected."""
    if not line:
        return "ended"
    malformed = f"malformed ({line[:60]!r})"
    try:
        value = json.loads(line)
    except ValueError:
        return malformed
    if not isinstance(value, dict) or cast(Json, value).pop("id", None) != question.asked_as:
        return malformed
    said = cast(Json, value)
    if said.get("unsupported") is True and set(said) == {"unsupported"}:
        return "unsupported"
    values = said.get("values", {})
    if not {"accepted"} <= set(said) <= {"accepted", "values"} or not isinstance(values, dict):
        return malformed
    if not isinstance(said["accepted"], bool):
        return malformed
    word = "accepted" if said["accepted"] else "refused"
    if word != question.expected:
        return word
    for name, wanted in question.values.items():
        if name not in values:
            return f"{word} without the value {name}"
        given = cast(Json, values)[name]
        if not _is_same(given, wanted, question.tolerance):
            return f"{word} with {name} {_short(given)}, must be {_short(wanted)}"
    return word


def _is_same(given: object, wanted: object, tolerance: float) -> bool:
    if not tolerance:
        return is_same_json(given, wanted)
    if not isinstance(given, list) or not isinstance(wanted, list):
        return False
    try:
        pairs = [
            (float.fromhex(a), float.fromhex(b))
            for a, b in zip(cast("list[str]", given), cast("list[str]", wanted), strict=True)
        ]
    except (TypeError, ValueError, OverflowError):
        return False
    return all(abs(a - b) <= tolerance * abs(b) for a, b in pairs)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def schema(operations: Mapping[str, Query]) -> Json:
    """Return the JSON Schema (2020-12) of questions and answers."""
    identity = {"type": "string", "pattern": "^case [0-9]+$"}
    questions: Json = {}
    for name, operation in operations.items():
        fields = {"id": identity, "operation": {"const": name}, **operation.fields}
        questions[f"question {name}"] = {"description": operation.about, **_object(fields)}
        for word, values in (("values", operation.values), ("values of a refusal", operation.refused)):
            if values:
                questions[f"{word} {name}"] = _object(values)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "tally conformance: a question, and an answer",
        "description": "One JSON line each (spec/vectors.md 3). An answer's values are those of its question's operation.",
        "anyOf": [{"$ref": "#/$defs/question"}, {"$ref": "#/$defs/answer"}],
        "$defs": {
            "question": {"oneOf": [{"$ref": f"#/$defs/question {name}"} for name in operations]},
            "answer": {
                "oneOf": [
                    _object({"id": identity, "unsupported": {"const": True}}),
                    {
                        **_object({"id": identity, "accepted": {"type": "boolean"}, "values": {"type": "object"}}),
                        "required": ["accepted", "id"],
                    },
                ]
            },
            **questions,
        },
    }  # fmt: skip


def _object(fields: Mapping[str, Schema]) -> Json:
    return {
        "type": "object",
        "properties": dict(fields),
        "required": sorted(fields),
        "additionalProperties": False,
    }
