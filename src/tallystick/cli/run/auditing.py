"""tally audit."""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tallystick.cli.options import (
    DEFAULT_EFFORT,
    AsJson,
    Device,
    Effort,
    FindingsOut,
    JobName,
    ProfileName,
    Program,
    argument,
    choose_source,
    existing_run,
    option,
    parse_steps,
)
from tallystick.cli.profiles import rerun_under
from tallystick.cli.run.judging import Signing, StatementKey, StatementOut, load_signing
from tallystick.cli.run.programs import Request, file_of, refuse_with_program, run_program
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
from tallystick.cli.run.workplace import Workplace, load_made_files
from tallystick.cli.terminal import StepDisplay, TrialDisplay, answer, json_bytes, say
from tallystick.errors import InvalidInput, Nondeterminism, StoreError, TallyError
from tallystick.execution.determinism import Profile, check_device, parse_profile
from tallystick.reports.audit import AuditPage, ClaimPage
from tallystick.reports.sample import announcement_page
from tallystick.roles.statements import sign_audit
from tallystick.run.sample import Announcement, SegmentDraw
from tallystick.store.files import RunDirectory, write_whole

if TYPE_CHECKING:
    from tallystick.diagnosis.causes import Divergence
    from tallystick.dispute.verdict import LogObjection
    from tallystick.execution.job import JobSource
    from tallystick.roles.audit_report import AuditReport

EXIT_CODES: Mapping[str, int] = {
    "match": 0, "mismatch": 1, "log_violation": 1, "cannot_reproduce": 3, "not_accepted": 4
}  # fmt: skip

Run = Annotated[Path, argument("DIR", "The trainer's run directory.")]
Steps = Annotated[str | None, option("--steps", "A:B", "Only the steps between these two committed states.")]
ClaimOut = Annotated[
    Path | None,
    option("--claim", "OUT", "Write the auditor's own run there, for a dispute, instead of a report."),
]
MaxSteer = Annotated[
    float | None,
    option(
        "--max-steer",
        "S",
        "Accept at most this relative steer of one step's gradient, possible or done (default: the budget of moves alone).",
    ),
]
MaxMoves = Annotated[
    int | None,
    option(
        "--max-moves",
        "N",
        "Accept at most N roundings and decisions that the log took from this machine's own (default: the budget).",
    ),
]
MaxSilenced = Annotated[
    float | None,
    option(
        "--max-silenced",
        "F",
        "Accept at most this share of the parameters with gradients declared to be nothing but noise (default 1).",
    ),
]


@dataclass(frozen=True)
class _Repetition:
    """A run that is repeated here: its directory, its job's source, and the arithmetic."""

    directory: RunDirectory
    source: JobSource
    profile: Profile
    device: str


def audit(
    context: typer.Context,
    run: Run,
    program: Program = None,
    job: JobName = None,
    steps: Steps = None,
    profile: ProfileName = "native",
    device: Device = "cpu",
    claim: ClaimOut = None,
    out: FindingsOut = None,
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
    """Repeat a recorded run, or run its program again and follow that, and compare everything the run committed to.

    Exit codes: 0 match, 1 mismatch or log violation, 2 a wrong argument, 3 cannot reproduce, 4 not accepted: every byte
    follows from the log, but the log could have steered more than is accepted; nobody is accused. 130 interrupted.
    """
    chosen, segment = parse_profile(profile), parse_steps(steps)
    accepted = (max_steer, max_moves, max_silenced)
    sampled = SampleOptions(
        sample, detect, fraction, beacon_round, beacon, log_proof, log_policy, announce, announcement, draw
    )
    sampled.check(whole=steps is None and claim is None)
    _check_claim(claim, (key, statement), accepted, segment, out)
    signing = load_signing(key, statement)
    if (code := rerun_under(chosen, context.obj)) is not None:
        return code
    directory = existing_run(run)
    stated, drawn = directory.load_specification().job.path, sampled.drawn(directory)
    if isinstance(drawn, Announcement):
        answer(announcement_page(drawn, str(announce)), as_json=as_json)
        return 0
    claimed = None if claim is None else RunDirectory(claim.absolute())
    wanted = _Wanted(segment, drawn, accepted, out, signing, effort, sampled.is_checked, device, claimed)
    check_device(device)
    if program:
        refuse_with_program(job=job, device=device != "cpu")
        return _audit_program(program, context, directory, chosen, wanted, as_json=as_json)
    repetition = _Repetition(directory, choose_source(job, stated), chosen, device)
    if claimed is not None:
        return _write_claim(repetition, claimed, as_json=as_json)
    return _audit(repetition, wanted, as_json=as_json)


def _check_claim(
    claim: Path | None,
    signing: tuple[object, ...],
    accepted: tuple[object, ...],
    segment: tuple[int, int] | None,
    out: Path | None,
) -> None:
    """Return if nothing was asked for that a claim cannot give.

    Raises:
        InvalidInput: something was.
    """
    if claim is None:
        return
    if any(given is not None for given in signing):
        raise InvalidInput(
            "--claim: writes a claim and no audit's statement; leave out --key and --statement"
        )
    if any(limit is not None for limit in accepted):
        raise InvalidInput(
            "--claim: a claim accepts nothing; leave out --max-steer, --max-moves and --max-silenced"
        )
    if out is not None:
        raise InvalidInput("--claim: writes a claim and no findings; leave out --out")
    if segment is not None:
        raise InvalidInput("--claim: a claim is about the whole run; leave out --steps")


@dataclass(frozen=True)
class _Wanted:
    """What an audit looks at, what it accepts, and where its findings go."""

    segment: tuple[int, int] | None
    drawn: SegmentDraw | None
    accepted: tuple[float | None, int | None, float | None]  # as ``Limits`` has them
    out: Path | None
    signing: Signing | None
    effort: float
    publication_checked: bool
    device: str
    claim: RunDirectory | None = None


def _audit(repetition: _Repetition, wanted: _Wanted, *, as_json: bool) -> int:
    from tallystick.roles import auditor
    from tallystick.roles.acceptance import Limits

    directory, profile = repetition.directory, repetition.profile
    started = time.perf_counter()
    first, end = wanted.segment or (0, directory.load_specification().steps)
    display = StepDisplay("audit", first=first, end=end)
    try:
        with display:
            report = auditor.audit(
                directory,
                repetition.source,
                steps=wanted.segment,
                sample=wanted.drawn,
                profile=str(profile),
                jitter=profile.jitter,
                device=repetition.device,
                limits=Limits(*wanted.accepted),
                progress=display,
            )
    except KeyboardInterrupt:
        say(f"interrupted after {display.steps} steps: no verdict; {directory.path} is as it was")
        return 130
    explain = functools.partial(_explain, repetition, report, wanted.effort) if wanted.effort > 0 else None
    return _conclude(report, wanted, directory, time.perf_counter() - started, explain, as_json=as_json)


def _audit_program(
    command: list[str],
    context: typer.Context,
    directory: RunDirectory,
    profile: Profile,
    wanted: _Wanted,
    *,
    as_json: bool,
) -> int:
    """Have a program followed by a process of its own, and by further ones before anybody is accused."""
    from tallystick.cli.run.second_runs import SecondRuns, follow_first

    if (request := Request.take()) is not None:
        with request.answering() as answered:
            return _follow_program(command, directory, profile, wanted, request, answered)
        return 0  # who asked says what was raised
    run, started = directory.path.absolute(), time.perf_counter()
    place = Workplace.of(command, file_of(command), [run])
    runs = SecondRuns(place, run, profile, load_made_files(directory))
    try:
        report, moved = follow_first(context.obj, command, wanted.drawn, quiet=as_json)
        if wanted.claim is None:
            from tallystick.roles.courses import excuse_doubts

            excuse_doubts(report, moved, runs.doubts)
    except KeyboardInterrupt:
        if wanted.claim is not None:
            say(f"{wanted.claim.path}: may hold an unfinished claim; remove it before the next attempt")
        return 130
    there = sorted(place.names.intersection(runs.made))
    if report.verdict == "cannot_reproduce" and there:
        say(
            f"made while it was recorded, and here already: {', '.join(there)[:200]}; audit where they are not"
        )
    if wanted.claim is not None:
        conclusion = _Conclusion(directory, wanted.claim, profile, started, command)
        return conclusion.of_program(report, as_json=as_json)
    return _conclude(report, wanted, directory, time.perf_counter() - started, None, as_json=as_json)


def _follow_program(
    command: list[str],
    directory: RunDirectory,
    profile: Profile,
    wanted: _Wanted,
    request: Request,
    answered: dict[str, Any],
) -> int:
    """Follow what a program attaches, here, for the process that asked."""
    from tallystick.roles.acceptance import Limits
    from tallystick.roles.attached import ARGUMENTS, Attached, ProgramRun, arguments_of
    from tallystick.roles.audit_report import AuditReport
    from tallystick.roles.follower import Follower

    followers: list[Follower] = []
    place = directory.path.absolute()  # a program may go elsewhere

    def begin() -> Follower:
        ordered = {"settings": {ARGUMENTS: arguments_of([*request.arguments])}}
        follower = Follower(
            place,
            limits=Limits(*wanted.accepted),
            ordered=ordered,
            steps=wanted.segment,
            sample=wanted.drawn,
            claim=wanted.claim,
            broken={int(step): text for step, text in request.broken.items()},
        )
        follower.has_jitter, follower.report.profile = profile.jitter, str(profile)
        follower.report.directory = str(directory.path)
        follower.doubts = lambda course, _: course  # who asked has them
        followers.append(follower)
        return follower

    def done(attached: Attached) -> None:
        report = attached.result
        assert isinstance(report, AuditReport)
        answered.update(report=report.document(), moved=followers[-1].moved)

    display = StepDisplay("audit")
    try:
        with display:
            leave = functools.partial(request.leave_with, answered, done=done)
            done(run_program(command, ProgramRun(begin, display, leave=leave)))
    except KeyboardInterrupt:
        say(f"interrupted after {display.steps} steps: no verdict; {directory.path} is as it was")
        raise typer.Exit(130) from None
    except TallyError as problem:
        at = followers[-1].open_step if followers else None
        if at is None or str(at) in request.broken:
            raise
        answered.update(broken=(at, str(problem)))  # who asked has it run without that log
        if wanted.claim is not None:
            shutil.rmtree(wanted.claim.path, ignore_errors=True)
    return 0


def _conclude(
    report: AuditReport,
    wanted: _Wanted,
    directory: RunDirectory,
    total: float,
    explain: Callable[[], Divergence | None] | None,
    *,
    as_json: bool,
) -> int:
    """Write, sign, explain and print what an audit found, and return the exit code."""
    page = AuditPage(report, total, publication_checked=wanted.publication_checked)
    if wanted.out is not None:
        directory.write_document(wanted.out, json_bytes(page.fields()))
    if wanted.signing is not None:
        signer, statement = wanted.signing
        write_whole(statement, sign_audit(directory, report, signer, int(time.time()), wanted.device))
    if explain is not None and report.verdict in ("mismatch", "log_violation"):
        page = replace(page, divergence=explain())
        if wanted.out is not None:
            directory.write_document(wanted.out, json_bytes(page.fields()))
    answer(page, as_json=as_json)
    return EXIT_CODES[report.verdict]


DIAGNOSIS_FAILS = (
    ArithmeticError, AssertionError, LookupError, MemoryError, OSError, RuntimeError, TallyError, TypeError, ValueError
)  # fmt: skip


def _explain(repetition: _Repetition, report: AuditReport, effort: float) -> Divergence | None:
    """Look for the cause of a mismatch; the verdict stands whatever comes of it."""
    from tallystick.diagnosis.explain import explain_audit

    try:
        with TrialDisplay("looking for the cause") as display:
            return explain_audit(
                repetition.directory,
                repetition.source,
                report,
                jitter=repetition.profile.jitter,
                device=repetition.device,
                seconds=effort,
                tell=display,
            )
    except KeyboardInterrupt:
        say("interrupted while looking for the cause; the verdict stands")
        return None
    except (
        DIAGNOSIS_FAILS
    ) as problem:  # whatever a stranger's run does to a diagnosis, it does not touch the verdict
        say(f"the search for the cause failed ({type(problem).__name__}: {problem}); the verdict stands")
        return None


def _write_claim(repetition: _Repetition, out: RunDirectory, *, as_json: bool) -> int:
    from tallystick.roles.audit_report import Deviation
    from tallystick.roles.claim import write_claim

    directory, profile = repetition.directory, repetition.profile
    started = time.perf_counter()
    try:
        with StepDisplay("claim") as display:
            claim = write_claim(
                directory,
                repetition.source,
                out,
                jitter=profile.jitter,
                device=repetition.device,
                progress=display,
            )
    except KeyboardInterrupt:
        say(f"interrupted: {out.path} holds an unfinished claim; remove it before the next attempt")
        return 130
    if isinstance(claim, Deviation):
        raise Nondeterminism(
            f"this machine cannot repeat the job: {claim.subject} is {claim.own}, "
            f"the specification says {claim.stated}"
        )
    conclusion = _Conclusion(directory, out, profile, started)
    return conclusion.print(claim.first_deviation, claim.objection, as_json=as_json)


@dataclass(frozen=True)
class _Conclusion:
    """A finished claim, and the run that it is about."""

    directory: RunDirectory
    out: RunDirectory
    profile: Profile
    started: float
    program: Sequence[str] = ()

    def of_program(self, report: AuditReport, *, as_json: bool) -> int:
        """Print what the program's own follower has claimed, and return the exit code.

        Raises:
            Nondeterminism: it is not sure of anything, or has not come to the end.
        """
        if not self.out.statement_path.exists():
            shutil.rmtree(self.out.path, ignore_errors=True)  # it held no file before
            raise Nondeterminism(
                f"{self.out.path}: there is no claim: the program was followed for {report.steps} steps, and the audit says "
                f"{report.verdict}: {report.first or 'the program ended'}"
            )
        first = min((each.step for s in report.segments for each in s.deviations), default=None)
        if first is not None:
            say(
                "a claim accuses nobody yet: only an audit without --claim, or a judge, asks other arithmetics first"
            )
        return self.print(first, self.out.load_objection(), as_json=as_json)

    def print(self, first: int | None, objection: LogObjection | None, *, as_json: bool) -> int:
        """Print what is claimed, and return the exit code."""
        from tallystick.roles.comparison import compare_states

        own, theirs = self.out.load_transcript(), self.directory.load_transcript()
        last = own.num_steps
        differing = None
        with suppress(InvalidInput, StoreError):  # the trainer's last state may not be there
            theirs_last = self.directory.load_checkpoint(last)
            differing = compare_states(last - 1, self.out.load_checkpoint(last), theirs_last)[0]
        page = ClaimPage(
            run=str(self.directory.path),
            claim=str(self.out.path),
            profile=str(self.profile),
            steps=last,
            first_step=first,
            differing_elements=differing,
            root=own.root().hex(),
            trainer_root=theirs.root().hex(),
            seconds={"total": time.perf_counter() - self.started},
            objection=objection,
            program=self.program,
        )
        answer(page, as_json=as_json)
        return EXIT_CODES[page.verdict]
