"""Where and why a run leaves what was repeated, or two runs part: the step, its states, and a diagnosis of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

from tallystick.commit.encoding import parse_hex_float
from tallystick.commit.state import Entry
from tallystick.diagnosis.causes import Divergence, Evidence, Finding, fitting
from tallystick.diagnosis.divergence import StateDivergence, compare
from tallystick.diagnosis.repetition import Bench, Repeated, State, copied_state
from tallystick.diagnosis.search import EFFORT, Diagnosis, OwnStep, Tell, scattered
from tallystick.errors import InvalidInput, Mismatch, Nondeterminism
from tallystick.execution.job import JobSource
from tallystick.execution.operations import Watch
from tallystick.execution.snapshot import load_state
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind, SiteAddress, decode_frame
from tallystick.roles.audit_report import AuditReport, Deviation, SegmentResult
from tallystick.roles.replay import Replay, open_replay
from tallystick.run.documents import Specification, StepRecord
from tallystick.run.program import compare_programs
from tallystick.run.transcript import Transcript
from tallystick.store.files import RunDirectory

# -- an audit -------------------------------------------------------------------------------------


def explain_audit(
    directory: RunDirectory,
    source: JobSource,
    report: AuditReport,
    *,
    jitter: bool = False,
    device: str = "cpu",
    seconds: float = EFFORT,
    tell: Tell | None = None,
) -> Divergence | None:
    """Return where and why the run in ``directory`` leaves what was repeated; None if the audit accuses nobody."""
    if report.verdict not in ("mismatch", "log_violation"):
        return None
    started = time.monotonic()
    segment = next(s for s in report.segments if s.verdict == report.verdict)
    step = segment.first_step
    assert step is not None
    found = Divergence("here", "trainer", step, environment=dict(report.environment))
    first = segment.deviations[0]
    if first.subject == "evidence":
        cause = "broken_log" if "log" in first.own else "broken_state"
        found.findings.append(Finding(cause, "confirmed", first.own))
        return found
    transcript = directory.load_transcript()
    replay = open_replay(transcript.specification, source, jitter=jitter, device=device)
    if isinstance(replay, Deviation):
        found.notes.append(f"the step cannot be repeated here: {replay}")
        return found
    try:
        _explain_segment(directory, transcript, replay, segment, found, seconds, tell)
    except (InvalidInput, Mismatch, Nondeterminism) as problem:
        found.notes.append(f"looking for the cause ended early: {problem}")
    finally:
        replay.session.close()
    found.seconds = time.monotonic() - started
    return found


def _explain_segment(
    directory: RunDirectory,
    transcript: Transcript,
    replay: Replay,
    segment: SegmentResult,
    found: Divergence,
    seconds: float,
    tell: Tell | None,
) -> None:
    step = found.step
    assert step is not None
    roots = {checkpoint.steps_done: checkpoint.state_root for checkpoint in transcript.checkpoints()}
    frames = directory.load_frames(transcript, segment.start, segment.end)
    load_state(replay.session, directory.load_committed(segment.start, roots[segment.start]))
    for before in range(segment.start, step):
        replay.follow(transcript.record(before), frames[before])
    bench = Bench(replay, copied_state(replay), transcript.record(step), frames[step])
    diagnosis = Diagnosis(bench, transcript, found, seconds=seconds, tell=tell)
    diagnosis.run(_committed(directory, roots, step + 1, found))
    if found.state is None and diagnosis.own is not None and segment.end > step + 1:
        _compare_at_end(directory, transcript, replay, diagnosis.own, frames, segment.end, found)


def _committed(directory: RunDirectory, roots: dict[int, str], done: int, found: Divergence) -> State | None:
    if done not in roots:
        return None
    try:
        return directory.load_committed(done, roots[done])
    except (InvalidInput, Mismatch) as problem:
        found.notes.append(f"the stated state after {done} steps cannot be read: {problem}")
        return None


def _compare_at_end(
    directory: RunDirectory,
    transcript: Transcript,
    replay: Replay,
    own: Repeated,
    frames: dict[int, bytes],
    end: int,
    found: Divergence,
) -> None:
    """Compare the next states that both sides have: the committed ones, some steps after the parting."""
    assert found.step is not None
    stated = _committed(directory, {c.steps_done: c.state_root for c in transcript.checkpoints()}, end, found)
    if stated is None:
        return
    load_state(replay.session, own.entries)
    try:
        for step in range(found.step + 1, end):
            replay.follow(transcript.record(step), frames[step])
    except (InvalidInput, Nondeterminism) as problem:
        found.notes.append(
            f"the log cannot be followed up to the committed state after {end} steps: {problem}"
        )
        return
    found.after, found.state = end, compare(copied_state(replay), stated)


# -- two runs, two states ------------------------------------------------------------------------


def first_parting(own: Transcript, stated: Transcript, differ: Callable[[int], bool]) -> int | None:
    """Return the first step whose data, loss, schedule or state differ, by the two runs' records; None if none does.

    ``differ`` is asked whether the states committed after so many steps hold other numbers, where only their roots differ.
    """
    for mine, theirs in zip(own.records, stated.records, strict=False):
        same_log = replace(mine, log=theirs.log, log_bytes=theirs.log_bytes)
        if same_log == theirs:
            continue
        if replace(same_log, state_root=theirs.state_root) != theirs:
            return mine.step
        if mine.state_root is not None and theirs.state_root is not None and differ(mine.step + 1):
            return mine.step
    return None


def specification_differences(own: Specification, stated: Specification) -> dict[str, tuple[str, str]]:
    """Return in what two specifications order different work: name to (own, stated); versions and notes left out."""
    pairs: dict[str, tuple[str, str]] = {}
    for name in ("seed", "steps", "checkpoint_every", "accumulation", "world_size"):
        pairs[name] = (str(getattr(own, name)), str(getattr(stated, name)))
    programs = compare_programs(own.job.program, stated.job.program)
    pairs |= {each.subject: (each.own, each.stated) for each in programs}
    pairs["job source"] = (own.job.source_digest, stated.job.source_digest)
    pairs["dataset"] = (str(own.job.dataset_digest), str(stated.job.dataset_digest))
    pairs["policy"] = (own.policy.name, stated.policy.name)
    for what, mine, theirs in (
        ("setting", own.job.settings, stated.job.settings),
        ("policy", own.policy.parameters, stated.policy.parameters),
    ):
        for name in sorted(mine.keys() | theirs.keys()):
            pairs[f"{what} {name}"] = (str(mine.get(name, "default")), str(theirs.get(name, "default")))
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def record_differences(own: StepRecord, stated: StepRecord, batches: Mapping[str, int]) -> list[Finding]:
    """Return what two records of one step say of different work: data, hyper-parameters, a skipped optimizer.

    ``batches`` are the steps of our own run by their batches' digests.
    """
    found: list[Finding] = []
    if own.batch != stated.batch:
        there = batches.get(stated.batch)
        where = "" if there is None else f"; the latter is that of our step {there}"
        text = f"by their own records step {own.step} has other data: batch {_short(own.batch)} against {_short(stated.batch)}"
        found.append(Finding("other_data", "confirmed", text + where))
    if own.micro_batches != stated.micro_batches:
        text = f"by their own records step {own.step} has {own.micro_batches} micro-batches against {stated.micro_batches}"
        found.append(Finding("other_data", "confirmed", text))
    mine, theirs = ({(g, n): v for g, n, v in record.schedule} for record in (own, stated))
    for group, name in sorted(mine.keys() | theirs.keys()):
        pair = mine.get((group, name)), theirs.get((group, name))
        if (
            pair[0] == pair[1] or name == "initial_lr"
        ):  # a note of the scheduler's, which the optimizer does not read
            continue
        shown = " against ".join(_value(value) for value in pair)
        cause = "other_rate" if name == "lr" else "other_hyperparameter"
        text = f"by their own records step {own.step} has {name} of group {group} {shown}"
        found.append(Finding(cause, "confirmed", text))
    if own.skipped != stated.skipped:
        who = "first" if own.skipped else "second"
        text = f"by their own records the {who} run leaves the optimizer out in step {own.step}, the other does not"
        found.append(Finding("skipped_step", "confirmed", text))
    return found


def _value(value: str | bool | int | None) -> str:
    if not isinstance(value, str):
        return "none" if value is None else str(value)
    return f"{parse_hex_float(value, what='a hyper-parameter'):.9g}"


def _read_documents(
    mine: Transcript, theirs: Transcript, found: Divergence
) -> tuple[list[Finding], int | None]:
    """Return in what two runs are different work by their own documents, and the first step whose records say so.

    What is not compared is noted.
    """
    said: list[Finding] = []
    orders = specification_differences(mine.specification, theirs.specification)
    if orders:
        shown = [f"{name}: {_short(a)} against {_short(b)}" for name, (a, b) in orders.items()]
        text = "; ".join(shown[:6]) + (f"; and {len(shown) - 6} more" if len(shown) > 6 else "")
        said.append(Finding("other_specification", "confirmed", f"the runs were ordered differently: {text}"))
    lengths = mine.num_steps, theirs.num_steps
    if lengths[0] != lengths[1]:
        found.notes.append(
            f"the runs have {lengths[0]} and {lengths[1]} recorded steps: those after {min(lengths)} were not compared"
        )
    batches = {record.batch: record.step for record in reversed(mine.records)}
    for one, other in zip(mine.records, theirs.records, strict=False):
        if (one.step, one.rank) != (other.step, other.rank):
            found.notes.append(
                f"the runs have other ranks: records from step {one.step} on were not compared"
            )
            break
        if differences := record_differences(one, other, batches):
            return said + differences, one.step
    return said, None


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
    mine, theirs = own.load_partial(), stated.load_partial()
    found = Divergence(str(own.path), str(stated.path))
    versions = (mine.specification.versions, theirs.specification.versions)
    names = sorted(versions[0].keys() | versions[1].keys())
    pairs = {name: (versions[0].get(name, "none"), versions[1].get(name, "none")) for name in names}
    found.environment = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    said, other_work = _read_documents(mine, theirs, found)
    roots = [{c.steps_done: c.state_root for c in transcript.checkpoints()} for transcript in (mine, theirs)]

    def between(done: int) -> StateDivergence:
        return compare(own.load_committed(done, roots[0][done]), stated.load_committed(done, roots[1][done]))

    def differ(done: int) -> bool:
        difference = between(done)
        return bool(difference.tensors or difference.odd)

    step = None
    if roots[0][0] != roots[1][0]:
        found.state = between(0)
    if found.state is None or not (found.state.tensors or found.state.odd):
        found.state, step = None, first_parting(mine, theirs, differ)
    if found.state is not None and (found.state.tensors or found.state.odd):
        found.step, found.after = 0, 0
        found.findings.append(Finding("initial_state", "confirmed", "the runs begin with different numbers"))
        guesses = fitting(Evidence(found.state, environment=found.environment, one_step=False))
        found.findings += [guess for guess in guesses if guess.cause in ("last_bit_noise", "denormals")]
    elif step is not None:
        found.step = step
        start = max(done for done in roots[0] if done <= step and done in roots[1])
        if other_work == step:
            found.notes.append(
                f"step {step} was not repeated: by their own records the runs do different work in it"
            )
        elif source is None:
            found.notes.append(f"nothing was repeated: {unasked}")
        else:
            try:
                _explain_pair(own, mine, stated, theirs, source, start, step, found, device, seconds, tell)
            except (InvalidInput, Mismatch, Nondeterminism) as problem:
                found.notes.append(f"looking for the cause ended early: {problem}")
        if found.state is None:
            _compare_next(own, mine, stated, theirs, step, found)
    else:
        _hold_what_is_the_same((own, mine), (stated, theirs), found)
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


def _hold_what_is_the_same(
    own: tuple[RunDirectory, Transcript], stated: tuple[RunDirectory, Transcript], found: Divergence
) -> None:
    """Hold the last state that both sides committed to, and the logs up to it, against records in which nothing parts.

    Raises:
        InvalidInput: one side's state or log is missing or is not the one it committed to.
    """
    steps = own[1].num_steps, stated[1].num_steps
    if steps[0] != steps[1]:
        text = f"one has {steps[0]} steps, the other {steps[1]}"
        found.findings.append(Finding("other_length", "confirmed", text))
    done = max({c.steps_done for c in own[1].checkpoints()} & {c.steps_done for c in stated[1].checkpoints()})
    first, second = (_undamaged(run, transcript, done) for run, transcript in (own, stated))
    difference = compare(first, second)
    alike = (
        f"no record of {min(steps)} steps parts, and none of {difference.compared} tensors after {done} steps"
    )
    found.notes.append(
        f"compared: {alike}; the logs up to there have their digests; other states were not read"
    )
    if difference.documents:
        found.notes.append(f"these differ, and hold no weights: {', '.join(difference.documents)}")
    pairs = zip(own[1].records, stated[1].records, strict=False)
    if other := sum(one.log != two.log for one, two in pairs):
        found.notes.append(f"the logs of {other} steps differ")


def _undamaged(run: RunDirectory, transcript: Transcript, done: int) -> dict[str, Entry]:
    """Return the state that a run committed to after ``done`` steps, once the logs up to there have their digests."""
    borders = [checkpoint for checkpoint in transcript.checkpoints() if checkpoint.steps_done <= done]
    try:
        for start, end in pairwise(checkpoint.steps_done for checkpoint in borders):
            run.load_frames(transcript, start, end)
        return run.load_committed(done, borders[-1].state_root)
    except (InvalidInput, Mismatch) as problem:
        raise InvalidInput(f"{run.path}: damaged: {problem}") from None


def _short(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:16]}.."


def _compare_next(
    own: RunDirectory,
    mine: Transcript,
    stated: RunDirectory,
    theirs: Transcript,
    step: int,
    found: Divergence,
) -> None:
    roots = {c.steps_done: c.state_root for c in mine.checkpoints()}
    for checkpoint in theirs.checkpoints():
        done = checkpoint.steps_done
        if done > step and done in roots:
            found.after = done
            found.state = compare(
                own.load_committed(done, roots[done]), stated.load_committed(done, checkpoint.state_root)
            )
            return
    found.notes.append(
        "the runs have no committed states after the same number of steps, so no tensors were compared"
    )


def _explain_pair(
    own: RunDirectory,
    mine: Transcript,
    stated: RunDirectory,
    theirs: Transcript,
    source: JobSource,
    start: int,
    step: int,
    found: Divergence,
    device: str,
    seconds: float,
    tell: Tell | None,
) -> None:
    """Repeat the step on which two runs part under each one's log, and try causes out where one cannot be repeated."""
    replay = open_replay(mine.specification, source, device=device)
    if isinstance(replay, Deviation):
        found.notes.append(f"the job cannot be repeated here: {replay}")
        return
    try:
        roots = {c.steps_done: c.state_root for c in mine.checkpoints()}
        load_state(replay.session, own.load_committed(start, roots[start]))
        for before in range(start, step):
            replay.follow(mine.record(before), own.load_frames(mine, before, before + 1)[before])
        common = copied_state(replay)
        # The numbers are one; each side goes on from its own grids, which its own measurements of noise have given it.
        other = {**common, **_grids_before(replay, stated, theirs, start, step)}
        frames = own.load_frames(mine, step, step + 1)[step], stated.load_frames(theirs, step, step + 1)[step]
        bench = Bench(replay, other, theirs.record(step), frames[1])
        second = bench.repeat()
        first = bench.repeat(before=common, record=mine.record(step), frame=frames[0])
        honest = [
            run is not None and not run.violations and f"{run.outcome.fingerprint:016x}" == record.fingerprint
            for run, record in ((first, mine.record(step)), (second, theirs.record(step)))
        ]
        sides = ((own, mine, first), (stated, theirs, second))
        if all(honest) and first is not None and second is not None:
            if not compare(first.entries, second.entries).tensors:
                _find_edits(sides, step, found)
                return
            _same_computation(bench, common, mine.record(step), frames[0], first, second, found)
            return
        if not honest[0]:
            found.notes.append(
                f"{found.own} itself does not come out as it states when step {step} is repeated here"
            )
        roots = {c.steps_done: c.state_root for c in theirs.checkpoints()}
        diagnosis = Diagnosis(bench, theirs, found, seconds=seconds, tell=tell)
        diagnosis.run(
            _committed(stated, roots, step + 1, found), OwnStep(common, mine.record(step), frames[0])
        )
    finally:
        replay.session.close()


def _find_edits(
    sides: tuple[tuple[RunDirectory, Transcript, Repeated | None], ...], step: int, found: Divergence
) -> None:
    """Say which side committed to another state than its own step, its fingerprint included, leads to."""
    for run, transcript, repeated in sides:
        roots = {c.steps_done: c.state_root for c in transcript.checkpoints()}
        committed = _committed(run, roots, step + 1, found)
        if committed is None or repeated is None:
            continue
        difference = compare(repeated.entries, committed)
        if difference.tensors or difference.odd:
            names = ", ".join([t.name for t in difference.tensors] + list(difference.odd))
            text = (
                f"{run.path}: the step, repeated under its own log, ends with the fingerprint that its record states; "
                f"the committed state is another one: {names}"
            )
            found.findings.append(Finding("edited_weights", "confirmed", text))


def _grids_before(
    replay: Replay, run: RunDirectory, transcript: Transcript, start: int, step: int
) -> dict[str, Entry]:
    """Return the entries of a run's grids before ``step``: those committed after ``start`` steps and the log's changes since."""
    root = {c.steps_done: c.state_root for c in transcript.checkpoints()}[start]
    state = run.load_committed(start, root)
    names = ("document/grids", "document/base-grids")
    if any(name not in state for name in names):
        raise InvalidInput(f"the state after {start} steps has no {' and no '.join(names)}")
    table, base = (GridTable.decode(bytes(state[name].data)) for name in names)
    for done, frame in run.load_frames(transcript, start, step).items() if step > start else ():
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
    bench: Bench,
    before: State,
    record: StepRecord,
    frame: bytes,
    first: Repeated,
    second: Repeated,
    found: Divergence,
) -> None:
    """Both sides' logs can be followed: the computation is one, and only rounding decisions differ."""
    watch = Watch()
    watched = bench.repeat(before=before, record=record, frame=frame, watch=watch) or first
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
    causes = [Finding("last_bit_noise", "confirmed", text)]
    touched = {t.name for t in found.state.tensors if t.name in {f"model/{name}" for name in watched.makers}}
    sums = scattered(watched)
    if touched and touched <= sums and len(watched.makers) > len(sums):
        names = ", ".join(sorted(touched))
        causes.append(
            Finding(
                "scatter_order",
                "fits",
                f"only {names} differ, whose gradient is a sum over look-ups; other tensors do not",
            )
        )
    software = Evidence(None, environment=found.environment).environment_of(("torch", "numpy"))
    if software:
        causes.append(Finding("library_version", "fits", f"software differs in {software}"))
    found.findings = causes
    found.tries = bench.tries
