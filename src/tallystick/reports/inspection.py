"""Pages and JSON of inspections."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from tallystick.fleet.inspection.judging import ChipVerdict, InspectionVerdict
from tallystick.reports.layout import BAD, GOOD, QUIET, Row, counted, page
from tallystick.reports.registry import when


@dataclass(frozen=True)
class VerdictPage:
    """What an inspection comes to, chip by chip."""

    verdict: InspectionVerdict

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        order = self.verdict.order
        return {
            "passed": not self.verdict.failures,
            "order": order.digest().hex(),
            "result": self.verdict.result.digest().hex(),
            "inspector": order.inspector,
            "custodian": order.custodian,
            "period": order.period,
            "failures": len(self.verdict.failures),
            "chips": [_chip_fields(chip) for chip in self.verdict.chips],
        }

    def __rich__(self) -> RenderableType:
        """Return the page for people."""
        order, failures = self.verdict.order, self.verdict.failures
        passed = sum(chip.passed for chip in self.verdict.chips)
        rows: list[Row] = [
            ("order", f"{order.digest().hex()[:16]}.., period {order.period}, at {order.custodian}"),
            ("inspector", order.inspector),
            ("closed", when(self.verdict.result.closed)),
            ("passed", f"{passed} of {counted(len(self.verdict.chips), 'chip')}"),
            ("custody", f"{counted(len(self.verdict.result.custody), 'link')}, unbroken"),
        ]
        lines = [
            Text(f"  {chip.target.chip}: {'; '.join(chip.reasons)}", style="" if chip in failures else QUIET)
            for chip in self.verdict.chips
            if chip.reasons
        ]
        if failures:
            return page(f"{counted(len(failures), 'failure')} to follow up", BAD, rows, *lines)
        return page("every chip that was reached passed", GOOD, rows, *lines)


def _chip_fields(chip: ChipVerdict) -> dict[str, object]:
    return {
        "chip": chip.target.chip,
        "stratum": chip.target.stratum,
        "owner": chip.target.owner,
        "outcome": chip.outcome,
        "passed": chip.passed,
        "reasons": list(chip.reasons),
    }
