"""Which declared run, step, rank and slices one snapshot is of (needs torch).

found = trace_snapshot(OwnerFolder(path), ueid, seq, KnownChip(key), find_shipped)
found.parts[0].run, found.parts[0].match.steps_done, found.unexplained
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from tallystick.errors import InvalidInput, Mismatch, Nondeterminism, StoreError
from tallystick.execution.job import JobSource
from tallystick.fleet.agent.chip_log import NumberedFinding
from tallystick.fleet.agent.chip_record import Snapshot
from tallystick.fleet.provenance.matcher import SnapshotMatch
from tallystick.fleet.provenance.submission import DeclaredRun, OwnerFolder
from tallystick.fleet.provenance.verification import RunEvidence
from tallystick.integrations.run_replayer import RunReplayer
from tallystick.integrations.watching import (
    Inquiry,
    KnownChip,
    match_anywhere,
    match_claimed,
    open_run,
    openings_of,
    read_chip,
)


@dataclass(frozen=True)
class TracedPart:
    """The memory of one program of a snapshot, and which declared run's it is.

    Attributes:
        program: what stands in front of its regions' names: nothing where the chip has one program.
        run, root: the run's name in the folder, and its root, hexadecimal.
        rank, ranks: whose part the chip held, of how many.
        match: the step, and the slices.
    """

    program: str
    run: str
    root: str
    rank: int
    ranks: int
    match: SnapshotMatch


@dataclass(frozen=True)
class SnapshotTrace:
    """Which declared runs a snapshot is of.

    Attributes:
        parts: what was found, by program.
        unexplained: bytes of no part.
        size: bytes in all.
        named: how many declared runs name the chip; of no other was a state looked at.
        declared: how many there are.
        unread: those that could not be looked at, and why.
        findings: what is wrong with the chip's log.
    """

    parts: tuple[TracedPart, ...]
    unexplained: int
    size: int
    named: int
    declared: int
    unread: tuple[tuple[str, str], ...]
    findings: tuple[NumberedFinding, ...]


def trace_snapshot(
    folder: OwnerFolder,
    ueid: str,
    seq: int,
    chip: KnownChip,
    source_of: Callable[[str], JobSource],
    *,
    search: int = 2000,
) -> SnapshotTrace:
    """Return what the memory was that chip ``ueid`` signed as its record ``seq``.

    Looked at first is the run whose pre-commitment the chip had logged: the step that its report states, then all its states,
    if it has no more than ``search`` steps; then the steps that other reports state; then all states of these.

    Raises:
        InvalidInput: the record is no snapshot that the owner opens, or a document is malformed.
        StoreError: one is missing.
    """
    records, findings, _ = read_chip(folder, ueid, chip, Inquiry(bytes(32)))
    logged = [each for each in records if each.record.seq == seq and isinstance(each.record.event, Snapshot)]
    if not logged:
        raise InvalidInput(f"chip {ueid}: record {seq} of its log is no snapshot")
    taken = openings_of(folder, ueid, logged)
    if not taken:
        raise InvalidInput(
            f"chip {ueid}: snapshot {seq}: the memory that the chip signed was not handed over"
        )
    (item,) = taken
    declared = folder.runs()
    named = [run for run in declared if ueid in run.report.precommit.ranks]
    own = [run for run in named if run.report.precommit.digest() == item.event.run]
    others = [run for run in named if run not in own]
    anywhere = functools.partial(match_anywhere, most=search)
    found, unread = dict[str, TracedPart](), dict[str, str]()
    for match, runs in ((match_claimed, own), (anywhere, own), (match_claimed, others), (anywhere, others)):
        for run in runs:
            if item.is_done or run.name in unread:
                continue
            problem = _problem_of(run, source_of, functools.partial(match, run, taken=taken))
            if problem is not None:
                unread[run.name] = problem
            ranks = run.report.precommit.ranks
            for program, (root, part) in item.parts.items():
                if program not in found:
                    found[program] = TracedPart(program, run.name, root, ranks.index(ueid), len(ranks), part)
    parts = tuple(found[program] for program in sorted(found))
    explained = sum(part.match.size - part.match.unexplained_bytes for part in parts)
    return SnapshotTrace(
        parts, item.opening.size - explained, item.opening.size, len(named), len(declared),
        tuple(unread.items()), tuple(findings),
    )  # fmt: skip


def _problem_of(
    run: DeclaredRun, source_of: Callable[[str], JobSource], do: Callable[[RunReplayer], object]
) -> str | None:
    """Do something with a run's copy here; return why that was not possible, None if it was."""
    replayers, evidence = dict[str, RunReplayer](), dict[str, RunEvidence]()
    open_run(run, source_of, replayers, evidence)
    if run.name not in replayers:
        found = evidence[run.name]
        return found.problem or found.outcomes[0].text
    try:
        do(replayers[run.name])
    except (InvalidInput, Mismatch, StoreError, Nondeterminism) as problem:
        return str(problem)[:300]
    return None
