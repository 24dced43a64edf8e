"""What a reader asks of evidence: whose keys, what was to be trained, how much freedom (spec/evidence-bundle.md 2).

Every field must be there. A policy that leaves something open says so in a value; a field that this version does not know
is refused, because it might ask for something. Lines that begin with ``//`` are for people.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from tallystick.commit.encoding import HASH_BYTES, Fields, parse_hex, parse_json
from tallystick.errors import InvalidInput
from tallystick.run.sample import parse_share
from tallystick.tlog.policy import LogPolicy, parse_log_policy

FORMAT = "tallystick/evidence-policy/2"
POLICY_LIMIT = 1 << 18  # bytes
ROLES = ("trainer", "auditor", "judge")
PINS = (
    "job",
    "program",
    "data",
    "settings",
    "seed",
    "steps",
    "weights",
)  # of what a run states; null is anything
REAL_LIMITS = ("freedom", "steer", "fullest_step", "path_steer", "silenced")
WHOLE_LIMITS = ("moves", "uncompared")
LIMITS = (*REAL_LIMITS, *WHOLE_LIMITS)  # fields ``most_..``; null is anything

_FIELDS = (
    "auditor_quorum",
    "auditors",
    "coverage",
    "format",
    "judges",
    "judges_word",
    "log_policy",
    "model_signature",
    "most_age_days",
    "rounding_policies",
    "trainers",
    *PINS,
    *(f"most_{name}" for name in LIMITS),
)


@dataclass(frozen=True)
class EvidencePolicy:
    """A reader's conditions.

    Attributes:
        roles: key id (SHA-256 of the SubjectPublicKeyInfo) to ``trainer``, ``auditor`` or ``judge``.
        auditor_quorum: how many different auditors must have found a match.
        coverage: (f, p): each of them repeated everything, or a public draw that finds a share f of false steps with
            probability p; None: everything.
        rounding_policies: accepted names.
        pins: what the run must state, by one of ``PINS``; those that may be anything are left out.
        limits: the most that an audit may have measured, by one of ``LIMITS``; likewise.
        most_age_days: how old a counted statement may be.
        log: who must have seen the run before it was challenged; None if publication is not asked for.
        model_signature: whether the trainer must have signed the weights' files.
        judges_word: whether a judge is believed about what the record of a dispute over operators does not show: who made
            the moves that whoever lost did not sign, and what the job asks for. A dishonest judge could then invent both.
    """

    roles: Mapping[str, str]
    auditor_quorum: int
    coverage: tuple[Fraction, Fraction] | None
    rounding_policies: tuple[str, ...]
    pins: Mapping[str, object]
    limits: Mapping[str, Fraction]
    most_age_days: int
    log: LogPolicy | None
    model_signature: bool
    judges_word: bool


def parse_evidence_policy(data: bytes, *, what: str = "policy") -> EvidencePolicy:
    """Return the policy in the JSON ``data``, in any spelling, lines that begin with ``//`` left out.

    Raises:
        InvalidInput: not JSON, a field too few or too many, a key in two roles, or a quorum that cannot be met.
    """
    # No text of JSON goes over the end of a line, so no line of it is lost.
    lines = (b"" if line.lstrip().startswith(b"//") else line for line in data.split(b"\n"))
    value = parse_json(b"\n".join(lines), what=what, limit=POLICY_LIMIT)
    if isinstance(value, dict) and "format" in value and value["format"] != FORMAT:
        raise InvalidInput(
            f"{what}: format must be {FORMAT!r}, is {str(value['format'])[:80]!a}; tally policy init writes one"
        )
    fields = Fields(value, what=what, names=_FIELDS)
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
    log = None if fields.value("log_policy") is None else "\n".join(fields.texts("log_policy"))
    return EvidencePolicy(
        roles=roles,
        auditor_quorum=quorum,
        coverage=_coverage(fields.value("coverage"), what),
        rounding_policies=fields.texts("rounding_policies"),
        pins=_pins(fields, what),
        limits=_limits(fields, what),
        most_age_days=days,
        log=None if log is None else parse_log_policy(log.encode(), what=f"{what}: log_policy"),
        model_signature=fields.boolean("model_signature"),
        judges_word=fields.boolean("judges_word"),
    )


NOBODY = {"trainer": "0" * 64, "auditor": "f" * 64}  # no key has these ids: what is left so accepts nothing

_TEMPLATE: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "Whose signatures count, by key id (tally key show FILE.pub). Get the keys from\n"
        "their owners, not beside the bundle. The key of model.sig is one of trainers.",
        ("trainers", "auditors", "judges"),
    ),
    ("How many different auditors must have found a match.", ("auditor_quorum",)),
    (
        'Each of them repeated everything: "whole". Or a public draw that finds a share\n'
        'of false steps with some probability: {"fraction": "0.01", "detect": "0.99"}.',
        ("coverage",),
    ),
    ("How old a counted audit may be, in days.", ("most_age_days",)),
    (
        "What the run must state, exactly; null asks for nothing. program and data are\n"
        "SHA-256, weights is the root digest; tally verify BUNDLE prints all of them.",
        ("job", "program", "data", "settings", "seed", "steps", "weights"),
    ),
    ("Which rounding policies: fp64, fp32, bf16, leaf.", ("rounding_policies",)),
    (
        "The most that an audit may have measured, as tally audit prints it. Decimal text:\n"
        "share of roundings that a log could choose, steer of one step's gradient, share of\n"
        "its budget that a step used, path of all moves over the distance trained, share of\n"
        "parameters silenced. Whole numbers: roundings and decisions moved; parameters that\n"
        "do not begin, bit for bit, as the job builds them. null asks for nothing.",
        tuple(f"most_{name}" for name in LIMITS),
    ),
    (
        "Who must have seen the run before it was challenged: lines of a tlog-policy, such\n"
        'as "log VKEY", "witness W VKEY", "quorum W"; null asks for no publication.',
        ("log_policy",),
    ),
    ("Whether the trainer must have signed the weights' files (model.sig).", ("model_signature",)),
    (
        "Whether a judge is believed about what the record of a dispute does not show.",
        ("judges_word",),
    ),
)
_ASKED: Mapping[str, object] = {
    "auditor_quorum": 1,
    "coverage": "whole",
    "most_age_days": 365,
    "rounding_policies": ["fp64", "fp32"],
    "most_freedom": "0.25",  # models of a few hundred parameters come to 0.16: their quanta are finer (ADR 26.36)
    "most_steer": "0.05",
    "most_fullest_step": "1",
    "most_path_steer": "0.05",
    "most_silenced": "0.05",
    "most_uncompared": 0,
    "model_signature": False,
    "judges_word": False,
}


def policy_template(
    roles: Mapping[str, str], stated: Mapping[str, object] | None = None, notes: Sequence[str] = ()
) -> str:
    """Return an evidence policy with a comment about every field; it parses again.

    Args:
        roles: key id to role. Where no trainer or no auditor is among them, a key id that nobody has stands in.
        stated: what a run states, by the names of ``PINS``, and ``policy``: pinned; otherwise nothing is.
        notes: lines for people, put on top.
    """
    values: dict[str, object] = dict.fromkeys(_FIELDS) | dict(_ASKED)
    for role in ROLES:
        held = [key_id for key_id, each in roles.items() if each == role]
        values[f"{role}s"] = held or [NOBODY[role] for _ in range(role in NOBODY)]
    if stated is not None:
        values |= {name: stated[name] for name in PINS} | {"rounding_policies": [stated["policy"]]}
    lines = [
        "// What tally verify BUNDLE --policy FILE asks for (spec/evidence-bundle.md 2).",
        "// Every field must be there; lines that begin with // are for people.",
        *(f"// {note}" for note in notes),
        "{",
        f'  "format": {json.dumps(FORMAT)}',
    ]
    for comment, names in _TEMPLATE:
        lines[-1] += ","
        lines += ["", *(f"  // {line}" for line in comment.split("\n"))]
        for role in NOBODY:
            if f"{role}s" in names and role not in roles.values():
                lines.append(
                    f"  // Nobody has the key of {role}s below: with it, no bundle is accepted. Replace it."
                )
        lines += [f"  {json.dumps(name)}: {json.dumps(values[name])}," for name in names]
        lines[-1] = lines[-1].removesuffix(",")
    return "\n".join([*lines, "}", ""])


def _pins(fields: Fields, what: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for name in PINS:
        if fields.value(name) is None:
            continue
        if name in ("program", "data", "weights"):
            parse_hex(fields.text(name), n_bytes=HASH_BYTES, what=f"{what}: {name}")
        if name in ("seed", "steps"):
            found[name] = fields.integer(name)
        else:
            found[name] = fields.text_mapping(name) if name == "settings" else fields.text(name)
    return found


def _limits(fields: Fields, what: str) -> dict[str, Fraction]:
    found: dict[str, Fraction] = {}
    for name in LIMITS:
        field = f"most_{name}"
        if fields.value(field) is None:
            continue
        if name in REAL_LIMITS:
            found[name] = _bound(fields.text(field), f"{what}: {field}")
        elif (number := fields.integer(field)) >= 0:
            found[name] = Fraction(number)
        else:
            raise InvalidInput(f"{what}: {field} must be 0 or more, is {number}")
    return found


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
