"""The page and JSON of an inspection."""

from __future__ import annotations

from tallystick.fleet.inspection.judging import InspectionVerdict
from tallystick.reports.layout import BAD, GOOD, QUIET, DonePage, Row, Words, counted, picked, shown
from tallystick.reports.registry import when


def verdict_page(verdict: InspectionVerdict) -> DonePage:
    """Return what an inspection comes to, chip by chip."""
    order, failures = verdict.order, verdict.failures
    values = {
        "passed": not failures,
        "order": order.digest().hex(),
        "result": verdict.result.digest().hex(),
        **picked(order, "inspector custodian period"),
        "failures": len(failures),
        "chips": [
            {**picked(chip.target, "chip stratum owner"), **picked(chip, "outcome passed reasons")}
            for chip in verdict.chips
        ],
    }
    passed = sum(chip.passed for chip in verdict.chips)
    rows: list[Row] = [
        ("order", f"{order.digest().hex()[:16]}.., period {order.period}, at {order.custodian}"),
        ("inspector", order.inspector),
        ("closed", when(verdict.result.closed)),
        ("passed", f"{passed} of {counted(len(verdict.chips), 'chip')}"),
        ("custody", f"{counted(len(verdict.result.custody), 'link')}, unbroken"),
    ]
    lines = [
        Words(
            shown(f"{chip.target.chip}: {'; '.join(chip.reasons)}", "" if chip in failures else QUIET), "  "
        )
        for chip in verdict.chips
        if chip.reasons
    ]
    if failures:
        return DonePage(f"{counted(len(failures), 'failure')} to follow up", values, rows, BAD, lines)
    return DonePage("every chip that was reached passed", values, rows, GOOD, lines)
