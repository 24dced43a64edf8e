"""A recorded run that a chip watches: committed to before step 0, registered with the agent, reported afterwards."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from tallystick.errors import InvalidInput, StoreError
from tallystick.execution.job import JobSource
from tallystick.execution.session.session import Session
from tallystick.execution.snapshot import state_entries
from tallystick.execution.step import batch_bytes
from tallystick.fleet.agent.chip_log import snapshots_of
from tallystick.fleet.agent.chip_record import LoggedPrecommit, LoggedRecord
from tallystick.fleet.agent.memory import SnapshotOpening
from tallystick.fleet.provenance.batch_opening import batch_openings
from tallystick.fleet.provenance.transcripts import (
    DOCUMENT_LIMIT,
    Lineage,
    Precommit,
    ReportOpening,
    RunReport,
    Totals,
    even_shards,
    make_precommit,
    make_report,
)
from tallystick.integrations.observed import Registration
from tallystick.integrations.run_replayer import batch_digests, flop_per_step, tokens_per_step
from tallystick.run.documents import Specification
from tallystick.store.chips import ChipDirectory
from tallystick.store.files import RunDirectory, read_whole, storing, write_whole


def beside(run: Path, kind: str) -> Path:
    """Return where a document of a run lies: ``precommit``, ``opening`` or ``report``."""
    return run.with_name(f"{run.name}.{kind}.json")


def elements_of(session: Session) -> dict[str, int]:
    """Return the number of elements of every tensor that the state will have from the first step on."""
    found = {
        entry.name: math.prod(entry.shape)
        for entry in state_entries(session)
        if entry.name.startswith(("model/", "extra/"))
    }
    for position, (name, parameter) in enumerate(session.parameters):
        form = session.trained.form[position]
        for key, example in form.items():
            if key != "parameter" and isinstance(example, Tensor):
                whole = example.shape == form["parameter"].shape
                found[f"optimizer/{name}/{key}"] = parameter.numel() if whole else example.numel()
    return found


def commit_run(
    run: Path,
    chip: ChipDirectory,
    ueid: str,
    source: JobSource,
    settings: Mapping[str, str],
    lineage: Lineage,
    log_precommit: Callable[[bytes], None],
) -> Callable[[Session, Specification], None]:
    """Return what ``trainer.record`` calls before step 0: it commits, has the chip log it, and registers the process.

    A run that is resumed keeps its commitment and is registered again.
    """

    def began(session: Session, specification: Specification) -> None:
        if session.step == 0 and not beside(run, "precommit").exists():
            opening = ReportOpening(secrets.token_bytes(32), even_shards(elements_of(session), 1))
            batches = batch_digests(source, settings, specification.steps, specification.seed)
            precommit = make_precommit(specification, opening, ranks=[ueid], lineage=lineage, batches=batches)
            write_whole(beside(run, "opening"), opening.encode(), mode=0o600)
            write_whole(beside(run, "precommit"), precommit.encode())
            log_precommit(precommit.digest())
        Registration(chip, session.model, session.optimizer, steps_done=session.step)

    return began


def report_run(run: Path, source: JobSource, chips: Mapping[ChipDirectory, list[LoggedRecord]]) -> RunReport:
    """Return the report of a finished run whose pre-commitment these chips logged.

    Raises:
        InvalidInput: no chip logged it, or a document is malformed.
        StoreError: a document is missing.
    """
    transcript = RunDirectory(run).load_transcript()
    precommit = Precommit.parse(_read(run, "precommit"))
    opening = ReportOpening.parse(_read(run, "opening"))
    wanted = precommit.digest()
    active, snapshots = 0, list[tuple[str, int, int]]()
    for chip, log in chips.items():
        begun = [r.record.clocks.active for r in log if r.record.event == LoggedPrecommit(wanted)]
        if not begun:
            raise InvalidInput(f"{chip.path}: the chip never logged pre-commitment {wanted.hex()[:16]}..")
        active += log[-1].record.clocks.active - begun[0]
        for logged, event in snapshots_of(log):
            if event.run == wanted:
                with suppress(StoreError):  # a shard that is gone: the snapshot stays unclaimed
                    step = SnapshotOpening.parse(chip.opening(logged.record.seq)).step
                    snapshots += [] if step is None else [(logged.record.ueid.hex(), logged.record.seq, step)]
    settings, steps = transcript.specification.job.settings, transcript.num_steps
    totals = Totals(
        flop_per_step(source, settings) * steps, tokens_per_step(source, settings) * steps, active
    )
    report = make_report(transcript, opening, precommit, totals, snapshots)
    write_whole(beside(run, "report"), report.encode())
    return report


def open_batches(
    run: Path, source: JobSource, steps: Sequence[int], out: Path, progress: Callable[[int, int], object]
) -> int:
    """Write the opening of each step's batch below ``out``, readable by its owner alone; return how many bytes.

    Raises:
        InvalidInput: a step that the run does not have, or a batch without a digest.
        Mismatch: the job's data of a step are not those of its record.
        StoreError: the run's opening is missing, or nothing can be written.
    """
    transcript = RunDirectory(run).load_transcript()
    made = batch_openings(transcript, ReportOpening.parse(_read(run, "opening")))
    job = source.build(transcript.specification.job.settings, transcript.specification.seed)
    with storing(f"{out}: cannot be created"):
        out.mkdir(parents=True, exist_ok=True)
    written = 0
    for done, step in enumerate(steps, start=1):
        if not 0 <= step < transcript.num_steps:
            raise InvalidInput(f"step {step}: the run has steps 0 to {transcript.num_steps - 1}")
        data = made(step, batch_bytes(job.batch(step))).encode()
        write_whole(out / f"{step}.batch", data, mode=0o600)
        written += len(data)
        progress(done, len(steps))
    return written


def _read(run: Path, kind: str) -> bytes:
    return read_whole(beside(run, kind), limit=DOCUMENT_LIMIT, what=f"a run's {kind}")
