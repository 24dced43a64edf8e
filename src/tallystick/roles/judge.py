"""The judge: opens the job that two parties' transcripts differ about, and rules.

Parties are played in this process (``dispute``), or answer by files (``referee``, ``respondent``); ``roles.referee`` leads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tallystick.dispute.objections import Objection
from tallystick.dispute.terms import PARTIES, Party
from tallystick.errors import InvalidInput, Nondeterminism
from tallystick.execution.job import JobSource
from tallystick.execution.program import verify_program
from tallystick.roles.audit_report import Deviation
from tallystick.roles.costs import Ledger
from tallystick.roles.local_table import LocalTable
from tallystick.roles.operator_dispute import Signing
from tallystick.roles.panel import Panel
from tallystick.roles.parties import Respondent
from tallystick.roles.recorded_trace import RecordedTrace
from tallystick.roles.referee import DisputeResult, Referee
from tallystick.roles.replay import Replay, open_program, open_replay
from tallystick.roles.signed_before import FOLDER, SignedBefore
from tallystick.run.documents import Specification, verify_one_order
from tallystick.signing.keys import PublicKey, Signer
from tallystick.store.docket import Docket
from tallystick.store.files import RunDirectory

Defence = Callable[[Specification], Replay]


def defend_with(source: JobSource) -> Defence:
    """Return the defence of a trainer who answers with the program ``source``, which need not be the job's.

    Opening it raises InvalidInput where that program has other data or sites than the order.
    """

    def defence(specification: Specification) -> Replay:
        opened = open_program(specification, source)
        if isinstance(opened, Deviation):
            raise InvalidInput(
                f"the trainer's program {source.path}: {opened.subject} is {opened.own}, the order has {opened.stated}"
            )
        return opened

    return defence


def dispute(
    trainer: RunDirectory,
    auditor: RunDirectory,
    source: JobSource,
    *,
    level: str = "operators",
    defence: Defence | None = None,
    objection: Objection | None = None,
    signers: Mapping[Party, Signer] | None = None,
    asked: Mapping[Party, PublicKey] | None = None,
) -> DisputeResult:
    """Play the dispute between two run directories and rule.

    Args:
        trainer: the trainer's run.
        auditor: the auditor's claim.
        source: the job's, which auditor and judge repeat.
        level: ``operators``, or ``steps`` to have the judge repeat the whole disputed step.
        defence: the program with which the trainer defends itself; by default the job's.
        objection: what the auditor objects to; by default to what it finds. A dishonest one may say anything.
        signers: with which the parties sign their moves over operators; those of a party that is absent are unsigned.
        asked: keys whose signatures the judge asks for: a party that does not sign with its own does not answer, and loses.

    Raises:
        InvalidInput: a document is malformed, or the two runs are not of one specification.
        Mismatch: one side's documents contradict each other.
        Nondeterminism: this machine cannot repeat the job, or has another program: nobody is convicted.
        OtherProgram: the job imported something on the way that the run does not state: nobody either.
    """
    ours, theirs = trainer.load_transcript(), auditor.load_transcript()
    verify_one_order(ours.specification, theirs.specification)
    replay = open_job(ours.specification, source)
    own = replay if defence is None else defence(ours.specification)
    keys: dict[Party, PublicKey] = {party: each.public_key for party, each in (signers or {}).items()}
    ledger, hands = Ledger(), signers or {}
    traces: dict[Party, RecordedTrace] = {
        "trainer": RecordedTrace(trainer, ours, own, "trainer", ledger),
        "auditor": RecordedTrace(auditor, theirs, replay, "auditor", ledger),
    }
    parties: dict[Party, Respondent] = {
        "trainer": Respondent(traces["trainer"], theirs.root(), signer=hands.get("trainer")),
        "auditor": Respondent(
            traces["auditor"], ours.root(), signer=hands.get("auditor"), objection=objection
        ),
    }
    try:
        panel = Panel(trainer.path, auditor.path, source, ledger)
        referee = Referee(
            LocalTable(parties), ours, theirs, replay, auditor.load_objection(), level,
            Signing(keys, asked or {}), answers_itself=defence is not None, ledger=ledger, panel=panel,
        )  # fmt: skip
        return _ruled_by(referee, source)
    finally:
        replay.session.close()
        if own is not replay:
            own.session.close()


def _ruled_by(referee: Referee, source: JobSource) -> DisputeResult:
    result = referee.rule()
    verify_program(source.program, referee.ours.specification.job.program, accusing=result.accuses)
    return result


def referee(docket: Docket, source: JobSource) -> DisputeResult:
    """Go on with the dispute on disk and return the ruling.

    Raises:
        AwaitingError: an answer is missing.
        InvalidInput, Mismatch, Nondeterminism, OtherProgram: as ``dispute``.
    """
    directories = [docket.run(party) for party in PARTIES]
    ours, theirs = (directory.load_transcript() for directory in directories)
    replay, keys, ledger = open_job(ours.specification, source), docket.exchange.keys, Ledger()
    panel = Panel(directories[0].path, directories[1].path, source, ledger, docket.path / "panel")
    try:
        referee = Referee(
            docket, ours, theirs, replay, directories[1].load_objection(), docket.exchange.level,
            Signing(keys, keys), answers_itself=True, ledger=ledger, panel=panel, confirms=True,
        )  # fmt: skip
        return _ruled_by(referee, source)
    finally:
        replay.session.close()


def respondent(
    directory: RunDirectory, source: JobSource, party: Party, other_run: bytes, signer: Signer
) -> Respondent:
    """Return the party that answers for a run with its own program; the auditor's must be the job's.

    Raises:
        InvalidInput, Mismatch: the run's documents are malformed, or contradict each other.
        Nondeterminism: this machine cannot repeat the job.
    """
    transcript, memory = directory.load_transcript(), SignedBefore(directory.path / FOLDER)
    specification = transcript.specification
    if party == "trainer":
        trace = RecordedTrace(directory, transcript, defend_with(source)(specification), party, Ledger())
        return Respondent(trace, other_run, signer=signer, memory=memory)
    trace = RecordedTrace(directory, transcript, open_job(specification, source), party, Ledger())
    return Respondent(
        trace,
        other_run,
        signer=signer,
        verify=lambda: verify_program(source.program, specification.job.program),
        memory=memory,
    )


def open_job(specification: Specification, source: JobSource) -> Replay:
    """Return a replay of the job.

    Raises:
        Nondeterminism: this machine cannot repeat it.
    """
    replay = open_replay(specification, source)
    if isinstance(replay, Deviation):
        raise Nondeterminism(
            f"this machine cannot repeat the job: {replay.subject} is {replay.own}, the run has {replay.stated}"
        )
    return replay
