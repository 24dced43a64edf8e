"""A bundle without torch: a run of letters for states, statements by every party, and every way they can be wrong."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tallystick.commit.encoding import canonical_json, hex_float
from tallystick.commit.merkle import inclusion_proof, leaf_hash
from tallystick.commit.merkle import root as merkle_root
from tallystick.commit.state import Entry, summarise
from tallystick.dispute.bisection import Claim, Level, apply, open_game
from tallystick.dispute.objections import Objection
from tallystick.dispute.openings import Opening
from tallystick.dispute.operator_game import Answered, Committed, Handed, Move, Opened, Revealed
from tallystick.dispute.operator_list import OpenedLeaf, OperatorList
from tallystick.dispute.record import (
    DisputeRecord,
    StepsGame,
    handed_digest,
    parse_dispute,
    record_base,
    signed_claims,
    verify_dispute,
)
from tallystick.dispute.signed_moves import Terms, claims_of, move_envelope, sign_move
from tallystick.dispute.terms import PARTIES, Party
from tallystick.dispute.verdict import LogObjection, Verdict
from tallystick.errors import InvalidInput
from tallystick.evidence.bundle import Bundle, Member, make_bundle, named
from tallystick.evidence.bundle_checks import equivocation
from tallystick.evidence.bundle_checks import statements as statement_checks
from tallystick.evidence.bundle_verifier import CHECKS, verify_bundle
from tallystick.evidence.policy import (
    FORMAT,
    LIMITS,
    PINS,
    EvidencePolicy,
    parse_evidence_policy,
    policy_template,
)
from tallystick.evidence.verification import Verification
from tallystick.reports.card import verification_card
from tallystick.reports.verification import verification_page
from tallystick.run.claims import read_claim
from tallystick.run.documents import (
    JobRecord,
    PolicyRecord,
    RunStatement,
    SiteRecord,
    Specification,
    StepRecord,
)
from tallystick.run.sample import LogPosition, SegmentDraw, announce, draw_segments
from tallystick.run.statements import (
    AuditClaim,
    FirstState,
    MeasuredFreedom,
    RunIdentity,
    Uncompared,
    VerdictClaim,
    audit_statement,
    provenance_statement,
    verdict_statement,
)
from tallystick.run.transcript import Transcript
from tallystick.signing.dsse import (
    PAYLOAD_TYPE,
    Envelope,
    Statement,
    parse_statement,
    pre_authentication_encoding,
    sign_statement,
)
from tallystick.signing.keys import SigningKey, ed25519_key, generate_key
from tallystick.signing.model_signature import Manifest, sign_model
from tallystick.signing.note import COSIGNATURE, NOTE, Note, NoteKey, NoteSigner
from tallystick.store.models import weights_manifest
from tallystick.store.tensor_files import STATE_METADATA, weights_pieces
from tallystick.tlog.publication import entry_of
from tallystick.tlog.tree import LogProof, checkpoint_text, parse_checkpoint

VECTORS = Path(__file__).resolve().parents[3] / "vectors"
DAY = 86400
PUBLISHED, AUDITED, NOW = 1_800_000_000, 1_800_000_000 + DAY, 1_800_000_000 + 2 * DAY
STEPS, EVERY = 16, 4
JUDGES_WORD = "the judge's word, which repeating the step tests"


def letter(step: int, side: str) -> str:
    return hashlib.sha256(f"{side}{step}".encode()).hexdigest()


def run(
    side: str = "t",
    *,
    parts_at: int = STEPS + 1,
    until: int = STEPS,
    steps: int = STEPS,
    loss: str | None = None,
) -> Transcript:
    """A run whose states after step ``parts_at`` up to ``until`` are its side's own, and everybody's elsewhere.

    ``loss`` is what its record of step 5 says.
    """
    state = [letter(i, side if parts_at < i <= until else "common") for i in range(steps + 1)]
    specification = Specification(
        job=JobRecord("jobs/letters.py", "11" * 32, {}, None),
        policy=PolicyRecord("fp64", {"precision": 24}),
        seed=1, steps=steps, checkpoint_every=EVERY, accumulation=1, world_size=1,
        initial_state=state[0], versions={"torch": "2.13.0"}, sites=(),
    )  # fmt: skip
    records = tuple(
        StepRecord(
            step=i, rank=0, micro_batches=1, batch="22" * 32, log="33" * 32, log_bytes=0, loss=loss if i == 5 else None,
            schedule=(), skipped=False, fingerprint=state[i + 1][:16],
            state_root=state[i + 1] if specification.is_checkpoint(i) else None,
        )
        for i in range(steps)
    )  # fmt: skip
    return Transcript(specification, records)


MODEL = Manifest({"model.safetensors": "44" * 32})
TRAINER, AUDITOR, SECOND, JUDGE = (ed25519_key(bytes([n]) * 32) for n in (1, 2, 3, 4))
OMS = generate_key("ecdsa-p256")
LOG_KEY, W1, W2 = (ed25519_key(bytes([n]) * 32) for n in (11, 12, 13))
LOG = NoteSigner(NoteKey("log.example/runs", NOTE, LOG_KEY.public_key), LOG_KEY)
WITNESSES = [
    NoteSigner(NoteKey(f"w{n}.example", COSIGNATURE, key.public_key), key) for n, key in ((1, W1), (2, W2))
]
HONEST = run()
IDENTITY = RunIdentity(HONEST.statement(), HONEST.specification.digest().hex(), MODEL.root_digest())


FREEDOM = MeasuredFreedom(
    fraction=2.0**-20, largest_steer=2.0**-20, largest_move=0.0, fullest_step=0.5, path_steer=2.0**-10, moves=3, silenced=0
)  # fmt: skip
NONE = Uncompared(0, 0, ())
FIRST = FirstState(100, NONE, NONE)


def policy(**changes: Any) -> EvidencePolicy:
    return parse_evidence_policy(policy_json(**changes))


def policy_json(**changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "format": FORMAT,
        "trainers": [TRAINER.public_key.key_id, OMS.public_key.key_id],
        "auditors": [AUDITOR.public_key.key_id, SECOND.public_key.key_id],
        "judges": [JUDGE.public_key.key_id],
        "auditor_quorum": 1,
        "coverage": "whole",
        "rounding_policies": ["fp64"],
        **dict.fromkeys((*PINS, *(f"most_{limit}" for limit in LIMITS))),
        "most_freedom": "0.001",
        "most_steer": "0.001",
        "judges_word": False,
        "most_age_days": 30,
        "log_policy": [
            f"log {LOG.key}", f"witness A {WITNESSES[0].key}", f"witness B {WITNESSES[1].key}",
            "group both all A B", "quorum both",
        ],
        "model_signature": True,
    }  # fmt: skip
    return json.dumps({**fields, **changes}).encode()


def key_member(key: SigningKey) -> Member:
    return Member("key", key.public_key.key_id, key.public_key.spki)


def statement_member(statement: Statement, key: SigningKey) -> Member:
    data = sign_statement(statement, key)
    return named("statement", data)


def provenance(key: SigningKey = TRAINER, transcript: Transcript = HONEST, **changes: Any) -> Member:
    identity = RunIdentity(
        transcript.statement(), transcript.specification.digest().hex(), MODEL.root_digest()
    )
    made = provenance_statement(
        transcript.specification, replace(identity, **changes), at=PUBLISHED, version="0"
    )
    return statement_member(made, key)


def audit(key: SigningKey = AUDITOR, **changes: Any) -> Member:
    return statement_member(audit_of(**changes), key)


def audit_of(**changes: Any) -> Statement:
    claim = AuditClaim(
        identity=IDENTITY, at=AUDITED, result="match", segments=((0, STEPS),), draw=None, policy="fp64",
        profile="avx2", freedom=FREEDOM, beginning=FIRST,
    )  # fmt: skip
    return audit_statement(replace(claim, **changes), details={}, version="0")


def run_member(transcript: Transcript) -> Member:
    return Member("run", transcript.statement().root, transcript.statement().encode())


def log_proofs(
    *documents: bytes, seen: int = PUBLISHED, witnesses: Sequence[NoteSigner] = WITNESSES
) -> list[Member]:
    leaves = [leaf_hash(entry_of(document).encode()) for document in documents]
    note = LOG.sign(Note(checkpoint_text("log.example/runs", len(leaves), merkle_root(leaves))))
    for witness in witnesses:
        note = witness.sign(note, now=seen)
    tree = parse_checkpoint(note.encode())
    return [
        Member(
            "log-proof",
            entry_of(document).digest,
            LogProof(i, tuple(inclusion_proof(leaves, i)), tree).encode(),
        )
        for i, document in enumerate(documents)
    ]


def about(transcript: Transcript = HONEST) -> list[Member]:
    return [
        run_member(transcript),
        named("specification", transcript.specification.encode()),
        named("specification-proof", transcript.prove_specification().encode()),
    ]


def honest() -> dict[str, list[Member]]:
    """The members of an honest bundle by what they are for."""
    return {
        "keys": [key_member(key) for key in (TRAINER, AUDITOR, OMS)],
        "run": about(),
        "provenance": [provenance()],
        "audit": [audit()],
        "model": [named("model-signature", sign_model(MODEL, "m", OMS))],
        "log": log_proofs(HONEST.statement().encode()),
    }


@dataclass(frozen=True)
class Result:
    verdict: str
    failed: int | None
    why: str
    finding: str


def check(
    parts: dict[str, list[Member]],
    rules: EvidencePolicy | None = None,
    *,
    now: int = NOW,
    model: Manifest | None = None,
) -> Result:
    rules = policy() if rules is None else rules
    data = make_bundle(member for members in parts.values() for member in members).encode()
    return result_of(data, rules, now=now, model=model)


def result_of(
    data: bytes, rules: EvidencePolicy | None, *, now: int = NOW, model: Manifest | None = None
) -> Result:
    found = verify_bundle(data, rules, now=now, model=model)
    assert [c.claim for c in found.checks] == [claim for claim, _ in CHECKS]
    failed = next((c for c in found.checks if c.outcome == "failed"), None)
    return Result(
        found.verdict, failed and failed.number, failed.detail if failed else "", str(found.finding)
    )


def test_an_honest_bundle_is_accepted() -> None:
    found = check(honest(), model=MODEL)
    assert found == Result("match", None, "", "trained as stated")


def test_without_a_policy_nothing_is_accepted() -> None:
    data = make_bundle(m for members in honest().values() for m in members).encode()
    found = result_of(data, None)
    assert (found.verdict, found.failed, found.finding) == ("unjudged", None, "nothing is accepted")


def test_the_same_members_make_the_same_file_in_any_order() -> None:
    members = [m for part in honest().values() for m in part]
    assert make_bundle(members).encode() == make_bundle(reversed(members)).encode()


Change = Callable[[dict[str, list[Member]]], object]


def drop(part: str) -> Change:
    return lambda parts: parts.pop(part)


def put(part: str, *members: Member) -> Change:
    return lambda parts: parts.__setitem__(part, list(members))


def extend(part: str, *members: Member) -> Change:
    return lambda parts: parts[part].extend(members)


def keys(*more: SigningKey) -> Change:
    return extend("keys", *(key_member(key) for key in more))


OTHER = run("x", parts_at=0)
OTHER_MODEL = Manifest({"model.safetensors": "45" * 32})
RENAMED_MODEL = Manifest({"__init__.py": "44" * 32})  # of the same root digest


@pytest.mark.parametrize(
    ("changes", "rules", "failed", "why"),
    [
        ([drop("keys")], {}, 2, "is signed by 0 keys"),
        ([drop("audit")], {}, 12, "0 auditors count, the policy asks for 1"),
        ([drop("provenance")], {}, 5, "must hold one trainer's provenance, holds 0"),
        ([drop("log")], {}, 7, "log proof is missing"),
        ([drop("model")], {}, 6, "model.sig is missing"),
        ([put("run", run_member(HONEST))], {}, 5, "specification or the proof"),
        ([put("provenance"), put("audit")], {}, 2, "holds no statement"),
        ([keys(SECOND), put("audit", audit(SECOND))], {"auditors": [AUDITOR.public_key.key_id]}, 3, "is nobody in the policy"),
        ([put("audit", audit(TRAINER))], {}, 3, "is a auditor's, its signer .* is trainer"),
        ([keys(JUDGE), put("provenance", provenance(JUDGE))], {}, 3, "is a trainer's, its signer .* is judge"),
        ([], {"auditor_quorum": 2}, 12, "1 auditors count, the policy asks for 2"),
        ([extend("audit", audit(at=AUDITED + 1))], {"auditor_quorum": 2}, 12, "1 auditors count"),
        ([put("audit", audit(result="cannot_reproduce"))], {}, 12, "its result is cannot_reproduce"),
        ([put("audit", audit(segments=((0, 8),)))], {}, 12, "it covers 8 of 16 steps"),
        ([put("audit", audit(segments=((0, 8),)))], {"coverage": {"fraction": "0.5", "detect": "0.5"}}, 12, "chosen, not drawn"),
        ([put("audit", audit(freedom=replace(FREEDOM, fraction=0.5)))], {}, 12, "freedom 0.5 exceeds most_freedom 0.001"),
        ([put("audit", audit(freedom=replace(FREEDOM, largest_steer=1.5)))], {}, 12, "steer 1.5 exceeds most_steer 0.001"),
        ([put("audit", audit(policy="bf16"))], {}, 12, 'rounding policy "bf16" is not accepted'),
        ([put("audit", audit(at=NOW + DAY))], {}, 12, "which is to come"),
        ([put("audit", audit(at=PUBLISHED - 1))], {}, 7, "the run was published at"),
        ([put("log", *log_proofs(HONEST.statement().encode(), witnesses=WITNESSES[:1]))], {}, 7, "quorum 'both' is not met"),
        ([put("log", *log_proofs(OTHER.statement().encode()))], {}, 2, "is about no document"),
        ([put("model", named("model-signature", sign_model(OTHER_MODEL, "m", OMS)))], {}, 6, "root digest is"),
        ([put("model", named("model-signature", sign_model(RENAMED_MODEL, "m", OMS)))], {}, 6, "model.sig: has '__init__.py'"),
        ([put("model", named("model-signature", sign_model(MODEL, "m", generate_key("ecdsa-p256"))))], {}, 6,
         "is not signed by any of the 2 keys"),
        ([put("audit", audit(identity=replace(IDENTITY, weights="55" * 32)))], {}, 5, "weights are 55"),
        ([put("audit", audit(identity=replace(IDENTITY, run=OTHER.statement())))], {}, 5, "is about run"),
        ([put("run", *about(OTHER), run_member(HONEST))], {}, 5, "leads to root"),
        ([put("audit", audit(result="not_accepted"))], {}, 12, "its result is not_accepted"),
        ([put("audit", audit(result="mismatch"))], {}, 11, "found a mismatch, and no judge has ruled"),
        ([extend("audit", audit(SECOND, result="log_violation")), keys(SECOND)], {}, 11, "found a log_violation"),
    ],
)  # fmt: skip
def test_what_is_missing_or_wrong_is_never_a_pass(
    changes: list[Change], rules: dict[str, Any], failed: int, why: str
) -> None:
    import re

    parts = honest()
    for change in changes:
        change(parts)
    found = check(parts, policy(**rules))
    assert (found.verdict, found.failed) == ("mismatch", failed)
    assert re.search(why, found.why)
    assert found.finding != "trained as stated"


def test_old_evidence_does_not_count_and_other_files_are_not_the_model() -> None:
    assert check(honest(), now=AUDITED + 31 * DAY).why.endswith("31 days old, accepted are 30")
    assert "model: root digest is" in check(honest(), model=OTHER_MODEL).why
    assert "model: has '__init__.py', the result is one file" in check(honest(), model=RENAMED_MODEL).why


def test_two_auditors_make_a_quorum_of_two() -> None:
    parts = honest()
    keys(SECOND)(parts)
    parts["audit"].append(audit(SECOND, profile="cuda"))
    assert check(parts, policy(auditor_quorum=2)).verdict == "match"


def test_a_match_and_a_stricter_limit_are_no_two_answers() -> None:
    """What is not accepted depends on limits, which an auditor may ask for once and not another time."""
    parts = honest()
    parts["audit"].append(audit(result="not_accepted"))
    assert check(parts).verdict == "match"


def test_who_does_not_accept_does_not_count_and_accuses_nobody() -> None:
    parts = honest()
    keys(SECOND)(parts)
    parts["audit"].append(audit(SECOND, result="not_accepted"))
    assert check(parts).verdict == "match"
    found = check(parts, policy(auditor_quorum=2))
    assert (found.verdict, found.failed) == ("mismatch", 12)
    assert "its result is not_accepted" in found.why
    assert "accused" not in found.finding


@pytest.mark.parametrize("one", ["mismatch", "log_violation"])
def test_what_followed_in_every_byte_did_not_differ(one: str) -> None:
    parts = honest()
    parts["audit"] = [audit(result="not_accepted"), audit(result=one)]
    found = check(parts)
    assert (found.verdict, found.failed) == ("mismatch", 4)
    assert found.finding.startswith("equivocation: ")


@pytest.mark.parametrize(
    ("members", "what"),
    [
        ([audit(result="mismatch")], "results match and mismatch for the same steps"),
        ([audit(result="mismatch", segments=((4, 8),))], "results match and mismatch for the same steps"),
        ([provenance(transcript=OTHER)], "runs"),
        ([provenance(weights="55" * 32)], "weights"),
    ],
)
def test_two_answers_of_one_key_are_evidence_by_themselves(members: list[Member], what: str) -> None:
    parts = honest()
    parts["audit"] += members
    found = check(parts)
    assert (found.verdict, found.failed) == ("mismatch", 4)
    assert what in found.why
    assert found.finding.startswith("equivocation: ")


def test_a_trainer_with_two_runs_of_one_order_contradicts_itself() -> None:
    late = run("x", parts_at=9)
    parts = honest()
    parts["provenance"].append(provenance(transcript=late))
    found = check(parts)
    assert found.failed == 4
    assert found.finding == f"equivocation: trainer {TRAINER.public_key.key_id} signed two answers"
    data = make_bundle(m for members in parts.values() for m in members).encode()
    assert result_of(data, None).failed == 4


def test_a_log_with_two_trees_of_one_size_is_exposed() -> None:
    other = log_proofs(OTHER.statement().encode())[0]
    note = parse_checkpoint(other.data.partition(b"\n\n")[2]).note.encode()
    parts = honest()
    parts["log"].append(named("checkpoint", note))
    found = check(parts)
    assert found.failed == 4
    assert found.finding == "equivocation: log log.example/runs signed two trees of 1 entries"


def without_weights(**changes: Any) -> Member:
    """An audit's statement of which the subject ``weights`` is taken away: no writer makes one."""
    whole = audit_of(**changes)
    return statement_member(replace(whole, subject=whole.subject[:1]), AUDITOR)


@pytest.mark.parametrize("changes", [{}, {"result": "not_accepted"}, {"segments": ((12, STEPS),)}])
@pytest.mark.parametrize("weights", [MODEL.root_digest(), "ee" * 32])
def test_an_audit_of_the_end_without_weights_is_malformed(changes: dict[str, Any], weights: str) -> None:
    parts = honest()
    parts["provenance"], parts["audit"] = [provenance(weights=weights)], [without_weights(**changes)]
    found = check(parts, policy(model_signature=False, weights=weights))
    assert (found.verdict, found.failed) == ("malformed", 2)
    what = f"result {changes.get('result', 'match')} up to the run's end, step 16, must name the weights, names none"
    assert what in found.why
    with pytest.raises(InvalidInput, match="must name the weights"):
        audit(identity=replace(IDENTITY, weights=None), **changes)


def test_an_accusation_may_lack_weights() -> None:
    parts = honest()
    parts["audit"].append(audit(SECOND, identity=replace(IDENTITY, weights=None), result="mismatch"))
    keys(SECOND)(parts)
    assert check(parts).failed == 11


# ---------------------------------------------------------------------------------------- samples


def drawn(log: LogPosition | None = None, beacon_time: int = PUBLISHED + 600) -> SegmentDraw:
    statement = HONEST.statement()
    announcement = announce(
        run_root=bytes.fromhex(statement.root), tree_size=statement.tree_size, steps=STEPS, checkpoint_every=EVERY,
        fraction="0.5", detect="0.8", log=log, beacon=("drand/quicknet", 41, beacon_time),
    )  # fmt: skip
    return draw_segments(announcement, b"\x33" * 32)


def sampled(log: LogPosition | None, seen: int = PUBLISHED, **changes: Any) -> dict[str, list[Member]]:
    parts = honest()
    draw = drawn(log)
    parts["log"] = log_proofs(HONEST.statement().encode(), draw.announcement.encode(), seen=seen)
    parts["audit"] = [audit(segments=draw.segments, draw=draw, **changes)]
    return parts


POSITION = LogPosition("log.example/runs", 1, b"\x66" * 32, PUBLISHED)
SAMPLE_RULES = {"coverage": {"fraction": "0.5", "detect": "0.8"}}


def test_a_sample_that_was_announced_before_its_beacon_counts() -> None:
    assert check(sampled(POSITION), policy(**SAMPLE_RULES)).verdict == "match"


def test_a_weak_late_or_unpublished_sample_does_not() -> None:
    strict = {"coverage": {"fraction": "0.25", "detect": "0.8"}}
    assert "finds a share 0.25 with probability 0.5" in check(sampled(POSITION), policy(**strict)).why
    assert "it covers 8 of 16 steps" in check(sampled(POSITION), policy()).why
    assert "were published before the beacon spoke" in check(sampled(None), policy(**SAMPLE_RULES)).why
    late = check(sampled(POSITION, seen=PUBLISHED + 600), policy(**SAMPLE_RULES))
    assert (late.failed, "was announced at" in late.why) == (8, True)
    early = check(sampled(POSITION, at=PUBLISHED + 599), policy(**SAMPLE_RULES))
    assert "is older than its beacon" in early.why


@pytest.mark.parametrize("weights", [MODEL.root_digest(), "ee" * 32, None])
def test_a_sample_that_names_no_weights_does_not_count(weights: str | None) -> None:
    """The provenance alone would say which weights the bundle is about."""
    draw = next(
        each for n in range(256) if (each := draw_segments(drawn(POSITION).announcement, bytes([n]) * 32)).segments[-1][1] < STEPS
    )  # fmt: skip
    parts = sampled(POSITION)
    parts["provenance"] = [provenance(weights=weights)]
    lacking = replace(IDENTITY, weights=None)
    parts["audit"] = [audit(identity=lacking, segments=draw.segments, draw=draw)]
    del parts["model"]
    found = check(parts, policy(**SAMPLE_RULES, model_signature=False, weights=weights))
    assert (found.verdict, found.failed) == ("mismatch", 12)
    assert "it names no weights" in found.why


def test_a_sample_of_other_segments_than_its_draw_is_refused() -> None:
    draw = drawn(POSITION)
    others = tuple(s for s in ((0, 4), (4, 8), (8, 12), (12, 16)) if s not in draw.segments)
    parts = honest()
    parts["audit"] = [audit(segments=others, draw=draw)]
    found = check(parts, policy(**SAMPLE_RULES))
    assert (found.failed, "the draw is of other segments" in found.why) == (2, True)


# --------------------------------------------------------------------------------------- disputes


def verdict_of(
    trainer: Transcript, auditor: Transcript, loser: str, *, parts_at: int = 9, until: int = STEPS
) -> Verdict:
    """Play the game over letters and return what the judge writes."""
    last = until // EVERY * EVERY
    game = open_game(
        [Level("checkpoints", range(0, last + 1, EVERY)), Level("steps", range(last + 1))],
        agreed=bytes.fromhex(letter(0, "common")),
        trainer=bytes.fromhex(letter(last, "t")),
        auditor=bytes.fromhex(letter(last, "a")),
    )
    while (at := game.midpoint) is not None:
        for party in PARTIES:
            own = party[0] if parts_at < at <= until else "common"
            game = apply(game, Claim(party, at, bytes.fromhex(letter(at, own))))
    return Verdict(
        loser=loser, outcome="fault", reason="step 9: another batch", step=game.agreed, rounds=4,
        rounds_per_level={"checkpoints": 2, "steps": 2},
        moves=tuple((m.party, m.index, m.commitment.hex()) for m in game.log if isinstance(m, Claim)),
        ends=(trainer.prove_step(last - 1), auditor.prove_step(last - 1)),
    )  # fmt: skip


def disputed(
    loser: str,
    *,
    until: int = STEPS,
    answers: Member | None = None,
    write: Callable[[Verdict], Verdict] = lambda v: v,
    losses: tuple[str | None, str | None] = (None, None),
    result: str = "mismatch",
    **changes: Any,
) -> dict[str, list[Member]]:
    """The bundle of a trainer whose states part from the auditor's from step 9 ``until``, with the judge's verdict.

    ``write`` edits the verdict's document, and the judge signs what it then says; ``changes`` are to the statement alone.
    """
    trainer = run("t", parts_at=9, until=until, loss=losses[0])
    theirs = run("a", parts_at=9, until=until, loss=losses[1])
    verdict = write(verdict_of(trainer, theirs, loser, until=until))
    document = verdict.encode()
    identity = RunIdentity(trainer.statement(), trainer.specification.digest().hex(), MODEL.root_digest())
    accused = audit(identity=identity, result=result)
    claim = VerdictClaim(
        identity=identity, at=AUDITED + 60, auditor_run=theirs.statement().root, outcome=verdict.outcome,
        loser=verdict.loser, step=verdict.step, reason=verdict.reason, record=hashlib.sha256(document).hexdigest(),
        accusation=hashlib.sha256((answers or accused).data).hexdigest(),
    )  # fmt: skip
    signed = verdict_statement(replace(claim, **changes), version="0")
    return {
        "keys": [key_member(key) for key in (TRAINER, AUDITOR, SECOND, OMS, JUDGE)],
        "run": [*about(trainer), run_member(theirs)],
        "provenance": [provenance(transcript=trainer)],
        "audit": [accused, audit(SECOND, identity=identity)],
        "model": [named("model-signature", sign_model(MODEL, "m", OMS))],
        "log": log_proofs(trainer.statement().encode()),
        "verdict": [statement_member(signed, JUDGE), named("verdict", document)],
    }


def test_a_verdict_against_the_trainer_is_a_finding() -> None:
    found = check(disputed("trainer"))
    assert (found.verdict, found.failed) == ("mismatch", 11)
    assert (
        found.finding
        == f'trainer at fault at step 9 ({JUDGES_WORD}); unchecked, the judge\'s own words: "step 9: another batch"'
    )


def test_a_verdict_against_the_accuser_answers_its_accusation_and_no_other() -> None:
    assert check(disputed("auditor")).verdict == "match"
    other = audit(SECOND, result="mismatch")
    found = check(disputed("auditor", answers=other))
    assert (found.failed, "no judge has ruled on it" in found.why) == (11, True)


def test_a_verdict_that_does_not_follow_from_its_moves_is_refused() -> None:
    assert "says other things than statement" in check(disputed("auditor", step=8)).why
    parts = disputed("auditor")
    parts["run"] = parts["run"][:-1]
    assert "run statement" in check(parts).why
    parts = disputed("auditor")
    parts["verdict"] = parts["verdict"][:1]
    assert "the record it names is not in the bundle" in check(parts).why
    parts = disputed("auditor")
    parts["verdict"].append(named("verdict", b"{}"))
    assert "no verdict in the bundle names it" in check(parts).why


def test_a_false_state_in_the_middle_can_be_ruled_on_where_both_end_in_one() -> None:
    """The game then ends at the last checkpoint on which they differ, whose records travel with the verdict."""
    assert (
        run("t", parts_at=9, until=12).statement().final_state
        == run("a", parts_at=9, until=12).statement().final_state
    )
    assert check(disputed("auditor", until=12)).verdict == "match"
    found = check(disputed("trainer", until=12))
    assert (found.failed, found.finding) == (
        11,
        f'trainer at fault at step 9 ({JUDGES_WORD}); unchecked, the judge\'s own words: "step 9: another batch"',
    )


FAULT: dict[str, Any] = {"outcome": "fault", "loser": "auditor", "step": 9}


@pytest.mark.parametrize(
    ("first", "contradicts"),
    [
        ({"outcome": "cannot_reproduce", "loser": "none", "step": None}, False),
        ({"outcome": "not_proven", "loser": "none", "step": 9}, False),
        ({"outcome": "forfeit", "loser": "none", "step": None}, False),
        ({"outcome": "forfeit", "loser": "trainer", "step": None}, True),
        ({"outcome": "both_acceptable", "loser": "none", "step": 9}, True),
        ({"outcome": "agreement", "loser": "none", "step": None}, True),
        ({**FAULT, "loser": "trainer"}, True),
        ({**FAULT, "step": 8}, True),
        (FAULT, False),
    ],
)
def test_who_could_not_tell_and_rules_later_does_not_contradict_itself(
    first: dict[str, Any], *, contradicts: bool
) -> None:
    one = VerdictClaim(
        identity=IDENTITY, at=AUDITED, auditor_run=OTHER.statement().root, reason="", record="66" * 32, **first
    )  # fmt: skip
    parts = honest()
    keys(JUDGE)(parts)
    parts["verdicts"] = [
        statement_member(verdict_statement(each, version="0"), JUDGE)
        for each in (one, replace(one, at=AUDITED + 1, **FAULT))
    ]
    found = check(parts)
    assert (found.failed == 4, "equivocation" in found.finding) == (contradicts, contradicts)


OTHERS = run("x", parts_at=9)
T, A = run("t", parts_at=9), run("a", parts_at=9)
OBJECTION = LogObjection(T.root().hex(), 4, "gradient of w", 3, "lies too far away")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"moves": verdict_of(T, A, "auditor").moves[:-1]}, "do not lead to one step"),
        ({"moves": verdict_of(T, A, "auditor").moves[1:]}, "claim must be|do not lead to one step"),
        ({"moves": ()}, "do not lead to one step"),
        ({"ends": None}, "holds moves, and not what the game began with"),
        ({"ends": None, "moves": ()}, "nothing shows why it rules on step 9"),
        ({"ends": (T.prove_step(15), T.prove_step(15))}, "leads to root"),
        ({"ends": (OTHERS.prove_step(15), A.prove_step(15))}, "leads to root"),
        ({"ends": (T.prove_step(14), A.prove_step(14))}, "which is no checkpoint"),
        ({"ends": (T.prove_step(15), A.prove_step(11))}, "are of steps 15 and 11"),
        ({"ends": (T.prove_step(7), A.prove_step(7))}, "nothing is disputed"),
        ({"ends": (T.prove_step(11), A.prove_step(11))}, "claim must be at the midpoint|claim must be asked for"),
        ({"objection": replace(OBJECTION, step=9)}, "agree on states up to step 9 only"),
        ({"objection": OBJECTION}, "agree on states up to step 9 only"),
        ({"objection": replace(OBJECTION, step=8), "step": 4}, "the objection is to step 8"),
        ({"objection": replace(OBJECTION, run="00" * 32), "step": 4}, "the objection is to step 4 of run 0000"),
        ({"objection": OBJECTION, "records": (T.prove_step(4), A.prove_step(4)), "step": 4}, "one of them decided"),
        ({"records": (T.prove_step(4), A.prove_step(4)), "step": 4}, "do not differ"),
        ({"records": (T.prove_step(9), A.prove_step(9)), "step": 9}, "agree on states up to step 9 only"),
        ({"step": 8}, "its moves lead to step 9, it rules on step 8"),
        ({"step": None}, "names no step"),
        ({"step": None, "ends": None}, "names no step, and holds moves"),
    ],
)  # fmt: skip
def test_a_verdict_that_does_not_follow_from_what_it_rests_on_is_refused(
    changes: dict[str, Any], why: str
) -> None:
    import re

    found = check(disputed("auditor", write=lambda verdict: replace(verdict, **changes)))
    assert found.failed == 9, found
    assert re.search(why, found.why), found.why


def test_a_verdict_about_records_or_a_log_of_an_agreed_step_is_followed() -> None:
    played = {"moves": (), "ends": None}
    losses = ("0x1.0000000000000p+0", "0x1.8000000000000p+0")
    t, a = (run(side, parts_at=9, loss=loss) for side, loss in zip("ta", losses, strict=True))
    pair = (t.prove_step(5), a.prove_step(5))

    def told(**changes: Any) -> Result:
        return check(disputed("auditor", write=lambda v: replace(v, **changes), losses=losses))

    objection = replace(OBJECTION, run=t.root().hex())
    for more in ({}, played):  # with and without a game over states that leads to a later step
        assert told(step=5, records=pair, **more).verdict == "match"
        assert told(step=4, objection=objection, **more).verdict == "match"
        assert "do not differ" in told(step=6, records=(t.prove_step(6), a.prove_step(6)), **more).why
    convicted = check(disputed("trainer", write=lambda v: replace(v, step=4, objection=OBJECTION, **played)))
    assert (convicted.failed, convicted.finding) == (
        11,
        f'trainer at fault at step 4 ({JUDGES_WORD}); unchecked, the judge\'s own words: "step 9: another batch"',
    )


def test_an_operators_record_about_another_run_is_refused() -> None:
    vector = json.loads((VECTORS / "dispute" / "worked-example" / "input.json").read_bytes())
    record = named("dispute", vector["record"].encode())
    parts = disputed("auditor", dispute=record.digest)
    parts["verdict"].append(record)
    found = check(parts)
    assert (found.failed, "speaks of run" in found.why) == (9, True)


def recorded(loser: str = "trainer", step: int = 2) -> dict[str, list[Member]]:
    """The bundle of the run in vectors/dispute, with a judge's statement on it that names the record of its operator."""
    vector = json.loads((VECTORS / "dispute" / "worked-example" / "input.json").read_bytes())
    drawn = parse_dispute(vector["record"].encode())
    unsigned: tuple[bytes | None, ...] = (None,) * len(drawn.signatures)
    record = replace(drawn, auditor_run=drawn.run_root, keys={}, signatures=unsigned)
    data = named("dispute", record.encode())
    final = record.step_proof.record.state_root
    assert final is not None
    statement = RunStatement(
        record.step_proof.tree_size, record.run_root.hex(), record.specification.steps, final
    )
    identity = RunIdentity(statement, record.specification.digest().hex(), MODEL.root_digest())
    objection = LogObjection(statement.root, step, "log", -1, "cannot be followed")
    verdict = Verdict(loser, "fault", "why", step, 0, {}, (), objection=objection)
    claim = VerdictClaim(
        identity=identity, at=AUDITED + 60, auditor_run=statement.root, outcome="fault", loser=loser, step=step,
        reason="why", record=hashlib.sha256(verdict.encode()).hexdigest(), dispute=data.digest,
    )  # fmt: skip
    made = provenance_statement(record.specification, identity, at=PUBLISHED, version="0")
    return {
        "keys": [key_member(key) for key in (TRAINER, AUDITOR, OMS, JUDGE)],
        "run": [
            Member("run", statement.root, statement.encode()),
            named("specification", record.specification.encode()),
            named("specification-proof", record.specification_proof.encode()),
        ],
        "provenance": [statement_member(made, TRAINER)],
        "audit": [audit(identity=identity, segments=((0, record.specification.steps),))],
        "model": [named("model-signature", sign_model(MODEL, "m", OMS))],
        "log": log_proofs(statement.encode()),
        "verdict": [
            statement_member(verdict_statement(claim, version="0"), JUDGE), named("verdict", verdict.encode()), data,
        ],
    }  # fmt: skip


def test_an_operators_record_must_blame_whom_the_verdict_blames_at_its_step() -> None:
    held = check(recorded(), policy(judges_word=True))
    word = "the judge's word about who made the list"
    assert (held.failed, held.finding) == (
        11,
        f'trainer at fault at step 2 ({word}); unchecked, the judge\'s own words: "why"',
    )  # the control: the record holds
    other = check(recorded(loser="auditor"))
    assert (other.failed, "the trainer loses, the verdict says auditor" in other.why) == (9, True)
    earlier = check(recorded(step=1))
    assert (earlier.failed, "is about step 2, the verdict about 1" in earlier.why) == (9, True)


def test_a_judge_who_could_not_find_out_answers_no_accusation() -> None:
    for outcome, failed in (("both_acceptable", None), ("cannot_reproduce", 11)):
        found = check(disputed("none", write=lambda v, o=outcome: replace(v, outcome=o)))
        assert (outcome, found.failed) == (outcome, failed), found.why
        assert ("no judge has ruled on it" in found.why) is (failed is not None)


def test_runs_that_agree_answer_no_accusation_of_their_log() -> None:
    agreed: dict[str, Any] = {
        "moves": (),
        "ends": None,
        "step": None,
        "loser": "none",
        "outcome": "agreement",
    }

    def told(result: str, until: int = 12) -> Result:
        return check(disputed("none", until=until, write=lambda v: replace(v, **agreed), result=result))

    assert told("mismatch").verdict == "match"
    apart = told("mismatch", STEPS)
    assert (apart.verdict == "match", "says agreement, and the trainer's state" in apart.why) == (False, True)
    found = told("log_violation")
    assert (found.failed, "found a log_violation, and no judge has ruled on it" in found.why) == (11, True)
    objection = check(
        disputed(
            "auditor",
            write=lambda v: replace(v, step=4, objection=OBJECTION, moves=(), ends=None),
            result="log_violation",
        )
    )
    assert objection.verdict == "match", "a judge who was shown the objection has answered"


SILENT: dict[str, Any] = {"outcome": "forfeit", "step": None, "reason": "no answer"}


def test_a_forfeit_is_the_judges_word_about_who_was_silent() -> None:
    """Of the game over states there is what was played; the verdict's document must be there, as for a fault."""

    def told(loser: str, **changes: Any) -> Result:
        return check(
            disputed(loser, write=lambda v: replace(v, **{**SILENT, "moves": v.moves[:3], **changes}))
        )

    found = told("trainer")
    word = "the judge's word about who was silent or contradicted itself"
    assert (found.verdict, found.failed) == ("mismatch", 11)
    assert found.finding == f'trainer forfeited ({word}); unchecked, the judge\'s own words: "no answer"'
    assert told("auditor").verdict == "match", "an accuser that does not answer has been answered"
    assert told("auditor", moves=(), ends=None).verdict == "match", "silence may come before the first claim"
    both = told("none")
    assert (both.failed, "no judge has ruled on it" in both.why) == (11, True)
    alone = disputed("auditor", write=lambda v: replace(v, **SILENT))
    alone["verdict"] = alone["verdict"][:1]
    assert "the record it names is not in the bundle" in check(alone).why


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"objection": OBJECTION}, "holds what a ruling on a step would rest on"),
        ({"records": (T.prove_step(4), A.prove_step(4))}, "holds what a ruling on a step would rest on"),
        ({"ends": None}, "holds moves, and not what the game began with"),
        ({"ends": (OTHERS.prove_step(15), A.prove_step(15))}, "leads to root"),
        ({"moves": verdict_of(T, A, "auditor").moves[1:]}, "claim must be"),
        ({"loser": "both"}, "'both' is said to have forfeited"),
    ],
)
def test_a_forfeit_that_does_not_keep_the_rules_is_refused(changes: dict[str, Any], why: str) -> None:
    found = check(disputed("auditor", write=lambda v: replace(v, **{**SILENT, **changes})))
    assert (found.failed, why in found.why) == (9, True), found.why


def test_a_statement_of_a_forfeit_names_no_step_and_one_of_a_fault_a_loser() -> None:
    for loser, outcome, step in (
        ("auditor", "forfeit", 9),
        ("none", "fault", 9),
        ("trainer", "agreement", None),
    ):
        said: dict[str, Any] = {"loser": loser, "outcome": outcome, "step": step}
        found = check(disputed(loser, write=lambda v, said=said: replace(v, **said)))
        assert (found.failed, "contradict each other" in found.why) == (2, True), found.why


def test_a_dispute_record_that_nothing_can_check_is_no_pass() -> None:
    record = named("dispute", b"{}")
    parts = disputed("auditor", dispute=record.digest)
    parts["verdict"].append(record)
    assert check(parts).failed == 1


# ---------------------------------------------------------------------------- disputes over operators

Signers = dict[Party, SigningKey]
BOTH: Signers = {"trainer": TRAINER, "auditor": AUDITOR}


def over_an_operator(
    loser: Party, signers: Signers, *, list_root: bytes | None = None, structure: bool = False, **changes: Any
) -> tuple[DisputeRecord, dict[str, list[Member]]]:
    """The record of a dispute that ends at the product of the worked example, in the run of letters, and its bundle.

    The product is false and the trainer loses, or it is right and the auditor does. With ``list_root`` the trainer's list
    has that root, and the record ends there. With ``structure`` the objection is to that. ``changes`` are to the record,
    after it was signed.
    """
    trainer, theirs = run("t", parts_at=9), run("a", parts_at=9)
    verdict = verdict_of(trainer, theirs, loser)
    name = "worked-example" if loser == "trainer" else "false-objection"
    vector = json.loads((VECTORS / "dispute" / name / "input.json").read_bytes())
    drawn = parse_dispute(vector["record"].encode())
    claims = tuple(
        Claim(party, at, bytes.fromhex(said)) for party, at, said in verdict.moves if party in PARTIES
    )  # fmt: skip
    ends: dict[Party, bytes] = {p: bytes.fromhex(letter(STEPS, p[0])) for p in PARTIES}
    steps = StepsGame((0, 4, 8, 12, 16), bytes.fromhex(letter(0, "common")), ends, claims)
    product = next(move.leaf.leaf for move in drawn.moves if isinstance(move, Opened))
    assert product is not None
    blank = replace(
        drawn, specification=trainer.specification, specification_proof=trainer.prove_specification(),
        step_proof=trainer.prove_step(9), run_root=trainer.root(), steps=steps, moves=(), auditor_run=theirs.root(),
        loser=loser, keys={party: key.public_key for party, key in signers.items()}, signatures=(),
    )  # fmt: skip
    position = steps.replay()
    base = record_base(blank, position)
    loads = [drawn.opening.sources[number].leaf for number in (0, 1)]
    objection = (Objection(2, structure=True) if structure else Objection(2, 0, 1)).encode()
    lists: dict[Party, OperatorList] = {
        "trainer": OperatorList(base, [*loads, product]),
        "auditor": OperatorList(base, [*loads, objection]),
    }
    roots = {party: merkle_root(each.hashes) for party, each in lists.items()}
    sources = {number: lists["trainer"].open_earlier(number, 2) for number in (0, 1)}
    opening = replace(drawn.opening, leaf=lists["trainer"].witness_at(2), sources=sources)
    if structure:
        opening = Opening(opening.leaf)
    moves: list[Move] = [Committed(3, roots["trainer"]), Answered(3, roots["auditor"])]
    moves += [Claim(party, 1, each.commitment_at(1)) for party, each in lists.items()]
    moves += [Claim(party, 2, each.commitment_at(2)) for party, each in lists.items()]
    moves += [Revealed(lists["auditor"].witness_at(2)), Opened(opening.leaf), Handed(handed_digest(opening))]
    if list_root is not None:
        moves, opening = [Committed(3, list_root)], Opening(OpenedLeaf(0, None, ()))
    terms = Terms(trainer.root(), theirs.root(), 9, base, position.claims)
    signatures = tuple(
        sign_move(claim, signers[claim.party]) if claim.party in signers else None
        for claim in claims_of(terms, moves)
    )
    record = replace(blank, moves=tuple(moves), opening=opening, signatures=signatures)
    record = replace(record, **changes)
    data = record.encode()
    parts = disputed(loser, dispute=hashlib.sha256(data).hexdigest())
    parts["verdict"].append(named("dispute", data))
    return record, parts


def test_a_fault_at_an_operator_is_shown_by_what_the_loser_signed() -> None:
    for signers in (BOTH, {"trainer": TRAINER}):
        found = check(over_an_operator("trainer", signers)[1])
        assert found.failed == 11
        assert found.finding.startswith("trainer at fault at step 9")
        assert "(by moves that the trainer signed)" in found.finding
    assert check(over_an_operator("auditor", BOTH)[1]).finding == "trained as stated"
    assert check(over_an_operator("auditor", {"auditor": AUDITOR})[1]).finding == "trained as stated"


@pytest.mark.parametrize(
    ("loser", "signers", "why"),
    [
        ("trainer", {}, "none of the trainer's 5 moves is signed"),
        ("trainer", {"auditor": AUDITOR}, "none of the trainer's 5 moves is signed"),
        ("trainer", {"trainer": SECOND, "auditor": AUDITOR}, "which is not the trainer's"),
        ("trainer", {"trainer": JUDGE}, "which is not the trainer's"),
        (
            "trainer",
            {"trainer": OMS},
            "which is not the trainer's",
        ),  # a trainer's of the policy, and not this run's
        ("auditor", {}, "none of the auditor's 4 moves is signed"),
        ("auditor", {"trainer": TRAINER}, "none of the auditor's 4 moves is signed"),
        ("auditor", {"auditor": SECOND}, "which is not the auditor's"),  # it accused nobody here
    ],
)
def test_moves_that_the_loser_did_not_sign_blame_nobody(loser: Party, signers: Signers, why: str) -> None:
    _, parts = over_an_operator(loser, signers)

    found = check(parts)

    assert (found.verdict, found.failed) == ("mismatch", 10)
    assert found.finding == f"not proven: that the {loser} is to blame for step 9"
    assert why in found.why
    # A reader who takes the judge's word says so, and is told that it was taken.
    trusting = check(parts, policy(judges_word=True))
    assert (trusting.failed, trusting.verdict) == (
        (11, "mismatch") if loser == "trainer" else (None, "match")
    )
    if loser == "trainer":
        assert "(the judge's word about who made the list)" in trusting.finding
    assert check(parts, policy(judges_word=False)).failed == 10


@pytest.mark.parametrize("loser", PARTIES)
def test_a_ruling_that_needs_the_job_is_the_judges_word_however_well_signed(loser: Party) -> None:
    """A judge could convict a trainer of its own, honest list, or acquit one by an honest objection."""
    record, parts = over_an_operator(loser, BOTH, structure=True)
    assert [check.outcome for check in verify_dispute(record)][4:] == ["needs the job", "passed"]

    found = check(parts)

    assert (found.failed, found.finding) == (10, f"not proven: that the {loser} is to blame for step 9")
    assert "the ruling needs the job" in found.why
    trusting = check(parts, policy(judges_word=True))
    assert trusting.failed == (11 if loser == "trainer" else None)
    if loser == "trainer":
        assert "(the judge's word about what the job asks for, which the job tests)" in trusting.finding


def test_without_a_policy_nobody_is_said_to_have_signed() -> None:
    for signers, words in (
        (BOTH, "by moves that the trainer signed"),
        ({}, "the judge's word about who made the list"),
    ):
        _, parts = over_an_operator("trainer", signers)
        data = make_bundle(member for members in parts.values() for member in members).encode()
        found = verify_bundle(data, None, now=NOW)
        assert found.checks[9].outcome == "not judged"
        assert found.finding is not None
        assert f"({words})" in found.finding


def test_moves_of_another_dispute_are_refused() -> None:
    """The same list, signed in a dispute with another auditor's claim; the judge names this one."""
    record, _ = over_an_operator("trainer", BOTH)
    for changes, why in (
        ({"auditor_run": bytes(32)}, "move 0 (committed): the signature is not of"),
        ({"signatures": record.signatures[::-1]}, "the signature is not of"),
    ):
        found = check(over_an_operator("trainer", BOTH, **changes)[1])
        assert (found.verdict, found.failed) == ("mismatch", 9)
        assert why in found.why
    other, parts = over_an_operator("trainer", {}, auditor_run=bytes(32))
    assert other.auditor_run == bytes(32)
    assert "is with claim 0000" in check(parts).why


def test_two_lists_for_one_dispute_are_evidence_by_themselves() -> None:
    record, parts = over_an_operator("trainer", BOTH)
    second, _ = over_an_operator("trainer", {"trainer": TRAINER}, list_root=bytes(32))
    finding = f"equivocation: trainer {TRAINER.public_key.key_id} signed two answers"
    # Both in one record.
    committed = record.moves[0], second.moves[0]
    both = replace(second, moves=committed, signatures=(record.signatures[0], second.signatures[0]))
    assert [each.outcome for each in verify_dispute(both)] == ["passed"] * 6
    for held in ([both], [record, second], [second, record]):
        members = {**parts, "verdict": [named("dispute", each.encode()) for each in held]}
        found = check(members)
        assert (found.verdict, found.failed, found.finding) == ("mismatch", 4, finding)
        assert "two different moves (committed) in one place of the dispute over step 9" in found.why
    # As two envelopes and the key: nothing else is needed.
    envelopes = [move_envelope(*signed_claims(each)[0]) for each in (record, second)]
    lone = {"keys": [key_member(TRAINER)], "moves": [named("statement", each) for each in envelopes]}
    assert (check(lone).failed, check(lone).finding) == (4, finding)
    # Refused neighbours: one alone, another signer's, a second list that nobody signed.
    assert check({**lone, "moves": lone["moves"][:1]}).failed == 5
    forged, _ = over_an_operator("trainer", {"trainer": SECOND}, list_root=bytes(32))
    impostor = named("statement", move_envelope(*signed_claims(forged)[0]))
    with_key = {"keys": [key_member(TRAINER), key_member(SECOND)], "moves": [lone["moves"][0], impostor]}
    assert (check(with_key).failed, check(with_key).finding) == (3, "nothing is accepted")
    unsigned = replace(both, signatures=(record.signatures[0], record.signatures[0]))
    found = check({**parts, "verdict": [named("dispute", unsigned.encode())]})
    assert (found.failed, found.finding) == (9, "nothing is accepted")


def test_a_signed_move_about_another_run_does_not_belong_to_the_bundle() -> None:
    record, _ = over_an_operator("trainer", BOTH)
    parts = honest()
    parts["moves"] = [named("statement", move_envelope(*signed_claims(record)[0]))]
    found = check(parts)
    assert (found.failed, "is about run" in found.why) == (5, True)
    _, accused = over_an_operator("trainer", BOTH)
    accused["moves"] = parts["moves"]  # beside the record that holds it, it says nothing new
    assert check(accused).failed == 11


# -------------------------------------------------------------------------------------- container


def test_a_bundle_has_one_encoding() -> None:
    members = [m for part in honest().values() for m in part]
    data = make_bundle(members).encode()
    head, _, body = data.partition(b"\n")
    index = json.loads(head)

    def spelt(lines: object, rest: bytes = body) -> bytes:
        return canonical_json({**index, "members": lines}) + b"\n" + rest

    lines = index["members"]
    assert spelt(lines) == data
    kind, name, size, digest = lines[0]
    for changed, verdict, why in (
        (data + b"\0", "malformed", "the index speaks of"),
        (data[:-1], "malformed", "the index speaks of"),
        (spelt(lines[::-1]), "malformed", "must ascend"),
        (spelt([lines[0], *lines]), "malformed", "must ascend"),
        (spelt([["pickle", name, size, digest], *lines[1:]]), "malformed", "ascend|kind 'pickle'"),
        (spelt([[kind, "../x", size, digest], *lines[1:]]), "malformed", "64 lower-case"),
        (spelt([[kind, name, 2**62, digest], *lines[1:]]), "malformed", "the index speaks of"),
        (spelt([[kind, name, -1, digest], *lines[1:]]), "malformed", "a member must be"),
        (spelt([[kind, name, True, digest], *lines[1:]]), "malformed", "a member must be"),
        (spelt(lines, bytes([body[0] ^ 1]) + body[1:]), "mismatch", "the index says"),
        (b" " + data, "malformed", "index"),
        (b"", "malformed", "has no index"),
    ):
        import re

        found = result_of(changed, policy())
        assert (found.verdict, found.failed) == (verdict, 1), why
        assert re.search(why, found.why)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"note": 1}, "field 'note' is unknown"),
        ({"auditor_quorum": 0}, "auditor_quorum must be 1 to 2"),
        ({"auditor_quorum": 3}, "auditor_quorum must be 1 to 2"),
        ({"judges": [AUDITOR.public_key.key_id]}, "one party, one role"),
        ({"trainers": []}, "names no trainer"),
        ({"trainers": ["xx"]}, "64 lower-case"),
        ({"most_freedom": "lots"}, "decimal number"),
        ({"most_age_days": 0}, "most_age_days must be"),
        ({"coverage": "some"}, "coverage: must be an object"),
        ({"log_policy": ["log x"]}, "vkey"),
        ({"model_signature": 1}, "must be true or false"),
        ({"format": "tallystick/evidence-policy/1"}, "format must be"),
    ],
)
def test_a_malformed_policy_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        policy(**changes)


def test_a_policy_with_a_field_left_out_is_refused() -> None:
    for name in json.loads(policy_json()):
        with pytest.raises(InvalidInput, match=f"field '{name}' is missing"):
            parse_evidence_policy(
                json.dumps({k: v for k, v in json.loads(policy_json()).items() if k != name}).encode()
            )


def test_every_byte_of_a_bundle_matters() -> None:
    """No single changed byte is accepted, wherever it is."""
    data = make_bundle(m for part in honest().values() for m in part).encode()
    rules = policy()
    for at in range(0, len(data), 97):
        changed = bytearray(data)
        changed[at] ^= 1
        assert verify_bundle(bytes(changed), rules, now=NOW).verdict in ("mismatch", "malformed"), at


def test_the_sample_of_the_fixture_is_half_of_the_segments() -> None:
    assert drawn().announcement.power() == Fraction(5, 6)
    assert isinstance(Bundle(()), Bundle)


PROGRAM, DATA = "11" * 32, "22" * 32


def ordered(**changes: Any) -> tuple[dict[str, list[Member]], Transcript]:
    """An honest bundle about a run whose job has data, settings and, by ``changes``, whatever else."""
    job = JobRecord(**{
        "path": "jobs/letters.py", "source_digest": PROGRAM, "settings": {"width": "8"}, "dataset_digest": DATA, **changes,
    })  # fmt: skip
    transcript = replace(HONEST, specification=replace(HONEST.specification, job=job))
    identity = RunIdentity(
        transcript.statement(), transcript.specification.digest().hex(), MODEL.root_digest()
    )
    parts = honest()
    parts["run"] = about(transcript)
    parts["provenance"] = [provenance(transcript=transcript)]
    parts["audit"] = [audit(identity=identity)]
    parts["log"] = log_proofs(transcript.statement().encode())
    return parts, transcript


STATED = {
    "job": "jobs/letters.py", "program": PROGRAM, "data": DATA, "settings": {"width": "8"}, "seed": 1, "steps": STEPS,
    "weights": MODEL.root_digest(),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "other", "shown"),
    [
        ("job", "jobs/other.py", '"jobs/letters.py", the policy asks for "jobs/other.py"'),
        ("program", DATA, f'"{PROGRAM}", the policy asks for "{DATA}"'),
        ("data", PROGRAM, f'"{DATA}", the policy asks for "{PROGRAM}"'),
        ("settings", {"width": "9"}, '"width": "8", the policy asks for "width": "9"'),
        ("settings", {}, '"width": "8", the policy asks for no settings'),
        ("seed", 2, "1, the policy asks for 2"),
        ("steps", STEPS + 1, f"{STEPS}, the policy asks for {STEPS + 1}"),
        ("weights", "45" * 32, f'"{MODEL.root_digest()}", the policy asks for "{"45" * 32}"'),
    ],
)
def test_a_policy_pins_each_item_that_a_run_states(name: str, other: object, shown: str) -> None:
    parts, _ = ordered()
    assert check(parts, policy(**STATED)).verdict == "match"
    assert check(parts, policy(**{name: STATED[name]})).verdict == "match"
    found = check(parts, policy(**{**STATED, name: other}))
    assert (found.verdict, found.failed, found.finding) == ("mismatch", 13, "nothing is accepted")
    assert found.why == f"{name}: the run states {shown}"


def test_data_that_the_run_does_not_state_is_not_the_data_asked_for() -> None:
    found = check(honest(), policy(data=DATA))
    assert (found.failed, found.why) == (
        13, f'data: the run states none, the policy asks for "{DATA}"',
    )  # fmt: skip


def test_what_is_stated_is_told_with_and_without_a_policy_but_not_before_it_was_found_under_the_root() -> (
    None
):
    parts, transcript = ordered()
    data = make_bundle(m for members in parts.values() for m in members).encode()
    for rules in (None, policy()):
        stated = verify_bundle(data, rules, now=NOW).stated
        assert stated is not None
        assert stated.fields() == {**STATED, "policy": "fp64", "trainer": TRAINER.public_key.key_id}
    parts["run"] = [*about(HONEST)[:2], run_member(transcript), about(HONEST)[2]]
    data = make_bundle(m for members in parts.values() for m in members).encode()
    assert verify_bundle(data, policy(), now=NOW).stated is None


def test_a_provenance_that_tells_its_readers_of_another_job_is_refused() -> None:
    parts = honest()
    _, other = ordered(path="jobs/finer.py")
    made = provenance_statement(other.specification, IDENTITY, at=PUBLISHED, version="0")
    parts["provenance"] = [statement_member(made, TRAINER)]
    found = check(parts)
    assert (found.verdict, found.failed) == ("mismatch", 5)
    assert "its externalParameters are not those of the specification" in found.why


@pytest.mark.parametrize(("of", "said"), [("worldSize", "true"), ("accumulation", "true"), ("seed", "1.0")])
def test_a_number_of_the_provenance_in_another_type_is_another(of: str, said: str) -> None:
    """To Python true is 1, and 1.0 too; to a reader in another language neither is."""
    own = provenance_statement(HONEST.specification, IDENTITY, at=PUBLISHED, version="0").encode()
    assert f'"{of}":1'.encode() in own
    payload = own.replace(f'"{of}":1'.encode(), f'"{of}":{said}'.encode())
    signature = TRAINER.sign(pre_authentication_encoding(PAYLOAD_TYPE, payload))
    made = Envelope(PAYLOAD_TYPE, payload, ((TRAINER.public_key.key_id, signature),)).encode()
    parts = honest()
    parts["provenance"] = [named("statement", made)]
    found = check(parts)
    assert (found.verdict, found.failed) == ("mismatch", 5)
    assert "its externalParameters are not those of the specification" in found.why


@pytest.mark.parametrize("said", ["-1", "true", "1.0", "9223372036854775808"])
def test_a_count_of_an_audit_is_a_whole_number_of_63_bits(said: str) -> None:
    own = audit_of().encode()
    assert b'"moves":3' in own
    statement = parse_statement(own.replace(b'"moves":3', f'"moves":{said}'.encode()))
    with pytest.raises(InvalidInput, match="moves must be"):
        read_claim(statement)


GRADIENT = SiteRecord("gradient", "w", (10, 10), "F32")


@pytest.mark.parametrize(
    ("field", "limit", "inside", "outside"),
    [
        ("most_freedom", "0.25", {"fraction": 0.25}, {"fraction": 0.2500001}),
        ("most_steer", "2", {"largest_steer": 2.0}, {"largest_steer": math.inf}),
        ("most_steer", "0.5", {"largest_move": 0.5}, {"largest_move": 0.5000001}),
        ("most_fullest_step", "1", {"fullest_step": 1.0}, {"fullest_step": 1.0000001}),
        ("most_path_steer", "0.125", {"path_steer": 0.125}, {"path_steer": math.inf}),
        ("most_moves", 7, {"moves": 7}, {"moves": 8}),
        ("most_silenced", "0.02", {"silenced": 2}, {"silenced": 3}),
    ],
)
def test_a_policy_limits_each_number_that_an_audit_measured(
    field: str, limit: object, inside: dict[str, Any], outside: dict[str, Any]
) -> None:
    transcript = replace(HONEST, specification=replace(HONEST.specification, sites=(GRADIENT,)))
    identity = RunIdentity(
        transcript.statement(), transcript.specification.digest().hex(), MODEL.root_digest()
    )
    parts = honest()
    parts["run"], parts["log"] = about(transcript), log_proofs(transcript.statement().encode())
    parts["provenance"] = [provenance(transcript=transcript)]
    rules = policy(**{"most_freedom": None, "most_steer": None, field: limit})
    parts["audit"] = [audit(identity=identity, freedom=replace(FREEDOM, **inside))]
    assert check(parts, rules).verdict == "match"
    parts["audit"] = [audit(identity=identity, freedom=replace(FREEDOM, **outside))]
    assert check(parts, policy(most_freedom=None, most_steer=None)).verdict == "match"
    found = check(parts, rules)
    assert (found.verdict, found.failed) == ("mismatch", 12)
    assert f"exceeds {field} {float(Fraction(limit)):.9g}" in found.why


def test_parameters_that_began_otherwise_are_named_and_limited() -> None:
    begin = FirstState(100, Uncompared(8, 1, ("model/w",)), Uncompared(4, 1, ("model/buffer/mask",)))
    parts = honest()
    parts["audit"] = [audit(beginning=begin)]
    assert check(parts).verdict == "match"
    assert check(parts, policy(most_uncompared=12)).verdict == "match"
    assert "uncompared 12 exceeds most_uncompared 11" in check(parts, policy(most_uncompared=11)).why
    data = make_bundle(m for members in parts.values() for m in members).encode()
    page = verification_page(verify_bundle(data, policy(), now=NOW))
    console = Console(width=300)
    with console.capture() as shown:
        console.print(page)
    assert '12 parameters are not, bit for bit, what the job builds; trained: 8 in "model/w"' in shown.get()
    assert page.fields()["audits"][0]["beginning"]["rounded"]["names"] == ["model/buffer/mask"]
    # Whoever did not repeat the beginning cannot say.
    parts["audit"] = [audit(beginning=None)]
    assert check(parts).verdict == "match"
    assert "did not repeat the beginning" in check(parts, policy(most_uncompared=10**9)).why


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("beginning", {"other": {"names": ["model/w"], "parameters": 1, "tensors": 2}}),
        ("beginning", {"other": {"names": [], "parameters": 1, "tensors": 0}}),
        ("beginning", {"rounded": {"names": ["model/w"], "parameters": -1, "tensors": 1}}),
        ("freedom", {"moves": -1}),
        ("freedom", {"moves": True}),
        ("freedom", {"fraction": "nan"}),
        ("freedom", {"pathSteer": hex_float(-0.5)}),
    ],
)
def test_numbers_that_no_audit_measures_are_malformed(part: str, changes: dict[str, object]) -> None:
    honest_one = audit_of()
    said: Any = honest_one.predicate[part]
    parts = honest()
    for fields, verdict, failed in (({"more": 1}, "match", None), (changes, "malformed", 2)):
        predicate = {**honest_one.predicate, part: {**said, **fields}}
        parts["audit"] = [statement_member(replace(honest_one, predicate=predicate), AUDITOR)]
        found = check(parts)
        assert (found.verdict, found.failed) == (verdict, failed)


def test_what_an_auditor_did_not_accept_is_never_accepted_however_open_the_policy() -> None:
    nothing = dict.fromkeys(f"most_{name}" for name in LIMITS)
    for changes in ({}, {"segments": ((0, 8),)}, {"draw": drawn(), "segments": drawn().segments}):
        parts = honest()
        parts["audit"] = [audit(result="not_accepted", **changes)]
        rules = policy(**nothing, coverage={"fraction": "0.000001", "detect": "0.000001"})
        for found in (check(parts, rules), check(parts, replace(rules, log=None))):
            assert found.verdict == "mismatch"
            assert found.finding == "nothing is accepted"
    parts = honest()
    keys(SECOND)(parts)
    parts["audit"].append(audit(SECOND, result="not_accepted"))
    data = make_bundle(m for members in parts.values() for m in members).encode()
    quorum = verify_bundle(data, policy(), now=NOW).checks[11]
    assert f"not counted: {SECOND.public_key.key_id[:16]}..: its result is not_accepted" in quorum.detail


def test_free_text_of_signed_documents_is_quoted_escaped_and_labelled() -> None:
    evil = 'x"\x1b]0;owned\x07\n  finding: accepted\u202e<b>'
    parts, transcript = ordered(path=evil, settings={evil: evil})
    identity = RunIdentity(
        transcript.statement(), transcript.specification.digest().hex(), MODEL.root_digest()
    )
    begin = FirstState(1, Uncompared(1, 1, (evil,)), NONE)
    parts["audit"] = [audit(identity=identity, profile=evil, policy=evil, beginning=begin)]
    for rules in (None, policy(), policy(job="other", auditor_quorum=1)):
        data = make_bundle(m for members in parts.values() for m in members).encode()
        page = verification_page(verify_bundle(data, rules, now=NOW))
        console = Console(width=1000)
        with console.capture() as shown:
            console.print(page)
        text = shown.get()
        assert not any(c != "\n" and not c.isprintable() for c in text)
        assert 'x"' not in text
        assert text.count("\n  finding: accepted") == 0
        assert 'unchecked, the auditor\'s own words: profile "x\\"\\x1b' in text
        assert 'job      "x\\"' in text


def test_free_text_on_a_model_card_stays_in_its_cell() -> None:
    evil = "x`|\n## Verified <b> [a](b) **match**"
    parts, _ = ordered(path=evil, settings={evil: evil})
    data = make_bundle(m for members in parts.values() for m in members).encode()
    card = verification_card(verify_bundle(data, None, now=NOW), bundle="a b|`.bundle", size=1, digest="00")
    rows = [line for line in card.splitlines() if "Verified" in line]
    cells = [row.split("|") for row in rows]
    assert [len(cell) for cell in cells] == [4, 4]  # the job and the settings, each in one cell
    for row in rows:
        assert all("Verified" in text or "match" not in text for text in row.split("`")[1::2])
        assert not any("Verified" in text for text in row.split("`")[::2])
    assert "--bundle 'a b|`.bundle'" in card


def safetensors_of(entries: list[Entry], metadata: str = "pt") -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": metadata}}
    at = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [at, at + len(entry.data)],
        }
        at += len(entry.data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(bytes(entry.data) for entry in entries)


def test_a_file_is_the_result_or_it_is_not(tmp_path: Path) -> None:
    state = [
        Entry("document/cursor", "U8", (2,), b"{}"), Entry("model/b", "F32", (1,), bytes(4)),
        Entry("model/w", "F32", (2,), b"\1" * 8),
    ]  # fmt: skip
    weights = [Entry(entry.name[6:], entry.dtype, entry.shape, entry.data) for entry in state[1:]]
    root, own = summarise(state).root().hex(), weights_manifest(state)
    records = (*HONEST.records[:-1], replace(HONEST.records[-1], state_root=root))
    transcript = replace(HONEST, records=records)
    identity = RunIdentity(transcript.statement(), transcript.specification.digest().hex(), own.root_digest())
    parts = honest()
    parts["run"], parts["log"] = about(transcript), log_proofs(transcript.statement().encode())
    parts["provenance"] = [provenance(transcript=transcript, weights=own.root_digest())]
    parts["audit"] = [audit(identity=identity)]
    parts["model"] = [named("model-signature", sign_model(own, "m", OMS))]
    data = make_bundle(m for members in parts.values() for m in members).encode()
    path = tmp_path / "any-name.safetensors"

    def ask(content: bytes, rules: EvidencePolicy | None = None) -> Verification:
        path.write_bytes(content)
        return verify_bundle(data, rules, now=NOW, file=path)

    exact = b"".join(bytes(piece) for piece in weights_pieces(state))
    for content, why in (
        (exact, "byte for byte"),
        (safetensors_of(weights[::-1], "np"), "in another spelling of the file"),
        (safetensors_of(state, STATE_METADATA), "committed final state"),
    ):
        found = ask(content, policy())
        assert (found.verdict, found.file and found.file.is_result) == ("match", True)
        assert found.file is not None and why in found.file.why
        found = ask(content)  # a stranger's bundle, and no policy: the answer stands, and nothing is accepted
        assert (found.verdict, found.file and found.file.is_result) == ("unjudged", True)
    length = int.from_bytes(exact[:8], "little")

    def exact_with(new: str, old: str = '"b":') -> bytes:
        header = exact[8 : 8 + length].decode().replace(old, new, 1).encode()
        assert len(header) > length
        return len(header).to_bytes(8, "little") + header + exact[8 + length :]

    renamed = [replace(weights[0], name="buffer/b"), weights[1]]
    for content in (
        exact[:-1], exact[:-1] + b"\2", b"", b"\x80\4.", safetensors_of(renamed), safetensors_of(weights[:1]),
        safetensors_of([replace(weights[0], dtype="I32"), weights[1]]),
        safetensors_of([state[0], state[1], replace(state[2], data=bytes(8))], STATE_METADATA),
        # the first of two entries is another reader's tensor, or a field means something to it
        exact_with('"b":{"dtype":"I32","shape":[1],"data_offsets":[8,12]},"b":'), exact_with('"b":{"scale":2,', '"b":{'),
    ):  # fmt: skip
        for rules in (None, policy()):
            found = ask(content, rules)
            assert (found.verdict, found.file and found.file.is_result) == ("mismatch", False)
    parts["keys"] = []
    broken = make_bundle(m for members in parts.values() for m in members).encode()
    path.write_bytes(exact)
    found = verify_bundle(broken, policy(), now=NOW, file=path)
    assert (found.verdict, found.file and found.file.is_result) == ("mismatch", None)


def test_the_template_parses_and_accepts_nothing_until_somebody_says_whom_to_trust() -> None:
    text = policy_template({})
    parsed = parse_evidence_policy(text.encode())
    assert not parsed.pins
    assert check(honest(), parsed).verdict == "mismatch"
    parts, _ = ordered()
    data = make_bundle(m for members in parts.values() for m in members).encode()
    stated = verify_bundle(data, None, now=NOW).stated
    assert stated is not None
    roles = {
        TRAINER.public_key.key_id: "trainer", OMS.public_key.key_id: "trainer", AUDITOR.public_key.key_id: "auditor",
    }  # fmt: skip
    text = policy_template(roles, stated.fields(), ["a note"])
    parsed = parse_evidence_policy(text.encode())
    assert parsed.pins == STATED
    assert check(parts, parsed, now=NOW).verdict == "match"
    for name in json.loads(
        "\n".join(line for line in text.split("\n") if not line.lstrip().startswith("//"))
    ):
        assert text.count(f'  "{name}": ') == 1


def test_a_comment_in_a_policy_is_a_line_of_its_own() -> None:
    data = policy_json(job="// not a comment")
    assert parse_evidence_policy(b"// one\n   // two\n" + data).pins == {"job": "// not a comment"}
    with pytest.raises(InvalidInput, match="not JSON"):
        parse_evidence_policy(data + b" // behind")


def test_signatures_are_not_tried_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = honest()
    tried = len([m for members in parts.values() for m in members if m.kind == "statement"]) * len(
        parts["keys"]
    )
    members = [member for each in parts.values() for member in each]
    for most, outcome in ((tried, "passed"), (tried - 1, "failed")):
        monkeypatch.setattr(statement_checks, "MOST_TRIED", most)
        found = verify_bundle(make_bundle(members).encode(), None, now=NOW)
        assert found.checks[1].outcome == outcome
    assert "to try every signature so far" in found.checks[1].detail


@given(st.lists(st.integers(0, 30), unique=True), st.lists(st.integers(0, 30), unique=True))
def test_what_one_audit_repeated_of_anothers_steps(one: list[int], other: list[int]) -> None:
    def claim(borders: list[int]) -> Any:
        ordered = sorted(borders)
        segments = tuple(zip(ordered[::2], ordered[1::2], strict=False))
        return replace(read_claim(parse_statement(audit_of().encode())), segments=segments)

    mine, theirs = claim(one), claim(other)
    wanted = all(any(a <= c and d <= b for a, b in mine.segments) for c, d in theirs.segments)
    assert equivocation._covers(mine, theirs) == wanted
