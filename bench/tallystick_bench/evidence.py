"""What it takes a stranger to verify a bundle: wall time and peak memory of a fresh, isolated interpreter without extras.

The bundle is a full one: three auditors of whom one drew a sample, a false accusation that a judge answered by bisection,
a log of a thousand entries under two of three witnesses, and an order with as many sites as GPT-2 has.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tallystick.commit.encoding import canonical_json
from tallystick.commit.merkle import inclusion_proof, leaf_hash
from tallystick.commit.merkle import root as merkle_root
from tallystick.dispute.bisection import Claim, Level, apply, open_game
from tallystick.dispute.terms import Party
from tallystick.dispute.verdict import Verdict
from tallystick.errors import TallyError
from tallystick.evidence.bundle import Member, make_bundle, named, parse_bundle
from tallystick.evidence.policy import FORMAT
from tallystick.run.documents import JobRecord, PolicyRecord, SiteRecord, Specification, StepRecord
from tallystick.run.sample import LogPosition, announce, draw_segments
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
from tallystick.signing.dsse import sign_statement
from tallystick.signing.keys import P256, SigningKey, generate_key
from tallystick.signing.model_signature import Manifest, sign_model
from tallystick.signing.note import COSIGNATURE, NOTE, Note, NoteKey, NoteSigner
from tallystick.tlog.publication import entry_of
from tallystick.tlog.tree import LogEntry, LogProof, checkpoint_text, parse_checkpoint
from tallystick.version import __version__

MOST_SECONDS, MOST_MEMORY = 1.0, 200e6  # what a bundle's verification must stay within
STEPS, EVERY, SITES = 6400, 100, 148
LOG_ENTRIES = 1000
EXTRAS = ("torch", "sklearn", "transformers", "triton")

# An interpreter that sees neither the environment's paths nor the extras; what it printed last is its own peak memory.
CHILD = """
import sys
sys.path.insert(0, {source!r})

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {extras!r}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
from tallystick.cli.main import main
code = main(sys.argv[1:])
try:
    with open("/proc/self/status") as status:
        peak = 1024 * int(next(line for line in status if line.startswith("VmHWM")).split()[1])
except OSError:
    import resource
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
import time
print(time.process_time(), peak, file=sys.stderr)
sys.exit(code)
"""


@dataclass(frozen=True)
class EvidenceCost:
    """Medians over several fresh processes.

    Attributes:
        seconds, peak_bytes: of ``tally verify BUNDLE --policy FILE --json``, interpreter start included.
        slowest: the longest of the runs, in seconds.
        cpu_seconds: of the same processes' own work, which a busy machine does not stretch as much.
        start_seconds: of ``tally --version`` in the same interpreter: what is not verification.
        bundle_bytes, members, runs: what was verified, and how often.
        verdict: that of every run.
    """

    seconds: float
    slowest: float
    cpu_seconds: float
    start_seconds: float
    peak_bytes: int
    bundle_bytes: int
    members: int
    runs: int
    verdict: str

    @property
    def is_met(self) -> bool:
        """Whether time and memory are within what they must be, and the bundle was accepted."""
        return self.seconds <= MOST_SECONDS and self.peak_bytes <= MOST_MEMORY and self.verdict == "match"


def measure_evidence(place: Path, runs: int) -> EvidenceCost:
    """Make a bundle and its policy in ``place``, verify it ``runs`` times, and return what that took.

    Raises:
        TallyError: a run did not accept the bundle.
    """
    data, policy = example(int(time.time()))
    bundle, rules = place / "example.bundle", place / "policy.json"
    bundle.write_bytes(data)
    rules.write_bytes(policy)
    arguments = ["verify", str(bundle), "--policy", str(rules), "--json"]
    results = [_run(arguments) for _ in range(runs)]
    verdicts = {json.loads(result.output)["verdict"] for result in results}
    if verdicts != {"match"}:
        raise TallyError(f"bench: the bundle was not accepted: {results[0].output}")
    return EvidenceCost(
        seconds=statistics.median(result.seconds for result in results),
        slowest=max(result.seconds for result in results),
        cpu_seconds=statistics.median(result.cpu_seconds for result in results),
        start_seconds=statistics.median(_run(["--version"]).seconds for _ in range(runs)),
        peak_bytes=max(result.peak_bytes for result in results),
        bundle_bytes=len(data),
        members=len(parse_bundle(data).members),
        runs=runs,
        verdict="match",
    )


class _Run(NamedTuple):
    """One command in a fresh interpreter."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    output: str


def _run(arguments: list[str]) -> _Run:
    source = str(Path(__file__).resolve().parents[2])
    started = time.perf_counter()
    child = subprocess.run(
        [sys.executable, "-I", "-c", CHILD.format(source=source, extras=EXTRAS), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - started
    if child.returncode != 0:
        raise TallyError(f"bench: {' '.join(arguments)} ended with {child.returncode}: {child.stderr[-500:]}")
    cpu, peak = child.stderr.split()[-2:]
    return _Run(seconds, float(cpu), int(peak), child.stdout)


def example(now: int) -> tuple[bytes, bytes]:
    """Return a full bundle, whose newest statement is of ``now``, and a policy that accepts it."""
    return _Example(now).made()


class _Example:
    """The parties of the example and what each signs."""

    def __init__(self, now: int) -> None:
        self.now, self.published = now, now - 86400
        self.trainer, self.judge, self.log_key = (generate_key() for _ in range(3))
        self.auditors = [generate_key() for _ in range(3)]
        self.model_key = generate_key(P256)
        self.log = NoteSigner(NoteKey("log.example/runs", NOTE, self.log_key.public_key), self.log_key)
        self.witnesses = [_witness(f"w{number}.example") for number in range(3)]
        self.run, self.claim = _transcript("trainer"), _transcript("auditor")
        self.manifest = Manifest({"model.safetensors": "44" * 32})
        specification = self.run.specification.digest().hex()
        self.identity = RunIdentity(self.run.statement(), specification, self.manifest.root_digest())

    def made(self) -> tuple[bytes, bytes]:
        """Return bundle and policy."""
        run = self.run.statement().encode()
        root, size = self.run.root(), len(self.run.leaf_hashes)
        position = LogPosition("log.example/runs", 1, root, self.published)
        announcement = announce(
            run_root=root, tree_size=size, steps=STEPS, checkpoint_every=EVERY, fraction="0.1", detect="0.99",
            log=position, beacon=("drand/quicknet", 41, self.published + 3600),
        )  # fmt: skip
        draw = draw_segments(announcement, b"\x33" * 32)
        audits = [
            self._audit(self.auditors[0], ((0, STEPS),)),
            self._audit(self.auditors[1], draw.segments, draw=draw),
            self._audit(self.auditors[2], ((0, STEPS),), result="mismatch"),
        ]
        provenance = provenance_statement(
            self.run.specification, self.identity, at=self.published, version=__version__
        )
        keys = [self.trainer, self.judge, self.model_key, *self.auditors]
        members = [
            *(Member("key", key.public_key.key_id, key.public_key.spki) for key in keys),
            *(Member("run", t.statement().root, t.statement().encode()) for t in (self.run, self.claim)),
            named("specification", self.run.specification.encode()),
            named("specification-proof", self.run.prove_specification().encode()),
            named("model-signature", sign_model(self.manifest, "model", self.model_key)),
            named("statement", sign_statement(provenance, self.trainer)),
            *(named("statement", audit) for audit in audits),
            *self._verdict(audits[2]),
            *self._published(run, announcement.encode()),
        ]
        return make_bundle(members).encode(), self._policy()

    def _audit(self, key: SigningKey, segments: tuple[tuple[int, int], ...], **changes: Any) -> bytes:
        claim = AuditClaim(
            identity=self.identity, at=self.now, result=changes.get("result", "match"), segments=segments,
            draw=changes.get("draw"), policy="fp64", profile="avx2",
            freedom=MeasuredFreedom(2.0**-20, 2.0**-20, 0.0, 0.5, 0.0, 3, 0),
            beginning=FirstState(0, Uncompared(0, 0, ()), Uncompared(0, 0, ())),
        )  # fmt: skip
        return sign_statement(audit_statement(claim, details={}, version=__version__), key)

    def _verdict(self, accusation: bytes) -> list[Member]:
        levels = [Level("checkpoints", range(0, STEPS + 1, EVERY)), Level("steps", range(STEPS + 1))]
        ends = {"trainer": self.run.statement().final_state, "auditor": self.claim.statement().final_state}
        game = open_game(
            levels, agreed=bytes.fromhex(self.run.specification.initial_state),
            trainer=bytes.fromhex(ends["trainer"]), auditor=bytes.fromhex(ends["auditor"]),
        )  # fmt: skip
        parties: tuple[Party, Party] = ("trainer", "auditor")
        while (at := game.midpoint) is not None:
            for party in parties:
                game = apply(game, Claim(party, at, bytes.fromhex(_state(at, party))))
        claims = [move for move in game.log if isinstance(move, Claim)]
        moves: tuple[tuple[Party, int, str], ...] = tuple(
            (m.party, m.index, m.commitment.hex()) for m in claims
        )
        verdict = Verdict(
            loser="auditor", outcome="fault", reason="the auditor's state is not what the step gives", step=game.agreed,
            rounds=len(moves) // 2, rounds_per_level={"checkpoints": 6, "steps": len(moves) // 2 - 6}, moves=moves,
            ends=(self.run.prove_step(STEPS - 1), self.claim.prove_step(STEPS - 1)),
        )  # fmt: skip
        document = verdict.encode()
        claim = VerdictClaim(
            identity=self.identity, at=self.now, auditor_run=self.claim.statement().root, outcome="fault", loser="auditor",
            step=verdict.step, reason=verdict.reason, record=hashlib.sha256(document).hexdigest(),
            accusation=hashlib.sha256(accusation).hexdigest(),
        )  # fmt: skip
        signed = sign_statement(verdict_statement(claim, version=__version__), self.judge)
        return [named("statement", signed), named("verdict", document)]

    def _published(self, *documents: bytes) -> list[Member]:
        entries = [LogEntry("run", f"{number:064x}") for number in range(LOG_ENTRIES)]
        entries[100 : 100 + len(documents)] = [entry_of(document) for document in documents]
        leaves = [leaf_hash(entry.encode()) for entry in entries]
        note = self.log.sign(Note(checkpoint_text("log.example/runs", LOG_ENTRIES, merkle_root(leaves))))
        for witness in self.witnesses[:2]:
            note = witness.sign(note, now=self.published)
        tree = parse_checkpoint(note.encode())
        proofs = [
            LogProof(i, tuple(inclusion_proof(leaves, i)), tree) for i in range(100, 100 + len(documents))
        ]
        return [
            Member("log-proof", entry_of(document).digest, proof.encode())
            for document, proof in zip(documents, proofs, strict=True)
        ]

    def _policy(self) -> bytes:
        log_policy = [f"log {self.log.key}"]
        log_policy += [f"witness W{i} {witness.key}" for i, witness in enumerate(self.witnesses)]
        return canonical_json(
            {
                "auditor_quorum": 2,
                "auditors": [key.public_key.key_id for key in self.auditors],
                "coverage": {"detect": "0.99", "fraction": "0.1"},
                "data": self.run.specification.job.dataset_digest,
                "format": FORMAT,
                "job": self.run.specification.job.path,
                "judges": [self.judge.public_key.key_id],
                "judges_word": False,
                "log_policy": [*log_policy, "group two 2 W0 W1 W2", "quorum two"],
                "model_signature": True,
                "most_age_days": 30,
                "most_freedom": "0.001",
                "most_fullest_step": "1",
                "most_moves": 10,
                "most_path_steer": "0.01",
                "most_silenced": "0.01",
                "most_steer": "0.001",
                "most_uncompared": 0,
                "program": self.run.specification.job.source_digest,
                "rounding_policies": ["fp64"],
                "seed": 1,
                "settings": dict(self.run.specification.job.settings),
                "steps": STEPS,
                "trainers": [self.trainer.public_key.key_id, self.model_key.public_key.key_id],
                "weights": self.manifest.root_digest(),
            }
        )


def _witness(name: str) -> NoteSigner:
    key = generate_key()
    return NoteSigner(NoteKey(name, COSIGNATURE, key.public_key), key)


def _state(step: int, party: str) -> str:
    """The commitment after ``step`` steps: one for both sides until they part in the middle."""
    side = "both" if step <= STEPS // 2 + 37 else party
    return hashlib.sha256(f"{side} {step}".encode()).hexdigest()


def _transcript(party: str) -> Transcript:
    sites = tuple(
        SiteRecord("gradient", f"transformer.h.{i}.weight", (768, 768), "F32") for i in range(SITES)
    )
    specification = Specification(
        job=JobRecord("jobs/gpt2.py", "11" * 32, {"batch": "8"}, "12" * 32),
        policy=PolicyRecord("fp64", {"precision": 24}),
        seed=1, steps=STEPS, checkpoint_every=EVERY, accumulation=1, world_size=1, initial_state=_state(0, party),
        versions={"torch": "2.13.0"}, sites=sites,
    )  # fmt: skip
    records = tuple(
        StepRecord(
            step=i, rank=0, micro_batches=1, batch="22" * 32, log="33" * 32, log_bytes=0, loss=None, schedule=(),
            skipped=False, fingerprint=_state(i + 1, party)[:16],
            state_root=_state(i + 1, party) if specification.is_checkpoint(i) else None,
        )
        for i in range(STEPS)
    )  # fmt: skip
    return Transcript(specification, records)
