"""Reads the log that a chip's agent wrote, as an inspection brought it home; pure.

    read = ChipLogReader(earlier={ueid: [journal of the last inspection]})
    read(log=journal, evidence=token, key=device_key, chip=ueid, nonce=nonce)     # what is wrong, in words

The log is the bytes of ``log.journal``, the evidence what ``tally chip attest`` signed for the chip's nonce: an attestation
of the log's last record (spec/chip-log.md 6). What may follow that record was appended while the file was copied, and is
held to the same rules. What was kept of the chip before convicts a log that went back since.

Not promised: that the memory behind the snapshots is a declared run's; that is for the matcher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tallystick.errors import InvalidInput, Mismatch
from tallystick.fleet.agent.chip_log import LogLimits, read_log, verify_log
from tallystick.fleet.agent.chip_record import Genesis, LoggedRecord
from tallystick.fleet.attestation.assurance import Attestation, parse_attestation
from tallystick.fleet.inspection.judging import InspectionVerdict
from tallystick.signing.keys import PublicKey, parse_public_key
from tallystick.store.journal import parse_journal


@dataclass(frozen=True)
class ChipLogReader:
    """A ``LogReader`` for journals of chips.

    Attributes:
        earlier: by chip (UEID in hexadecimal), journals brought home before.
        limits: what is tolerated in a log.
    """

    earlier: Mapping[str, Sequence[bytes]] = field(default_factory=dict[str, Sequence[bytes]])
    limits: LogLimits = field(default_factory=LogLimits)

    def __call__(self, *, log: bytes, evidence: bytes, key: PublicKey, chip: str, nonce: bytes) -> list[str]:
        """Return what is wrong with the log, in words. What cannot be told is wrong too: unclear never passes."""
        reasons: list[str] = []
        try:
            attested = parse_attestation(evidence, key, nonce)
        except (InvalidInput, Mismatch) as problem:
            return [f"evidence: {problem}"]
        if attested.ueid.hex() != chip:
            reasons.append(f"evidence: is of chip {attested.ueid.hex()}, {chip} was asked for")
        try:
            records = _records_of(log, key, reasons)
        except InvalidInput as problem:
            return [*reasons, f"log: {problem}"]
        if records and (stated := records[0].record.ueid.hex()) != chip:
            reasons.append(f"log: is of chip {stated}, {chip} was asked for")
        genesis = records[0].record.event if records else None
        if isinstance(genesis, Genesis) and genesis.agent != attested.agent:
            reasons.append(
                f"evidence: speaks for a {attested.agent[:40]} agent, the log is a {genesis.agent} agent's"
            )
        others: list[Sequence[LoggedRecord]] = []
        for number, journal in enumerate(self.earlier.get(chip, ())):
            try:
                others.append(_records_of(journal, key, reasons, what=f"earlier log {number}"))
            except InvalidInput as problem:
                reasons.append(f"earlier log {number}: {problem}")
        found = verify_log(records, known=[attested.head], others=others, limits=self.limits)
        reasons += [
            f"log: rule {each.rule}, {each.name}: {each.text}{' (cannot be told)' if each.severity == 'unknown' else ''}"
            for each in found
            if each.severity != "note"
        ]
        return reasons


def attested_chips(verdict: InspectionVerdict, files: Mapping[bytes, bytes]) -> dict[str, Attestation]:
    """Return what the chips that passed an inspection attested there, by UEID: heads that their logs must go on from.

    ``files`` are the package's, by SHA-256.
    """
    findings = {finding.chip: finding for finding in verdict.result.findings}
    found: dict[str, Attestation] = {}
    for chip in verdict.chips:
        if chip.passed:
            name, finding = chip.target.chip, findings[chip.target.chip]
            key = parse_public_key(finding.key, what=f"device key of {name}")
            found[name] = parse_attestation(files[finding.evidence], key, verdict.order.chip_nonce(name))
    return found


def _records_of(
    journal: bytes, key: PublicKey, reasons: list[str], *, what: str = "log"
) -> list[LoggedRecord]:
    """Return the journal's records that ``key`` signed; what else is in it goes to ``reasons``."""
    held = parse_journal(journal, what=what)
    if held.broken_at is not None:
        how = "ends in the middle of a record" if held.is_tail else "is damaged"
        reasons.append(f"{what}: {how} at byte {held.broken_at}, after {len(held.records)} whole records")
    records, findings = read_log(held.records, key)
    reasons += [f"{what}: rule {each.rule}, {each.name}: {each.text}" for each in findings]
    return records
