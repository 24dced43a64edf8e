"""Whether an inspection's result answers its order, chip by chip (spec/inspection.md)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tallystick.errors import InvalidInput, Mismatch
from tallystick.fleet.inspection.custody import verify_chain
from tallystick.fleet.inspection.inspection import (
    ABSENT,
    REFUSED,
    SEEN,
    UNREACHED,
    InspectionFinding,
    InspectionResult,
    OrderedChip,
    WorkOrder,
)
from tallystick.fleet.sampling.workload import DrawRound
from tallystick.signing.keys import PublicKey, parse_public_key

PASSED, FAILED = "passed", "failed"


class LogReader(Protocol):
    """Reads what a chip handed over. Returns what is wrong with it, in words; nothing wrong is an empty list."""

    def __call__(self, *, log: bytes, evidence: bytes, key: PublicKey, chip: str, nonce: bytes) -> list[str]:
        """Check that ``evidence`` is the chip's own, fresh for ``nonce``, and vouches for ``log``."""
        ...


@dataclass(frozen=True)
class ChipVerdict:
    """What one chip's inspection comes to, with every reason against it."""

    target: OrderedChip
    outcome: str
    reasons: tuple[str, ...]
    passed: bool


@dataclass(frozen=True)
class InspectionVerdict:
    """What an order comes to: a verdict for each of its chips."""

    order: WorkOrder
    result: InspectionResult
    chips: tuple[ChipVerdict, ...]

    @property
    def failures(self) -> list[ChipVerdict]:
        """The chips that did not pass, those that nobody reached left out."""
        return [chip for chip in self.chips if not chip.passed and chip.outcome != UNREACHED]

    def rounds(self, frame: Mapping[str, int], lost: Mapping[str, int] | None = None) -> list[DrawRound]:
        """Return the rounds for re-planning (spec/plan.md 6); ``frame`` are the chips of each stratum drawn from."""
        found: list[DrawRound] = []
        for stratum in sorted({chip.target.stratum for chip in self.chips}):
            here = [chip.outcome for chip in self.chips if chip.target.stratum == stratum]
            unreached, seen = here.count(UNREACHED), here.count(SEEN)
            found.append(
                DrawRound(
                    stratum, frame[stratum], len(here), seen, len(here) - seen - unreached, unreached,
                    (lost or {}).get(stratum, 0),
                )
            )  # fmt: skip
        return found

    def event_rows(self) -> list[list[str]]:
        """Return the chips and outcomes for the registry's event ``inspected``."""
        rows: list[list[str]] = []
        for chip in self.chips:
            if chip.outcome == UNREACHED:
                continue
            word = {SEEN: PASSED if chip.passed else FAILED, REFUSED: REFUSED}.get(chip.outcome, ABSENT)
            rows.append([chip.target.chip, word])
        return rows


def judge(
    order: WorkOrder,
    result: InspectionResult,
    keys: Mapping[str, PublicKey],
    files: Mapping[bytes, bytes],
    reader: LogReader,
) -> InspectionVerdict:
    """Return what ``result`` comes to: every chip of the order passes every check, or fails with its reasons.

    ``files`` are the package's files by their SHA-256. A chip without a finding has failed.

    Raises:
        Mismatch: the result is another order's or inspector's, its chain of custody is broken or leaves out a file.
    """
    if result.order != order.digest():
        raise Mismatch(
            f"inspection: the result is of order {result.order.hex()[:16]}.., this is {order.digest().hex()[:16]}.."
        )
    if result.inspector != order.inspector:
        raise Mismatch(f"inspection: {result.inspector} inspected, the order is for {order.inspector}")
    holder = verify_chain(result.custody, keys)
    if result.custody[-1].action != "seal" or holder != order.inspector:
        raise Mismatch(
            f"inspection: the chain of custody ends with {holder}, it must end with a seal of {order.inspector}"
        )
    kept = {item for link in result.custody for item in link.items}
    for finding in result.findings:
        if missing := [item for item in finding.items() if item not in kept]:
            raise Mismatch(
                f"chip {finding.chip}: file {missing[0].hex()[:16]}.. is not in the chain of custody"
            )
    found = {finding.chip: finding for finding in result.findings}
    shared = {
        photo
        for photo, count in Counter(p for f in result.findings for p in set(f.photos)).items()
        if count > 1
    }
    if stray := sorted(set(found) - {target.chip for target in order.targets}):
        raise Mismatch(f"chip {stray[0]}: was not in the order")
    return InspectionVerdict(
        order,
        result,
        tuple(
            _judge_chip(order, target, found.get(target.chip), files, shared, reader)
            for target in order.targets
        ),
    )


def _judge_chip(
    order: WorkOrder,
    target: OrderedChip,
    finding: InspectionFinding | None,
    files: Mapping[bytes, bytes],
    shared: set[bytes],
    reader: LogReader,
) -> ChipVerdict:
    if finding is None:
        return ChipVerdict(target, ABSENT, ("nothing was reported: counted as a failure",), False)
    if finding.outcome == UNREACHED:
        if finding.items() or finding.serial or finding.seals:
            return ChipVerdict(
                target, REFUSED, ("unreached, and yet something was found: counted as a failure",), False
            )
        return ChipVerdict(target, UNREACHED, ("not reached for the inspectors' own reasons",), False)
    if finding.outcome != SEEN:
        return ChipVerdict(target, finding.outcome, (f"{finding.outcome}: counted as a failure",), False)
    reasons: list[str] = []
    if not order.issued <= finding.time <= order.due:
        reasons.append(f"seen at {finding.time}, the order runs from {order.issued} to {order.due}")
    if finding.serial != target.serial:
        reasons.append(
            f"serial number on the part is {finding.serial or 'not read'}, registered is {target.serial}"
        )
    seals = dict(finding.seals)
    reasons += [
        f"seal {name} is {seals.get(name, 'not reported')}"
        for name in order.seals
        if seals.get(name) != "intact"
    ]
    if len(set(finding.photos)) < order.photos:
        reasons.append(f"{len(set(finding.photos))} photos, {order.photos} are asked for")
    reasons += [f"photo {p.hex()[:16]}.. is not in the package" for p in finding.photos if p not in files]
    reasons += [
        f"photo {p.hex()[:16]}.. is shown for another chip too" for p in finding.photos if p in shared
    ]
    reasons += _log_reasons(order, target, finding, files, reader)
    return ChipVerdict(target, SEEN, tuple(reasons), not reasons)


def _log_reasons(
    order: WorkOrder,
    target: OrderedChip,
    finding: InspectionFinding,
    files: Mapping[bytes, bytes],
    reader: LogReader,
) -> list[str]:
    if not finding.log or not finding.evidence:
        return ["no log was extracted with a fresh nonce"]
    for name, item in (("log", finding.log), ("evidence", finding.evidence)):
        if item not in files:
            return [f"the {name} {item.hex()[:16]}.. is not in the package"]
    if hashlib.sha256(finding.key).hexdigest() != target.key:
        return [f"the device key is not the registered one, {target.key[:16] or 'none'}.."]
    try:
        key = parse_public_key(finding.key, what="device key")
    except InvalidInput as problem:
        return [str(problem)]
    log, evidence = files[finding.log], files[finding.evidence]
    return reader(log=log, evidence=evidence, key=key, chip=target.chip, nonce=order.chip_nonce(target.chip))
