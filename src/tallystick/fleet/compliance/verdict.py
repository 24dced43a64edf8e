"""What was found of each rule, and the verdict over all of them: pass, fail or unknown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from tallystick.fleet.compliance.rules import (
    Rule,
    Rules,
)
from tallystick.fleet.provenance.verification import Answer


def worst(answers: Iterable[Answer]) -> Answer:
    """Return ``fail`` if one fails, else ``unknown`` if one is, else ``pass``."""
    found = set(answers)
    return "fail" if "fail" in found else "unknown" if "unknown" in found else "pass"


@dataclass(frozen=True)
class RuleObservation:
    """What one run or chip says of a rule: ``subject`` names it, ``text`` has both values."""

    subject: str
    answer: Answer
    text: str


@dataclass(frozen=True)
class RuleVerdict:
    """One rule: its answer about what was declared, with every observation and what the answer leaves out."""

    rule: Rule
    answer: Answer
    observations: tuple[RuleObservation, ...]

    def fields(self) -> dict[str, object]:
        """Return the verdict as JSON."""
        return {
            "id": self.rule.id,
            "kind": self.rule.kind,
            "answer": self.answer,
            "needs": list(self.rule.needs),
            "observations": [asdict(each) for each in self.observations],
            "excluded": self.rule.excluded,
        }


@dataclass(frozen=True)
class RulesVerdict:
    """Whether what was declared keeps the rules, and three answers on how far that reaches; they stay apart.

    Attributes:
        correct: the declared runs took place as declared.
        complete: the snapshots shown belong to declared runs.
        fleet: no chip is missing; ``reasons`` says why this answer.
        verdicts: every rule's own answer, about what was declared and shown.
        excluded: what none of the answers covers.
    """

    rules: Rules
    owner: str
    correct: Answer
    complete: Answer
    fleet: Answer
    assurance: str
    verdicts: tuple[RuleVerdict, ...]
    reasons: tuple[str, ...]
    excluded: tuple[str, ...]

    @property
    def kept(self) -> Answer:
        """Whether what was declared and shown keeps every rule."""
        return worst(each.answer for each in self.verdicts)

    def asked(self, claims: Sequence[str]) -> Answer:
        """Return the worst of the rules' answers and those of the claims named ``runs``, ``complete`` and ``fleet``."""
        answers: dict[str, Answer] = {"runs": self.correct, "complete": self.complete, "fleet": self.fleet}
        return worst([self.kept, *(answers[claim] for claim in claims)])

    def fields(self) -> dict[str, object]:
        """Return the verdict as JSON."""
        return {
            "rules": self.rules.name,
            "rules_digest": self.rules.digest,
            "owner": self.owner,
            "rules_kept": self.kept,
            "declared_run_correctness": self.correct,
            "declared_run_completeness": self.complete,
            "fleet_completeness": self.fleet,
            "assurance": self.assurance,
            "verdicts": [each.fields() for each in self.verdicts],
            "fleet_reasons": list(self.reasons),
            "excluded": list(self.excluded),
        }
