"""What a judge finds of one step, and what it rests on."""

from __future__ import annotations

from dataclasses import dataclass

from tallystick.dispute.terms import Ruling
from tallystick.dispute.verdict import LogObjection, Pair
from tallystick.roles.audit_report import EVIDENCE, FINGERPRINT, Deviation
from tallystick.run.proofs import StepProof

CANNOT = "cannot_reproduce"
NOT_PROVEN = "not_proven"


@dataclass(frozen=True)
class StepFinding:
    """A ruling on a step, and what it rests on: ``records`` or ``objection`` where both parties have the same states around it.

    ``chain`` is the trainer's record where the step was repeated from the state that the trainer alone claims before it.
    """

    step: int
    ruling: Ruling
    outcome: str
    records: Pair | None = None
    objection: LogObjection | None = None
    chain: StepProof | None = None

    @property
    def decides(self) -> bool:
        """Whether it ends the dispute, whatever the states show: it convicts the trainer, or the auditor of its own record.

        One that blames nobody must not keep a false state from being judged.
        """
        return self.ruling.loser == "trainer" or (self.ruling.loser == "auditor" and self.records is not None)


def contradiction(step: int, problem: str, whose: str) -> Deviation:
    """Return that bytes show a party's committed state to be another one than what it committed to beside it."""
    return Deviation(step, "mismatch", EVIDENCE, None, problem, whose, "committed state")


def other_state(step: int, own: str, stated: str) -> Deviation:
    """Return that a party claims another state after a step than ``own``."""
    return Deviation(step, "mismatch", FINGERPRINT, None, own, stated, "fingerprint")
