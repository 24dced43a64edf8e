"""tally dispute run: two runs at hand, judged in one process; and what both ways of a dispute ask for and sign."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tallystick.cli.options import (
    AsJson,
    JobName,
    Program,
    argument,
    by_party,
    choose_source,
    existing_run,
    find_job,
    option,
)
from tallystick.cli.run.programs import file_of, refuse_with_program
from tallystick.cli.run.workplace import Workplace, load_made_files
from tallystick.cli.terminal import answer, say
from tallystick.dispute.record import DISPUTE_LIMIT, find_contradiction, parse_dispute
from tallystick.dispute.terms import Party
from tallystick.errors import InvalidInput, ProtocolViolation
from tallystick.execution.determinism import parse_profile
from tallystick.reports.dispute import dispute_page
from tallystick.roles.statements import sign_verdict
from tallystick.signing.dsse import ENVELOPE_LIMIT, parse_envelope
from tallystick.signing.keys import PublicKey, Signer
from tallystick.store.files import RunDirectory, read_whole, write_whole
from tallystick.store.keys import load_key, load_public_key

if TYPE_CHECKING:
    from tallystick.roles.audit_report import AuditReport
    from tallystick.roles.referee import DisputeResult

DISPUTE_CODES: Mapping[str, int] = {
    "agreement": 0,
    "both_acceptable": 0,
    "fault": 1,
    "forfeit": 1,
    "not_proven": 3,
    "cannot_reproduce": 3,
}
Signing = tuple[Signer, Path]
LEVELS = ("operators", "steps")

TrainerRun = Annotated[Path, argument("TRAINER_DIR", "The trainer's run directory.")]
AuditorRun = Annotated[Path, argument("AUDITOR_DIR", "The auditor's claim, written by tally audit --claim.")]
StatementKey = Annotated[
    str | None, option("--key", "KEY", "Sign what was found: a private key's file, or env:NAME.")
]
StatementOut = Annotated[Path | None, option("--statement", "FILE", "Where to write the signed statement.")]
Accusation = Annotated[
    Path | None,
    option("--accusation", "FILE", "The auditor's signed statement that the verdict answers."),
]
VerdictOut = Annotated[
    Path | None,
    option("--out", "FILE", "Where to write the verdict; by default AUDITOR_DIR/verdict.json."),
]
LevelName = Annotated[
    str,
    option(
        "--level",
        "operators|steps",
        "How far down the dispute goes; with steps the judge repeats the whole step.",
    ),
]
RecordOut = Annotated[
    Path | None,
    option(
        "--record",
        "FILE",
        "Where to write the portable record of a dispute that ends at an operator; by default AUDITOR_DIR/dispute.json.",
    ),
]
Defence = Annotated[
    str | None,
    option(
        "--defence",
        "JOB",
        "The trainer's own program, which is run to answer for it; by default the job plays the trainer's part.",
    ),
]
TrainerKey = Annotated[
    str | None,
    option(
        "--trainer-key",
        "KEY",
        "Signs the trainer's moves over operators: a private key's file, or env:NAME.",
    ),
]
AuditorKey = Annotated[
    str | None, option("--auditor-key", "KEY", "Signs the auditor's moves over operators, likewise.")
]
TrainerSigns = Annotated[
    Path | None,
    option(
        "--trainer-signs",
        "FILE",
        "The trainer's public key: a move over operators that it did not sign was not made, and it loses.",
    ),
]
AuditorSigns = Annotated[
    Path | None, option("--auditor-signs", "FILE", "The auditor's public key, likewise.")
]


def dispute(
    trainer: TrainerRun,
    auditor: AuditorRun,
    program: Program = None,
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
    check_level(level)
    ours, theirs = existing_run(trainer), existing_run(auditor)
    signing = load_signing(key, statement)
    if program:
        refuse_with_program(
            level=level != "operators", job=job, defence=defence, record=record, accusation=accusation, trainer_key=trainer_key,
            auditor_key=auditor_key, trainer_signs=trainer_signs, auditor_signs=auditor_signs,
        )  # fmt: skip
        return _dispute_program(program, ours, theirs, out, signing, as_json=as_json)
    source = choose_source(job, ours.load_specification().job.path)
    named, public = by_party(trainer_key, auditor_key), by_party(trainer_signs, auditor_signs)
    if level != "operators":
        _check_steps(defence, signed=bool(named or public))
    own_program = None if defence is None else find_job(defence)
    signers: dict[Party, Signer] = {party: load_key(given) for party, given in named.items()}
    asked: dict[Party, PublicKey] = {party: load_public_key(path) for party, path in public.items()}
    accused = _read_own_accusation(accusation, auditor, signers.get("auditor"), asked.get("auditor"))

    from tallystick.roles import judge

    answering = None if own_program is None else judge.defend_with(own_program)
    try:
        result = judge.dispute(
            ours, theirs, source, level=level, defence=answering, signers=signers, asked=asked
        )
    except KeyboardInterrupt:
        say("interrupted: no verdict was written; both directories are as they were")
        return 130
    path = record or auditor / "dispute.json"
    if signers and result.record is not None:
        _keep_word(path, result.record)
    if signing is not None and accused is not None and "auditor" not in signers:
        _check_clearing(result, auditor)
    return _write(result, (ours, theirs), out, path, signing, accused, as_json=as_json)


def _write(
    result: DisputeResult,
    runs: tuple[RunDirectory, RunDirectory],
    out: Path | None,
    record: Path | None,
    signing: Signing | None,
    accusation: bytes | None,
    *,
    as_json: bool,
) -> int:
    """Write a verdict, its record if it has one, and its statement if it is to be signed; print it; return the exit code."""
    verdict, written = out or runs[1].path / "verdict.json", None
    runs[1].write_document(verdict, result.encode())
    if result.record is not None and record is not None:
        runs[1].write_document(record, result.record)
        written = str(record)
    if signing is not None:
        signer, statement_at = signing
        write_whole(statement_at, ruling_statement(*runs, result, signer, accusation))
    answer(dispute_page(result, str(verdict), written), as_json=as_json)
    return DISPUTE_CODES[result.outcome]


def _dispute_program(
    command: list[str],
    trainer: RunDirectory,
    auditor: RunDirectory,
    out: Path | None,
    signing: Signing | None,
    *,
    as_json: bool,
) -> int:
    """Rule on a run that a program leads, which runs in processes of its own."""
    from tallystick.cli.run.second_runs import SecondRuns, follow_first
    from tallystick.roles.courses import excuse_doubts
    from tallystick.roles.program_judge import ProgramJudge

    run, profile = trainer.path.absolute(), parse_profile("native")
    place = Workplace.of(command, file_of(command), [run, auditor.path.absolute()])
    runs = SecondRuns(place, run, profile, load_made_files(trainer))

    def follow(end: int) -> AuditReport:
        asked = ["audit", str(run), "--steps", f"0:{end}", "--", *command]
        report, moved = follow_first(asked, command, None, quiet=as_json)
        excuse_doubts(report, moved, runs.doubts)
        return report

    try:
        result = ProgramJudge(trainer, auditor, follow, runs.find_other).rule()
    except KeyboardInterrupt:
        say("interrupted: no verdict was written; both directories are as they were")
        return 130
    return _write(result, (trainer, auditor), out, None, signing, None, as_json=as_json)


def ruling_statement(
    trainer: RunDirectory,
    auditor: RunDirectory,
    result: DisputeResult,
    signer: Signer,
    accusation: bytes | None,
) -> bytes:
    """Return the judge's signed statement of how a dispute ended."""
    now = int(time.time())
    return sign_verdict(trainer, auditor, result, signer, now, accusation=accusation, dispute=result.record)


def read_accusation(path: Path | None) -> bytes | None:
    """Return the auditor's signed statement that a verdict answers, or None."""
    return None if path is None else read_whole(path, limit=ENVELOPE_LIMIT, what="an accusation")


def _check_clearing(result: DisputeResult, claim: Path) -> None:
    """Return unless a verdict answers an accusation in the trainer's favour, and nothing shows whose claim was judged.

    Raises:
        InvalidInput: it does: whoever hands in another claim in the accuser's place would silence it.
    """
    if not result.clears:
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


def load_signing(key: str | None, statement: Path | None) -> Signing | None:
    """Return the key that signs a statement and where that goes; None if neither was asked for.

    Raises:
        InvalidInput: one of them alone, or no private key.
        StoreError: the key cannot be read.
    """
    if (key is None) != (statement is None):
        raise InvalidInput(
            "--key: needs --statement FILE to say where the signed statement goes, and the reverse"
        )
    return None if key is None or statement is None else (load_key(key), statement)


def check_level(level: str) -> None:
    """Return if a dispute can go down to ``level``.

    Raises:
        InvalidInput: there is no such level.
    """
    if level not in LEVELS:
        raise InvalidInput(f"--level: must be {' or '.join(LEVELS)}, got {level!r}")


def _check_steps(defence: str | None, *, signed: bool) -> None:
    """Return if a dispute over whole steps was asked for nothing that is about operators.

    Raises:
        InvalidInput: it was.
    """
    if defence is not None:
        raise InvalidInput(
            "--defence: the trainer's program is heard over operators only; leave out --level steps"
        )
    if signed:
        raise InvalidInput(
            "--level steps: moves over operators are what is signed; leave out --trainer-key, --auditor-key, "
            "--trainer-signs and --auditor-signs"
        )


def _read_own_accusation(
    path: Path | None, claim: Path, signer: Signer | None, asked: PublicKey | None
) -> bytes | None:
    """Return the accusation, which the auditor's keys must have signed where any are known; say if none are.

    Raises:
        Mismatch: somebody else signed it.
    """
    accused = read_accusation(path)
    if accused is None:
        return None
    keys = [key for key in (asked, None if signer is None else signer.public_key) if key is not None]
    if keys:
        parse_envelope(accused, what="accusation").open(keys, what="accusation")
    else:
        say(
            f"--accusation: nothing shows that {claim} comes from who signed it; --auditor-key or --auditor-signs would"
        )
    return accused
