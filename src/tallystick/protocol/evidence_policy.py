"""What a reader asks of evidence before it counts: whose keys, how many auditors, how much freedom (spec/evidence-bundle.md 2).

Every field must be there but one, ``judges_word``: leaving it out grants nothing. A policy that leaves something open says
so in a value; a field that this version does not know is refused, because it might ask for something.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from tallystick.commit.encoding import HASH_BYTES, Fields, parse_hex, parse_json
from tallystick.errors import InvalidInput
from tallystick.protocol.log_policy import LogPolicy, parse_log_policy
from tallystick.protocol.sample import parse_share

FORMAT = "tallystick/evidence-policy/1"
POLICY_LIMIT = 1 << 18  # bytes
ROLES = ("trainer", "auditor", "judge")

_FIELDS = (
    "auditor_quorum",
    "auditors",
    "coverage",
    "format",
    "judges",
    "log_policy",
    "model_signature",
    "most_age_days",
    "most_freedom",
    "most_steer",
    "rounding_policies",
    "trainers",
)
_JUDGES_WORD = "judges_word"


@dataclass(frozen=True)
class EvidencePolicy:
    """A reader's conditions.

    Attributes:
        roles: key id (SHA-256 of the SubjectPublicKeyInfo) to ``trainer``, ``auditor`` or ``judge``.
        auditor_quorum: how many different auditors must have found a match.
        coverage: (f, p): each of them repeated everything, or a public draw that finds a share f of false steps with
            probability p; None: everything.
        rounding_policies: accepted names.
        most_freedom, most_steer: the most that an audit may have measured.
        most_age_days: how old a counted statement may be.
        log: who must have seen the run before it was challenged; None if publication is not asked for.
        model_signature: whether the trainer must have signed the weights' files.
        judges_word: whether a judge is believed about what the record of a dispute over operators does not show: who made
            the moves that whoever lost did not sign, and what the job asks for. A dishonest judge could then invent both.
    """

    roles: dict[str, str]
    auditor_quorum: int
    coverage: tuple[Fraction, Fraction] | None
    rounding_policies: tuple[str, ...]
    most_freedom: Fraction
    most_steer: Fraction
    most_age_days: int
    log: LogPolicy | None
    model_signature: bool
    judges_word: bool = False


def parse_evidence_policy(data: bytes, *, what: str = "policy") -> EvidencePolicy:
    """Return the policy in the JSON ``data``, in any spelling.

    Raises:
        InvalidInput: not JSON, a field too few or too many, a key in two roles, or a quorum that cannot be met.
    """
    value = parse_json(data, what=what, limit=POLICY_LIMIT)
    stated = isinstance(value, dict) and _JUDGES_WORD in value
    fields = Fields(value, what=what, names=(*_FIELDS, _JUDGES_WORD) if stated else _FIELDS)
    fields.constant("format", FORMAT)
    roles: dict[str, str] = {}
    for role in ROLES:
        for key_id in fields.texts(f"{role}s"):
            parse_hex(key_id, n_bytes=HASH_BYTES, what=f"{what}: {role}s: key id")
            if key_id in roles:
                raise InvalidInput(
                    f"{what}: key {key_id[:16]}.. is {roles[key_id]} and {role}; one party, one role"
                )
            roles[key_id] = role
    quorum = fields.integer("auditor_quorum")
    auditors = sum(role == "auditor" for role in roles.values())
    if not 1 <= quorum <= auditors:
        raise InvalidInput(
            f"{what}: auditor_quorum must be 1 to {auditors}, the number of auditors, is {quorum}"
        )
    if "trainer" not in roles.values():
        raise InvalidInput(f"{what}: names no trainer")
    days = fields.integer("most_age_days")
    if not 1 <= days <= 36525:
        raise InvalidInput(f"{what}: most_age_days must be 1 to 36525, is {days}")
    lines = None if fields.value("log_policy") is None else "\n".join(fields.texts("log_policy"))
    return EvidencePolicy(
        roles=roles,
        auditor_quorum=quorum,
        coverage=_coverage(fields.value("coverage"), what),
        rounding_policies=fields.texts("rounding_policies"),
        most_freedom=_bound(fields.text("most_freedom"), f"{what}: most_freedom"),
        most_steer=_bound(fields.text("most_steer"), f"{what}: most_steer"),
        most_age_days=days,
        log=None if lines is None else parse_log_policy(lines.encode(), what=f"{what}: log_policy"),
        model_signature=fields.boolean("model_signature"),
        judges_word=stated and fields.boolean(_JUDGES_WORD),
    )


def _coverage(value: object, what: str) -> tuple[Fraction, Fraction] | None:
    if value == "whole":
        return None
    fields = Fields(value, what=f"{what}: coverage", names=("detect", "fraction"))
    fraction = parse_share(fields.text("fraction"), what=f"{what}: coverage: fraction")
    return fraction, parse_share(fields.text("detect"), what=f"{what}: coverage: detect")


def _bound(text: str, what: str) -> Fraction:
    """A bound of zero or a share as elsewhere, or a whole number, for a policy whose steer may exceed one."""
    if text.isascii() and text.isdigit() and len(text) <= 9:
        return Fraction(text)
    return parse_share(text, what=what)
