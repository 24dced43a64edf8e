"""The result of a neutral run: what came out, held against the order, as a signed statement (spec/neutral-run.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, cast

from tallystick.commit.encoding import (
    HASH_BYTES,
    Fields,
    parse_hex,
    parse_json,
)
from tallystick.errors import InvalidInput, Mismatch
from tallystick.fleet.enclave.neutral import (
    ASSURANCE,
    COMPLETED,
    FAILURES,
    RESULT_TYPE,
    NeutralInput,
    NeutralOrder,
    NeutralOutput,
    Value,
)
from tallystick.fleet.enclave.sandbox import OUTPUT_LIMIT, End
from tallystick.signing.dsse import (
    Statement,
    Subject,
    known_fields,
    parse_envelope,
)
from tallystick.signing.keys import PublicKey


@dataclass(frozen=True)
class NeutralOutcome:
    """``completed`` with a value for each output, or one of ``FAILURES`` and nothing else.

    A verdict's value is ``pass`` or ``fail``, an integer's itself, a scalar's its level.
    """

    status: str
    values: Mapping[str, Value]

    @property
    def verdict(self) -> Literal["pass", "fail", "unknown"]:
        """``unknown`` unless completed; ``fail`` if a verdict among the values is."""
        if self.status != COMPLETED:
            return "unknown"
        return "fail" if "fail" in self.values.values() else "pass"


def judge(order: NeutralOrder, ends: Sequence[End]) -> NeutralOutcome:
    """Return what the runs of one order come to. Only what the schema has room for is in it.

    Equality is of the printed values after rounding: spelling, order of names and digits beyond the levels are gone.
    """
    reasons = {end.reason for end in ends}
    if len(reasons) > 1:
        return NeutralOutcome("not repeatable", {})
    if reasons != {"ended"}:
        status = {"failed": "program failed", "too slow": "time limit", "too much output": "malformed output"}
        return NeutralOutcome(status[reasons.pop()], {})
    try:
        found = [read_values(order, end.output) for end in ends]
    except InvalidInput:
        return NeutralOutcome("malformed output", {})
    if len(found) != order.repeats or any(values != found[0] for values in found):
        return NeutralOutcome("not repeatable", {})
    return NeutralOutcome(COMPLETED, found[0])


def read_values(order: NeutralOrder, printed: bytes) -> dict[str, Value]:
    """Return the values in a program's output: one JSON object with exactly the names of the schema.

    Raises:
        InvalidInput: anything else. The message speaks of the program's output and never leaves the neutral place.
    """
    value = parse_json(printed, what="output", limit=OUTPUT_LIMIT)
    fields = Fields(value, what="output", names=[output.name for output in order.outputs])
    return {output.name: _value(output, fields) for output in order.outputs}


def result_statement(
    order: NeutralOrder,
    outcome: NeutralOutcome,
    *,
    started: str,
    versions: Mapping[str, str],
    refused: Sequence[str],
) -> Statement:
    """Return what the neutral place signs; ``started`` is RFC 3339. When it ended is not said: that would tell more."""
    predicate: dict[str, object] = {
        "assurance": ASSURANCE,
        "bits": order.bits,
        "inputs": [item.fields() for item in order.inputs],
        "isolation": {"refused": list(refused), "versions": dict(versions)},
        "outputs": dict(outcome.values),
        "program": order.program,
        "repeats": order.repeats,
        "schema": [output.fields() for output in order.outputs],
        "startedAt": started,
        "status": outcome.status,
    }
    subject = Subject("order", {"tallystickNeutralOrder": order.digest()})
    return Statement((subject,), RESULT_TYPE, predicate)


@dataclass(frozen=True)
class NeutralResult:
    """What a neutral place states: which order's program came to what on which inputs."""

    order: str
    program: str
    inputs: tuple[NeutralInput, ...]
    schema: tuple[NeutralOutput, ...]
    outcome: NeutralOutcome
    started: str
    assurance: str

    def value(self, name: str) -> str | Fraction | None:
        """Return an output as a verdict's text or an exact number, or None if there is none of that name."""
        output = next((each for each in self.schema if each.name == name), None)
        if output is None or name not in self.outcome.values:
            return None
        value = self.outcome.values[name]
        if isinstance(value, str):
            return value
        return Fraction(output.level(value)) if output.kind == "scalar" else Fraction(value)


def read_result(statement: Statement, *, what: str = "result") -> NeutralResult:
    """Return what a statement says; that a neutral place signed it is for the caller to know.

    Raises:
        InvalidInput: another predicate, or a field missing or malformed.
    """
    if statement.predicate_type != RESULT_TYPE:
        raise InvalidInput(
            f"{what}: predicateType must be {RESULT_TYPE}, is {statement.predicate_type[:80]!a}"
        )
    names = ("assurance", "inputs", "outputs", "program", "schema", "startedAt", "status")
    fields = known_fields(statement.predicate, names, what=what)
    named = statement.digest_of("order", "tallystickNeutralOrder") or ""
    for name, text in (("order", named), ("program", fields.text("program"))):
        parse_hex(text, n_bytes=HASH_BYTES, what=f"{what}: {name}")
    status, values = fields.text("status"), fields.mapping("outputs")
    if status not in (COMPLETED, *FAILURES) or (status == COMPLETED) != bool(values):
        raise InvalidInput(f"{what}: status {status[:40]!a} with {len(values)} outputs")
    found = {
        name: value for name, value in values.items() if isinstance(value, str | int) and value is not True
    }
    if len(found) != len(values) or any(value is False for value in values.values()):
        raise InvalidInput(f"{what}: an output must be a text or an integer")
    inputs = tuple(NeutralInput.read(item) for item in fields.items("inputs"))
    schema = tuple(NeutralOutput.read(item) for item in fields.items("schema"))
    if status == COMPLETED:
        _must_fit(schema, found, what)
    return NeutralResult(
        named, fields.text("program"), inputs, schema, NeutralOutcome(status, found), fields.text("startedAt"),
        fields.text("assurance"),
    )  # fmt: skip


def verify_result(envelope: bytes, order: NeutralOrder, neutral: PublicKey) -> NeutralResult:
    """Return the result of ``order`` that the neutral place signed.

    Raises:
        InvalidInput: malformed.
        Mismatch: another key's, of another order, program or inputs, or with values that the order has no room for.
    """
    result = read_result(parse_envelope(envelope, what="result").open([neutral], what="result"))
    for name, stated, own in (
        ("order", result.order, order.digest()),
        ("program", result.program, order.program),
        ("inputs", result.inputs, order.inputs),
        ("schema", result.schema, order.outputs),
    ):
        if stated != own:
            raise Mismatch(f"result: {name} is {str(stated)[:64]}.., the order has {str(own)[:64]}..")
    return result


def _must_fit(schema: Sequence[NeutralOutput], values: Mapping[str, Value], what: str) -> None:
    if set(values) != {output.name for output in schema}:
        raise Mismatch(f"{what}: outputs are {', '.join(sorted(values))[:200]}, the schema has others")
    for output in schema:
        value = values[output.name]
        if output.kind == "verdict":
            fits = value in ("pass", "fail")
        else:
            low, high = (
                (int(output.low), int(output.high)) if output.kind == "integer" else (0, output.levels - 1)
            )
            fits = isinstance(value, int) and low <= value <= high
        if not fits:
            raise Mismatch(f"{what}: {output.name} is {ascii(value)[:40]}, which the schema has no room for")


def _value(output: NeutralOutput, fields: Fields) -> Value:
    value = fields.value(output.name)
    if output.kind == "verdict":
        if value not in ("pass", "fail"):
            raise InvalidInput(f"output: {output.name} must be pass or fail")
        return cast("str", value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidInput(f"output: {output.name} must be a number")
    if output.kind == "integer":
        if not isinstance(value, int) or not int(output.low) <= value <= int(output.high):
            raise InvalidInput(f"output: {output.name} must be an integer from {output.low} to {output.high}")
        return value
    low, high = float.fromhex(output.low), float.fromhex(output.high)
    if not low <= value <= high:
        raise InvalidInput(f"output: {output.name} must lie from {low:g} to {high:g}")
    exact = (Fraction(value) - Fraction(low)) * (output.levels - 1) / (Fraction(high) - Fraction(low))
    return math.ceil(exact - Fraction(1, 2))
