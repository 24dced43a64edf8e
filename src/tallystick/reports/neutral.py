"""Pages and JSON of neutral runs: what was agreed, and what came out."""

from __future__ import annotations

from collections.abc import Collection

from rich.text import Text

from tallystick.fleet.enclave.neutral import COMPLETED, FAILURES, NeutralOrder, NeutralOutput
from tallystick.fleet.enclave.neutral_result import NeutralOutcome
from tallystick.reports.layout import ANSWERS, UNSURE, DonePage, Row, counted, picked


def order_page(order: NeutralOrder, signed_by: Collection[str]) -> DonePage:
    """Return an order as its parties read it before they sign, and who has signed."""
    values = {
        "order": order.digest(),
        **picked(order, "program verifier owner bits budget repeats constant_time"),
        "signed_by": list(signed_by),
        "inputs": [item.fields() for item in order.inputs],
        "outputs": [output.fields() for output in order.outputs],
        **picked(order.bounds, "seconds memory scratch"),
    }
    rows: list[Row] = [("order", order.digest()), ("program", f"SHA-256 {order.program}")]
    rows += [
        (f"input {item.name}", f"{item.binding}{' ' + item.salted if item.salted else ''}, {item.digest}")
        for item in order.inputs
    ]
    rows += [(f"output {output.name}", _schema(output)) for output in order.outputs]
    rows += [
        ("may tell", f"{counted(order.bits, 'bit')} of at most {order.budget}, or one of: {', '.join(FAILURES)}"),
        ("each run", f"{order.bounds.seconds:,} s, {order.bounds.memory / 2**20:,.0f} MiB, "
                     f"{order.bounds.scratch / 2**20:,.3g} MiB of files; {order.repeats} runs must agree"),
        ("released", "when the time limit is over" if order.constant_time else "when done: the duration shows"),
        ("verifier", _party(order.verifier, signed_by)),
        ("owner", _party(order.owner, signed_by)),
    ]  # fmt: skip
    if set(signed_by) == {order.verifier, order.owner}:
        return DonePage("agreed: signed by both", values, rows)
    return DonePage("not agreed yet", values, rows, UNSURE)


def result_page(
    order: NeutralOrder, outcome: NeutralOutcome, assurance: str, out: str | None = None
) -> DonePage:
    """Return what a neutral run came to; ``out`` is where its statement was written."""
    told = [output for output in order.outputs if output.name in outcome.values]
    scalars = {
        output.name: output.level(int(outcome.values[output.name]))
        for output in told
        if output.kind == "scalar"
    }
    values = {
        "verdict": outcome.verdict,
        "status": outcome.status,
        "outputs": dict(outcome.values),
        "scalars": scalars,
        "order": order.digest(),
        **picked(order, "program bits budget"),
        "assurance": assurance,
        "statement": out,
    }
    rows: list[Row] = []
    for output in told:
        value = str(outcome.values[output.name])
        level = f"{scalars[output.name]:.6g}, level " if output.name in scalars else ""
        rows.append((output.name, Text(level + value, style=ANSWERS.get(value, ""))))
    rows += [
        ("order", order.digest()),
        ("program", f"SHA-256 {order.program}"),
        ("told", f"at most {counted(order.bits, 'bit')} of {order.budget}"),
        ("assurance", assurance),
    ]
    if out is not None:
        rows.append(("statement", out))
    said = outcome.verdict if outcome.status == COMPLETED else f"no answer: {outcome.status}"
    return DonePage(f"neutral run: {said}", values, rows, ANSWERS[outcome.verdict])


def _schema(output: NeutralOutput) -> str:
    if output.kind == "verdict":
        return "pass or fail"
    if output.kind == "integer":
        return f"an integer from {output.low} to {output.high}"
    low, high = float.fromhex(output.low), float.fromhex(output.high)
    return f"one of {output.levels:,} scalars from {low:g} to {high:g}"


def _party(key_id: str, signed_by: Collection[str]) -> str:
    return f"{key_id} {'signed' if key_id in signed_by else 'has not signed'}"
