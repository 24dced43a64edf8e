"""What a judge finds of one step, and what it rests on."""

from __future__ import annotations

from dataclasses import dataclass

from tallystick.dispute.terms import Ruling
from tallystick.dispute.verdict import LogObjection, Pair
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
