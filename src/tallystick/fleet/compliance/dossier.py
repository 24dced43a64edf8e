"""An owner's evidence, parsed and verified, as rules are held against it: findings, runs, licences, the fleet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tallystick.commit.encoding import HASH_BYTES, parse_hex
from tallystick.errors import InvalidInput
from tallystick.fleet.enclave.neutral_result import NeutralResult
from tallystick.fleet.inspection.judging import InspectionVerdict
from tallystick.fleet.provenance.batch_opening import OpenedBatch
from tallystick.fleet.provenance.owner_findings import OwnerFindings
from tallystick.fleet.provenance.transcripts import RunReport
from tallystick.fleet.provenance.verification import Answer
from tallystick.fleet.registry.facts import DRAWN_FROM, LOST, Chip
from tallystick.fleet.registry.reconcile import SEEN_TWICE, Disagreement, Stream
from tallystick.run.transcript import Transcript
from tallystick.signing.dsse import Statement, Subject, known_fields

LICENCE_TYPE = "https://tallystick/training-licence/v0.1"
PRECOMMIT_DIGEST = "tallystickPrecommit"
LARGEST_FLOP = 10**40


@dataclass(frozen=True)
class RunFacts:
    """A declared run as its owner opened it.

    Attributes:
        name: of it.
        report: of it.
        transcript: bound to the report (``verify_report``), or None.
        batches: of the steps whose batch was opened, each bound to the report (``open_batch``).
    """

    name: str
    report: RunReport
    transcript: Transcript | None
    batches: Mapping[int, OpenedBatch] = field(default_factory=dict[int, OpenedBatch])


@dataclass(frozen=True)
class GrantedLicence:
    """A licence whose signature was checked: for which pre-commitment, by which key, up to how many FLOP."""

    precommit: str
    licensor: str
    most_flop: int


@dataclass(frozen=True)
class FleetAnswer:
    """What a registry and inspections say of an owner's chips: the answer and its reasons, in words."""

    answer: Answer
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Dossier:
    """Everything that is known of one owner. ``results`` are neutral results, each with the key id that signed it."""

    findings: OwnerFindings
    runs: tuple[RunFacts, ...]
    results: tuple[tuple[str, NeutralResult], ...] = ()
    licences: tuple[GrantedLicence, ...] = ()
    fleet: FleetAnswer = FleetAnswer("unknown", ("no registry was held against the chips shown",))


def licence_statement(precommit: bytes, most_flop: int, licensor: str) -> Statement:
    """Return the licence to train what ``precommit`` (its digest) commits to, with at most so many FLOP, to be signed."""
    subject = Subject("precommit", {PRECOMMIT_DIGEST: precommit.hex()})
    return Statement((subject,), LICENCE_TYPE, {"licensor": licensor, "mostFlop": str(most_flop)})


def read_licence(statement: Statement, signer: str, *, what: str = "licence") -> GrantedLicence:
    """Return the licence that a statement grants; that key ``signer`` signed it is for the caller to know.

    Raises:
        InvalidInput: another predicate, or a field missing or malformed.
    """
    if statement.predicate_type != LICENCE_TYPE:
        raise InvalidInput(
            f"{what}: predicateType must be {LICENCE_TYPE}, is {statement.predicate_type[:80]!a}"
        )
    text = known_fields(statement.predicate, ("mostFlop",), what=what).text("mostFlop")
    if not text.isascii() or not text.isdigit() or len(text) > 41 or int(text) > LARGEST_FLOP:
        raise InvalidInput(f"{what}: mostFlop must be a decimal number up to 1e40, is {ascii(text)[:50]}")
    precommit = statement.digest_of("precommit", PRECOMMIT_DIGEST) or ""
    parse_hex(precommit, n_bytes=HASH_BYTES, what=f"{what}: pre-commitment")
    return GrantedLicence(precommit, signer, int(text))


def judge_fleet(
    owner: str,
    registered: Sequence[Chip],
    shown_chips: Iterable[str],
    disagreements: Sequence[Disagreement] | None,
    inspections: Sequence[InspectionVerdict],
    named: Iterable[str] = (),
) -> FleetAnswer:
    """Return whether chips are missing: the registry's chips of ``owner`` against those shown, streams and inspections.

    ``disagreements`` is None where no independent stream was held against the registry, ``named`` are the chips that somebody
    else's stream names (``named_by_others``). A pass needs all of it: every
    registered chip shown, streams that agree, somebody else's among them that names each, and an inspection of the owner's chips
    without failures. What others say accuses nobody: another's inspected chips are left aside, and where a list of another's
    disagrees, or two lists have one chip, the answer is open, as either may be made up.
    """
    known, there = {chip.chip: chip for chip in registered}, set(shown_chips)
    own = {name for name, chip in known.items() if chip.owner == owner}
    bad: list[str] = []
    for name, chip in sorted(known.items()):
        if chip.owner == owner and chip.status in DRAWN_FROM and name not in there:
            bad.append(f"chip {name} is registered to {owner} and was not shown")
    for name in sorted(there):
        if name not in known:
            bad.append(f"chip {name} was shown and is not registered")
        elif known[name].owner != owner:
            bad.append(f"chip {name} was shown by {owner} and is registered to {known[name].owner}")
    unclear: list[str] = [
        f"chip {name} was shown and is registered as {known[name].status}"
        for name in sorted(there & own)
        if known[name].status not in DRAWN_FROM
    ]
    for each in disagreements or ():
        concerns = each.party == owner and each.rule != SEEN_TWICE
        words = f"{each.rule}: chip {each.chip or '-'}, {each.words}"
        (bad if concerns else unclear).append(words)
    for verdict in inspections:
        bad += [
            f"chip {chip.target.chip}: failed its inspection ({'; '.join(chip.reasons)[:200]})"
            for chip in verdict.failures
            if chip.target.chip in own | there
        ]
    if bad:
        return FleetAnswer("fail", tuple(bad))
    if disagreements is None:
        unclear.append("no independent stream was held against the registry")
    elif unnamed := sorted(there - set(named)):
        unclear.append(f"no list of somebody else names chip {unnamed[0]}, of {len(unnamed)} that none names")
    if not any(chip.passed and chip.target.chip in own for verdict in inspections for chip in verdict.chips):
        unclear.append("no drawn chip was inspected")
    return (
        FleetAnswer("unknown", tuple(unclear))
        if unclear
        else FleetAnswer("pass", (f"{len(there)} chips shown, all registered{_lost(owner, registered)}",))
    )


def _lost(owner: str, registered: Sequence[Chip]) -> str:
    """Return in words how many chips an owner has only its own word about."""
    lost = sum(1 for chip in registered if chip.owner == owner and chip.status == LOST)
    return f"; {lost} registered as lost, by their owner's word" if lost else ""


def named_by_others(owner: str, streams: Iterable[Stream]) -> frozenset[str]:
    """Return the chips that a list which is not the owner's own names."""
    return frozenset(chip for stream in streams if stream.source != owner for chip in stream.chips)


def reconciled_chips(
    owner: str, registered: Iterable[Chip], streams: Sequence[Stream], disagreements: Sequence[Disagreement]
) -> frozenset[str]:
    """Return the chips of ``owner`` that somebody else's list names, and about which nobody disagrees with the registry."""
    if any(each.party == owner for each in disagreements):
        return frozenset()
    certain = named_by_others(owner, streams) - {each.chip for each in disagreements}
    own = (chip for chip in registered if chip.owner == owner and chip.key and chip.status in DRAWN_FROM)
    return frozenset(chip.chip for chip in own if chip.chip in certain)
