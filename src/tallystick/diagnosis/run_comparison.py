"""Where and why two runs part: the first step that differs, its states, and a diagnosis of it."""

from __future__ import annotations

import time
from itertools import pairwise

from tallystick.commit.state import Entry
from tallystick.diagnosis.causes import Divergence, Evidence, Explanation, fitting
from tallystick.diagnosis.divergence import StateDivergence, compare
from tallystick.diagnosis.document_differences import different_versions, first_parting, read_documents
from tallystick.diagnosis.recorded_run import RecordedRun
from tallystick.diagnosis.repetition import Bench, Repeated, copied_state
from tallystick.diagnosis.search import EFFORT, Diagnosis, OwnStep, Tell, scattered
from tallystick.errors import InvalidInput, Mismatch, Nondeterminism
from tallystick.execution.job import JobSource
from tallystick.execution.operations import Watch
from tallystick.execution.snapshot import load_state
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind, SiteAddress, decode_frame
from tallystick.roles.audit_report import Deviation
from tallystick.roles.replay import Replay, open_replay
from tallystick.store.files import RunDirectory


def explain_runs(
    own: RunDirectory,
    stated: RunDirectory,
    source: JobSource | None,
    *,
    device: str = "cpu",
    seconds: float = EFFORT,
    tell: Tell | None = None,
    unasked: str = "the job is not at hand",
) -> Divergence:
    """Return where and why two runs part: first what their documents say; with ``source``, their job's, causes are tried out.

    A step that is other work by the two records themselves is not repeated. ``unasked`` is why there is no ``source``.

    Raises:
        InvalidInput: a document is malformed or missing; or nothing parts, and one side's last state or log is damaged.
        Mismatch: one side's documents contradict each other.
    """
    started = time.monotonic()
    sides = RecordedRun(own, own.load_partial()), RecordedRun(stated, stated.load_partial())
    mine, theirs = (side.transcript for side in sides)
    found = Divergence(str(own.path), str(stated.path))
    found.environment = different_versions(mine.specification, theirs.specification)
    said, other_work = read_documents(mine, theirs, found)
    found.state, step = _locate(*sides)
    if found.state is not None:
        found.step, found.after = 0, 0
        found.findings.append(
            Explanation("initial_state", "confirmed", "the runs begin with different numbers")
        )
        guesses = fitting(Evidence(found.state, environment=found.environment, one_step=False))
        found.findings += [guess for guess in guesses if guess.cause in ("last_bit_noise", "denormals")]
    elif step is not None:
        found.step = step
        if other_work == step:
            found.notes.append(
                f"step {step} was not repeated: by their own records the runs do different work in it"
            )
        elif source is None:
            found.notes.append(f"nothing was repeated: {unasked}")
        else:
            try:
                _explain_pair(*sides, source, found, device, seconds, tell)
            except (InvalidInput, Mismatch, Nondeterminism) as problem:
                found.notes.append(f"looking for the cause ended early: {problem}")
        if found.state is None:
            _compare_next(*sides, step, found)
    else:
        _hold_what_is_the_same(*sides, found)
    if not said and not found.findings and found.state is not None and not found.state.is_empty:
        loss = found.loss
        found.findings = fitting(Evidence(found.state, None, loss, found.environment, one_step=False))
    if other_work is not None and other_work != step:
        # What the documents say of a later step is no cause of where the runs part.
        later = [finding for finding in said if finding.cause != "other_specification"]
        found.notes += [f"after the runs have parted: {finding.text}" for finding in later]
        said = [finding for finding in said if finding not in later]
    found.findings = said + found.findings
    found.seconds = time.monotonic() - started
    return found


def _locate(own: RecordedRun, stated: RecordedRun) -> tuple[StateDivergence | None, int | None]:
    """Return how the first states differ, if they do; otherwise the first step whose records or states part, or None."""

    def between(done: int) -> StateDivergence:
        return compare(own.state(done), stated.state(done))

    def differ(done: int) -> bool:
        difference = between(done)
        return bool(difference.tensors or difference.odd)

    if own.roots[0] != stated.roots[0]:
        state = between(0)
        if state.tensors or state.odd:
            return state, None
    return None, first_parting(own.transcript, stated.transcript, differ)


def _hold_what_is_the_same(own: RecordedRun, stated: RecordedRun, found: Divergence) -> None:
    """Hold the last state that both sides committed to, and the logs up to it, against records in which nothing parts.

    Raises:
        InvalidInput: one side's state or log is missing or is not the one it committed to.
    """
    steps = own.transcript.num_steps, stated.transcript.num_steps
    if steps[0] != steps[1]:
        text = f"one has {steps[0]} steps, the other {steps[1]}"
        found.findings.append(Explanation("other_length", "confirmed", text))
    done = max(own.roots.keys() & stated.roots.keys())
    first, second = (_undamaged(side, done) for side in (own, stated))
    difference = compare(first, second)
    alike = (
        f"no record of {min(steps)} steps parts, and none of {difference.compared} tensors after {done} steps"
    )
    found.notes.append(
        f"compared: {alike}; the logs up to there have their digests; other states were not read"
    )
    if difference.documents:
        found.notes.append(f"these differ, and hold no weights: {', '.join(difference.documents)}")
    pairs = zip(own.transcript.records, stated.transcript.records, strict=False)
    if other := sum(one.log != two.log for one, two in pairs):
        found.notes.append(f"the logs of {other} steps differ")


def _undamaged(side: RecordedRun, done: int) -> dict[str, Entry]:
    """Return the state that a run committed to after ``done`` steps, once the logs up to there have their digests."""
    borders = [steps_done for steps_done in side.roots if steps_done <= done]
    try:
        for start, end in pairwise(borders):
            side.directory.load_frames(side.transcript, start, end)
        return side.state(done)
    except (InvalidInput, Mismatch) as problem:
        raise InvalidInput(f"{side.directory.path}: damaged: {problem}") from None


def _compare_next(own: RecordedRun, stated: RecordedRun, step: int, found: Divergence) -> None:
    for done in stated.roots:
        if done > step and done in own.roots:
            found.after = done
            found.state = compare(own.state(done), stated.state(done))
            return
    found.notes.append(
        "the runs have no committed states after the same number of steps, so no tensors were compared"
    )


def _explain_pair(
    own: RecordedRun,
    stated: RecordedRun,
    source: JobSource,
    found: Divergence,
    device: str,
    seconds: float,
    tell: Tell | None,
) -> None:
    """Repeat the step on which two runs part under each one's log, and try causes out where one cannot be repeated."""
    step = found.step
    assert step is not None
    replay = open_replay(own.transcript.specification, source, device=device)
    if isinstance(replay, Deviation):
        found.notes.append(f"the job cannot be repeated here: {replay}")
        return
    start = max(done for done in own.roots if done <= step and done in stated.roots)
    records = own.transcript.record(step), stated.transcript.record(step)
    try:
        load_state(replay.session, own.state(start))
        for before in range(start, step):
            replay.follow(own.transcript.record(before), own.frame(before))
        common = copied_state(replay)
        # The numbers are one; each side goes on from its own grids, which its own measurements of noise have given it.
        other = {**common, **_grids_before(replay, stated, start, step)}
        frames = own.frame(step), stated.frame(step)
        bench = Bench(replay, other, records[1], frames[1])
        second = bench.repeat()
        first = bench.repeat(before=common, record=records[0], frame=frames[0])
        honest = [
            run is not None and not run.violations and f"{run.outcome.fingerprint:016x}" == record.fingerprint
            for run, record in zip((first, second), records, strict=True)
        ]
        if all(honest) and first is not None and second is not None:
            if not compare(first.entries, second.entries).tensors:
                _find_edits(((own, first), (stated, second)), step, found)
                return
            _same_computation(bench, OwnStep(common, records[0], frames[0]), first, second, found)
            return
        if not honest[0]:
            found.notes.append(
                f"{found.own} itself does not come out as it states when step {step} is repeated here"
            )
        diagnosis = Diagnosis(bench, stated.transcript, found, seconds=seconds, tell=tell)
        diagnosis.run(stated.state_or_note(step + 1, found), OwnStep(common, records[0], frames[0]))
    finally:
        replay.session.close()


def _find_edits(sides: tuple[tuple[RecordedRun, Repeated], ...], step: int, found: Divergence) -> None:
    """Say which side committed to another state than its own step, its fingerprint included, leads to."""
    for side, repeated in sides:
        committed = side.state_or_note(step + 1, found)
        if committed is None:
            continue
        difference = compare(repeated.entries, committed)
        if difference.tensors or difference.odd:
            names = ", ".join([t.name for t in difference.tensors] + list(difference.odd))
            text = (
                f"{side.directory.path}: the step, repeated under its own log, ends with the fingerprint that its record states; "
                f"the committed state is another one: {names}"
            )
            found.findings.append(Explanation("edited_weights", "confirmed", text))


def _grids_before(replay: Replay, side: RecordedRun, start: int, step: int) -> dict[str, Entry]:
    """Return the entries of a run's grids before ``step``: those committed after ``start`` steps and the log's changes since."""
    state = side.state(start)
    names = ("document/grids", "document/base-grids")
    if any(name not in state for name in names):
        raise InvalidInput(f"the state after {start} steps has no {' and no '.join(names)}")
    table, base = (GridTable.decode(bytes(state[name].data)) for name in names)
    frames = side.directory.load_frames(side.transcript, start, step) if step > start else {}
    for done, frame in frames.items():
        read = decode_frame(frame)
        change = read.find(SiteAddress(0, 0, Kind.GRID, 0))
        table = table if change is None else table.apply(change)
        extra = read.find(SiteAddress(0, 0, Kind.CALIBRATION, 0)) is not None
        base = table if extra or replay.session.is_calibration_step(done) else base
    return {
        name: Entry(name, "U8", (len(data),), data)
        for name, data in zip(names, (table.encode(), base.encode()), strict=True)
    }


def _same_computation(
    bench: Bench, own: OwnStep, first: Repeated, second: Repeated, found: Divergence
) -> None:
    """Both sides' logs can be followed: the computation is one, and only rounding decisions differ."""
    watch = Watch()
    watched = bench.repeat(before=own.before, record=own.record, frame=own.frame, watch=watch) or first
    found.state, found.after, found.how = (
        compare(first.entries, second.entries),
        bench.record.step + 1,
        "reconstructed",
    )
    found.loss = (first.outcome.loss, second.outcome.loss)
    found.makers = dict(watched.makers)
    text = (
        "from one state, each side's step follows from its own log without a breach of the rules: the computation is the same, "
        f"and {found.state.differing:,} elements differ by rounding decisions that noise has turned"
    )
    causes = [Explanation("last_bit_noise", "confirmed", text)]
    touched = {t.name for t in found.state.tensors if t.name in {f"model/{name}" for name in watched.makers}}
    sums = scattered(watched)
    if touched and touched <= sums and len(watched.makers) > len(sums):
        names = ", ".join(sorted(touched))
        causes.append(
            Explanation(
                "scatter_order",
                "fits",
                f"only {names} differ, whose gradient is a sum over look-ups; other tensors do not",
            )
        )
    software = Evidence(None, environment=found.environment).environment_of(("torch", "numpy"))
    if software:
        causes.append(Explanation("library_version", "fits", f"software differs in {software}"))
    found.findings = causes
    found.tries = bench.tries
