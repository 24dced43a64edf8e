"""Pages and JSON of neutral runs: what was agreed, and what came out."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from tallystick.fleet.enclave.neutral import COMPLETED, FAILURES, NeutralOrder, NeutralOutput
from tallystick.fleet.enclave.neutral_result import NeutralOutcome
from tallystick.reports.layout import BAD, GOOD, UNSURE, Row, counted, page

STYLES = {"pass": GOOD, "fail": BAD, "unknown": UNSURE}


@dataclass(frozen=True)
class OrderPage:
    """An order as its parties read it before they sign, and who has signed."""

    order: NeutralOrder
    signed_by: tuple[str, ...]

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        order = self.order
        return {
            "order": order.digest(),
            "program": order.program,
            "verifier": order.verifier,
            "owner": order.owner,
            "signed_by": list(self.signed_by),
            "inputs": [item.fields() for item in order.inputs],
            "outputs": [output.fields() for output in order.outputs],
            "bits": order.bits,
            "budget": order.budget,
            "repeats": order.repeats,
            "seconds": order.bounds.seconds,
            "memory": order.bounds.memory,
            "scratch": order.bounds.scratch,
            "constant_time": order.constant_time,
        }

    def __rich__(self) -> RenderableType:
        """Return the page for people."""
        order = self.order
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
            ("verifier", _party(order.verifier, self.signed_by)),
            ("owner", _party(order.owner, self.signed_by)),
        ]  # fmt: skip
        whole = set(self.signed_by) == {order.verifier, order.owner}
        return page("agreed: signed by both" if whole else "not agreed yet", GOOD if whole else UNSURE, rows)


@dataclass(frozen=True)
class ResultPage:
    """What a neutral run came to."""

    order: NeutralOrder
    outcome: NeutralOutcome
    assurance: str
    out: str | None = None

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        return {
            "verdict": self.outcome.verdict,
            "status": self.outcome.status,
            "outputs": dict(self.outcome.values),
            "scalars": {
                output.name: output.level(int(self.outcome.values[output.name]))
                for output in self.order.outputs
                if output.kind == "scalar" and output.name in self.outcome.values
            },
            "order": self.order.digest(),
            "program": self.order.program,
            "bits": self.order.bits,
            "budget": self.order.budget,
            "assurance": self.assurance,
            "statement": self.out,
        }

    def __rich__(self) -> RenderableType:
        """Return the page for people."""
        rows: list[Row] = []
        for output in self.order.outputs:
            if output.name not in self.outcome.values:
                continue
            value = self.outcome.values[output.name]
            shown = (
                f"{output.level(int(value)):.6g}, level {value}" if output.kind == "scalar" else str(value)
            )
            rows.append((output.name, Text(shown, style=STYLES.get(str(value), ""))))
        rows += [
            ("order", self.order.digest()),
            ("program", f"SHA-256 {self.order.program}"),
            ("told", f"at most {counted(self.order.bits, 'bit')} of {self.order.budget}"),
            ("assurance", self.assurance),
        ]
        if self.out is not None:
            rows.append(("statement", self.out))
        verdict = self.outcome.verdict
        said = verdict if self.outcome.status == COMPLETED else f"no answer: {self.outcome.status}"
        return page(f"neutral run: {said}", STYLES[verdict], rows)


def _schema(output: NeutralOutput) -> str:
    if output.kind == "verdict":
        return "pass or fail"
    if output.kind == "integer":
        return f"an integer from {output.low} to {output.high}"
    low, high = float.fromhex(output.low), float.fromhex(output.high)
    return f"one of {output.levels:,} scalars from {low:g} to {high:g}"


def _party(key_id: str, signed_by: tuple[str, ...]) -> str:
    return f"{key_id} {'signed' if key_id in signed_by else 'has not signed'}"
