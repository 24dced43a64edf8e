"""tally audit and tally dispute."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tallystick.cli.options import AsJson, Device, JobName, ProfileName, choose_source, find_job, parse_steps
from tallystick.cli.profiles import check_device, rerun_under
from tallystick.cli.run.sampling import (
    AnnouncementFile,
    AnnounceOut,
    Beacon,
    Detect,
    DrawOut,
    Fraction,
    Round,
    RunPolicy,
    RunProof,
    Sample,
    SampleOptions,
)
from tallystick.cli.terminal import StepDisplay, TrialDisplay, answer, json_bytes, say
from tallystick.dispute.record import DISPUTE_LIMIT, find_contradiction, parse_dispute
from tallystick.dispute.terms import Party
from tallystick.errors import InvalidInput, Nondeterminism, ProtocolViolation, StoreError, TallyError
from tallystick.execution.determinism import Profile, parse_profile
from tallystick.reports.audit import AuditPage, ClaimPage
from tallystick.reports.dispute import dispute_page
from tallystick.reports.sample import announcement_page
from tallystick.roles.statements import sign_audit, sign_verdict
from tallystick.run.sample import Announcement
from tallystick.signing.dsse import ENVELOPE_LIMIT, parse_envelope
from tallystick.signing.keys import PublicKey, Signer
from tallystick.store.files import RunDirectory, read_whole, write_whole
from tallystick.store.keys import load_key, load_public_key

if TYPE_CHECKING:
    from tallystick.diagnosis.causes import Divergence
    from tallystick.execution.job import JobSource
    from tallystick.roles.audit_report import AuditReport
    from tallystick.roles.referee import DisputeResult

EXIT_CODES: Mapping[str, int] = {
    "match": 0, "mismatch": 1, "log_violation": 1, "cannot_reproduce": 3, "not_accepted": 4
}  # fmt: skip
DISPUTE_CODES: Mapping[str, int] = {
    "agreement": 0,
    "both_acceptable": 0,
    "fault": 1,
    "forfeit": 1,
    "not_proven": 3,
    "cannot_reproduce": 3,
}


Run = Annotated[Path, typer.Argument(metavar="DIR", help="The trainer's run directory.")]
Steps = Annotated[
    str | None,
    typer.Option("--steps", metavar="A:B", help="Only the steps between these two committed states."),
]
ClaimOut = Annotated[
    Path | None,
    typer.Option(
        "--claim",
        metavar="OUT",
        help="Write the auditor's own run there, for a dispute, instead of a report.",
    ),
]
ReportOut = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="Also write the findings there, as --json prints them, for tally report.",
    ),
]
Effort = Annotated[
    float,
    typer.Option(
        "--effort",
        metavar="SECONDS",
        min=0,
        help="How long to try causes of a mismatch out; 0 for not at all.",
    ),
]
DEFAULT_EFFORT = 60.0  # seconds
MaxSteer = Annotated[
    float | None,
    typer.Option(
        "--max-steer",
        metavar="S",
        help="Accept at most this relative steer of one step's gradient, possible or done (default: the budget of moves alone).",
    ),
]
MaxMoves = Annotated[
    int | None,
    typer.Option(
        "--max-moves",
        metavar="N",
        help="Accept at most N roundings and decisions that the log took from this machine's own (default: the budget).",
    ),
]
MaxSilenced = Annotated[
    float | None,
    typer.Option(
        "--max-silenced",
        metavar="F",
        help="Accept at most this share of the parameters with gradients declared to be nothing but noise (default 1).",
    ),
]
TrainerRun = Annotated[Path, typer.Argument(metavar="TRAINER_DIR", help="The trainer's run directory.")]
AuditorRun = Annotated[
    Path, typer.Argument(metavar="AUDITOR_DIR", help="The auditor's claim, written by tally audit --claim.")
]
StatementKey = Annotated[
    str | None,
    typer.Option("--key", metavar="KEY", help="Sign what was found: a private key's file, or env:NAME."),
]
StatementOut = Annotated[
    Path | None, typer.Option("--statement", metavar="FILE", help="Where to write the signed statement.")
]
Accusation = Annotated[
    Path | None,
    typer.Option(
        "--accusation", metavar="FILE", help="The auditor's signed statement that the verdict answers."
    ),
]
VerdictOut = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", help="Where to write the verdict; by default AUDITOR_DIR/verdict.json."
    ),
]
LevelName = Annotated[
    str,
    typer.Option(
        "--level",
        metavar="operators|steps",
        help="How far down the dispute goes; with steps the judge repeats the whole step.",
    ),
]
RecordOut = Annotated[
    Path | None,
    typer.Option(
        "--record",
        metavar="FILE",
        help="Where to write the portable record of a dispute that ends at an operator; by default AUDITOR_DIR/dispute.json.",
    ),
]
Defence = Annotated[
    str | None,
    typer.Option(
        "--defence",
        metavar="JOB",
        help="The trainer's own program, which is run to answer for it; by default the job plays the trainer's part.",
    ),
]
TrainerKey = Annotated[
    str | None,
    typer.Option(
        "--trainer-key",
        metavar="KEY",
        help="Signs the trainer's moves over operators: a private key's file, or env:NAME.",
    ),
]
AuditorKey = Annotated[
    str | None,
    typer.Option("--auditor-key", metavar="KEY", help="Signs the auditor's moves over operators, likewise."),
]
TrainerSigns = Annotated[
    Path | None,
    typer.Option(
        "--trainer-signs",
        metavar="FILE",
        help="The trainer's public key: a move over operators that it did not sign was not made, and it loses.",
    ),
]
AuditorSigns = Annotated[
    Path | None,
    typer.Option("--auditor-signs", metavar="FILE", help="The auditor's public key, likewise."),
]
LEVELS = ("operators", "steps")


def audit(
    context: typer.Context,
    run: Run,
    job: JobName = None,
    steps: Steps = None,
    profile: ProfileName = "native",
    device: Device = "cpu",
    claim: ClaimOut = None,
    out: ReportOut = None,
    effort: Effort = DEFAULT_EFFORT,
    max_steer: MaxSteer = None,
    max_moves: MaxMoves = None,
    max_silenced: MaxSilenced = None,
    sample: Sample = False,
    detect: Detect = None,
    fraction: Fraction = None,
    beacon_round: Round = None,
    beacon: Beacon = None,
    log_proof: RunProof = None,
    log_policy: RunPolicy = None,
    announce: AnnounceOut = None,
    announcement: AnnouncementFile = None,
    draw: DrawOut = None,
    key: StatementKey = None,
    statement: StatementOut = None,
    as_json: AsJson = False,
) -> int:
    """Repeat a recorded run on this machine and compare everything it committed to.

    Exit codes: 0 match, 1 mismatch or log violation, 2 a wrong argument, 3 cannot reproduce, 4 not accepted: every byte
    follows from the log, but the log could have steered more than is accepted; nobody is accused. 130 interrupted.
    """
    chosen = parse_profile(profile)
    segment = parse_steps(steps)
    sampled = SampleOptions(
        sample, detect, fraction, beacon_round, beacon, log_proof, log_policy, announce, announcement, draw
    )
    sampled.check(whole=steps is None and claim is None)
    if claim is not None and (key is not None or statement is not None):
        raise InvalidInput(
            "--claim: writes a claim and no audit's statement; leave out --key and --statement"
        )
    check_statement(key, statement)
    if claim is not None and not (max_steer is max_moves is max_silenced is None):
        raise InvalidInput(
            "--claim: a claim accepts nothing; leave out --max-steer, --max-moves and --max-silenced"
        )
    if claim is not None and segment is not None:
        raise InvalidInput("--claim: a claim is about the whole run; leave out --steps")
    code = rerun_under(chosen, context.obj)
    if code is not None:
        return code
    directory = RunDirectory(_existing(run))
    specification = directory.load_specification()
    drawn = sampled.drawn(directory)
    if isinstance(drawn, Announcement):
        answer(announcement_page(drawn, str(announce)), as_json=as_json)
        return 0
    signer = None if key is None else load_key(key)
    check_device(device)
    source = choose_source(job, specification.job.path)

    from tallystick.roles import auditor
    from tallystick.roles.acceptance import Limits

    limits = Limits(max_steer, max_moves, max_silenced)
    if claim is not None:
        return _write_claim(directory, RunDirectory(claim), source, chosen, device, as_json=as_json)
    started = time.perf_counter()
    first, end = segment or (0, specification.steps)
    display = StepDisplay("audit", first=first, end=end)
    try:
        with display:
            report = auditor.audit(
                directory,
                source,
                steps=segment,
                sample=drawn,
                profile=str(chosen),
                jitter=chosen.jitter,
                device=device,
                limits=limits,
                progress=display,
            )
    except KeyboardInterrupt:
        say(f"interrupted after {display.steps} steps: no verdict; {run} is as it was")
        return 130
    total = time.perf_counter() - started
    page = AuditPage(report, total, publication_checked=sampled.is_checked)
    if out is not None:
        directory.write_document(out, json_bytes(page.fields()))
    if signer is not None and statement is not None:
        write_whole(statement, sign_audit(directory, report, signer, int(time.time()), device))
    if effort > 0 and report.verdict in ("mismatch", "log_violation"):
        page = replace(page, divergence=_explain(directory, source, report, chosen, device, effort))
        if out is not None:
            directory.write_document(out, json_bytes(page.fields()))
    answer(page, as_json=as_json)
    return EXIT_CODES[report.verdict]


DIAGNOSIS_FAILS = (
    ArithmeticError, AssertionError, LookupError, MemoryError, OSError, RuntimeError, TallyError, TypeError, ValueError
)  # fmt: skip


def _explain(
    directory: RunDirectory,
    source: JobSource,
    report: AuditReport,
    profile: Profile,
    device: str,
    effort: float,
) -> Divergence | None:
    """Look for the cause of a mismatch; the verdict stands whatever comes of it."""
    from tallystick.diagnosis.explain import explain_audit

    try:
        with TrialDisplay("looking for the cause") as display:
            return explain_audit(
                directory, source, report, jitter=profile.jitter, device=device, seconds=effort, tell=display
            )
    except KeyboardInterrupt:
        say("interrupted while looking for the cause; the verdict stands")
        return None
    except (
        DIAGNOSIS_FAILS
    ) as problem:  # whatever a stranger's run does to a diagnosis, it does not touch the verdict
        say(f"the search for the cause failed ({type(problem).__name__}: {problem}); the verdict stands")
        return None


def _write_claim(
    directory: RunDirectory,
    out: RunDirectory,
    source: object,
    profile: Profile,
    device: str,
    *,
    as_json: bool,
) -> int:
    from tallystick.execution.job import JobSource
    from tallystick.roles.audit_report import Deviation
    from tallystick.roles.claim import write_claim
    from tallystick.roles.comparison import compare_states

    assert isinstance(source, JobSource)
    started = time.perf_counter()
    try:
        with StepDisplay("claim") as display:
            claim = write_claim(
                directory, source, out, jitter=profile.jitter, device=device, progress=display
            )
    except KeyboardInterrupt:
        say(f"interrupted: {out.path} holds an unfinished claim; remove it before the next attempt")
        return 130
    if isinstance(claim, Deviation):
        raise Nondeterminism(
            f"this machine cannot repeat the job: {claim.subject} is {claim.own}, "
            f"the specification says {claim.stated}"
        )
    own, theirs = out.load_transcript(), directory.load_transcript()
    last = own.num_steps
    differing, _ = compare_states(last - 1, out.load_checkpoint(last), directory.load_checkpoint(last))
    page = ClaimPage(
        run=str(directory.path),
        claim=str(out.path),
        profile=str(profile),
        steps=last,
        first_step=claim.first_deviation,
        differing_elements=differing,
        root=own.root().hex(),
        trainer_root=theirs.root().hex(),
        seconds={"total": time.perf_counter() - started},
        objection=claim.objection,
    )
    answer(page, as_json=as_json)
    return EXIT_CODES[page.verdict]


def dispute(
    trainer: TrainerRun,
    auditor: AuditorRun,
    job: JobName = None,
    level: LevelName = "operators",
    defence: Defence = None,
    out: VerdictOut = None,
    record: RecordOut = None,
    key: StatementKey = None,
    statement: StatementOut = None,
    accusation: Accusation = None,
    trainer_key: TrainerKey = None,
    auditor_key: AuditorKey = None,
    trainer_signs: TrainerSigns = None,
    auditor_signs: AuditorSigns = None,
    as_json: AsJson = False,
) -> int:
    """Find the first step on which two runs part and the operator that is false in it, repeat that, and rule.

    Exit codes: 0 nothing is in dispute or honest arithmetic can give both states, 1 somebody loses, 2 a wrong argument,
    3 the judge could not find out, 130 interrupted.
    """
    if level not in LEVELS:
        raise InvalidInput(f"--level: must be {' or '.join(LEVELS)}, got {level!r}")
    ours, theirs = RunDirectory(_existing(trainer)), RunDirectory(_existing(auditor))
    source = choose_source(job, ours.load_specification().job.path)
    check_statement(key, statement)
    if defence is not None and level != "operators":
        raise InvalidInput(
            "--defence: the trainer's program is heard over operators only; leave out --level steps"
        )
    named: dict[Party, str | None] = {"trainer": trainer_key, "auditor": auditor_key}
    public: dict[Party, Path | None] = {"trainer": trainer_signs, "auditor": auditor_signs}
    if level != "operators" and any((*named.values(), *public.values())):
        raise InvalidInput(
            "--level steps: moves over operators are what is signed; leave out --trainer-key, --auditor-key, "
            "--trainer-signs and --auditor-signs"
        )
    program = None if defence is None else find_job(defence)
    signer = None if key is None else load_key(key)
    signers: dict[Party, Signer] = {
        party: load_key(source) for party, source in named.items() if source is not None
    }
    asked: dict[Party, PublicKey] = {
        party: load_public_key(path) for party, path in public.items() if path is not None
    }

    accused = read_accusation(accusation)
    if accused is not None:
        keys = [
            *(asked[party] for party in asked if party == "auditor"),
            *(hand.public_key for party, hand in signers.items() if party == "auditor"),
        ]
        if keys:
            parse_envelope(accused, what="accusation").open(keys, what="accusation")
        else:
            say(
                f"--accusation: nothing shows that {auditor} comes from who signed it; --auditor-key or --auditor-signs would"
            )

    from tallystick.roles import judge

    answering = None if program is None else judge.defend_with(program)
    try:
        result = judge.dispute(
            ours, theirs, source, level=level, defence=answering, signers=signers, asked=asked
        )
    except KeyboardInterrupt:
        say("interrupted: no verdict was written; both directories are as they were")
        return 130
    verdict = out if out is not None else auditor / "verdict.json"
    path = record if record is not None else auditor / "dispute.json"
    if signers and result.record is not None:
        _keep_word(path, result.record)
    theirs.write_document(verdict, result.encode())
    written: str | None = None
    if result.record is not None:
        theirs.write_document(path, result.record)
        written = str(path)
    if signer is not None and statement is not None:
        if accused is not None and "auditor" not in signers:
            _check_clearing(result, auditor)
        sign_ruling(ours, theirs, result, signer, statement, accused)
    answer(dispute_page(result, str(verdict), written), as_json=as_json)
    return DISPUTE_CODES[result.outcome]


def sign_ruling(
    trainer: RunDirectory,
    auditor: RunDirectory,
    result: DisputeResult,
    signer: Signer,
    statement: Path,
    accusation: bytes | None,
) -> None:
    """Write the judge's signed statement of how a dispute ended."""
    now = int(time.time())
    signed = sign_verdict(trainer, auditor, result, signer, now, accusation=accusation, dispute=result.record)
    write_whole(statement, signed)


def read_accusation(path: Path | None) -> bytes | None:
    """Return the auditor's signed statement that a verdict answers, or None."""
    return None if path is None else read_whole(path, limit=ENVELOPE_LIMIT, what="an accusation")


def _check_clearing(result: DisputeResult, claim: Path) -> None:
    """Return unless a verdict answers an accusation in the trainer's favour, and nothing shows whose claim was judged.

    Raises:
        InvalidInput: it does: whoever hands in another claim in the accuser's place would silence it.
    """
    if result.loser in ("trainer", "both") or result.outcome in ("cannot_reproduce", "not_proven"):
        return
    raise InvalidInput(
        f"--accusation: the outcome is {result.outcome}, loser {result.loser}, and nothing shows that {claim} is the accuser's; "
        "nothing was signed. The accuser takes part with --auditor-key, or over files (tally dispute open, answer, rule)"
    )


def _keep_word(path: Path, record: bytes) -> None:
    """Return unless the record at ``path`` holds other moves that the same keys signed in the same dispute.

    Raises:
        ProtocolViolation: it does: whoever has both records has evidence against the signer.
    """
    if not path.exists():
        return
    try:
        earlier = parse_dispute(read_whole(path, limit=DISPUTE_LIMIT, what="a dispute record"))
        other = find_contradiction(earlier, parse_dispute(record))
    except (InvalidInput, ProtocolViolation):
        return  # what stands there is no evidence against anybody
    if other is not None:
        raise ProtocolViolation(
            f"{path}: holds {other}; signing both is equivocation, so nothing was written. Keep that record, or find out "
            "why this machine computes the step otherwise"
        )


def check_statement(key: str | None, statement: Path | None) -> None:
    """Return if both are given, or neither.

    Raises:
        InvalidInput: one of them alone.
    """
    if (key is None) != (statement is None):
        raise InvalidInput(
            "--key: needs --statement FILE to say where the signed statement goes, and the reverse"
        )


def _existing(path: Path) -> Path:
    if not path.is_dir():
        raise StoreError(f"{path}: there is no such run directory")
    return path
