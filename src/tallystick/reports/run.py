"""What a run directory holds: read without torch, finished or not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.text import Text

from tallystick.commit.encoding import parse_hex_float
from tallystick.errors import InvalidInput, Mismatch, StoreError
from tallystick.evidence.run_verifier import GRIDS, site_sizes
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind, SiteAddress, decode_frame
from tallystick.numerics.log_bytes import Reader
from tallystick.numerics.policy import move_budget
from tallystick.reports.layout import GOOD, UNSURE, Page, Row, Table, counted, duration, page, picked, share
from tallystick.run.documents import UNANNOUNCED, Specification
from tallystick.run.transcript import Transcript
from tallystick.store.files import RunDirectory

DIRECTORY = "directory"  # the part of a frame that says where each site's payload lies
ROUNDED = (Kind.LOSS, Kind.GRADIENT, Kind.STATE, Kind.BUFFER)


@dataclass
class KindOfSite:
    """What one kind of site wrote into the log, over all steps read.

    Attributes:
        n_bytes, payloads: of the log.
        entries: roundings or branches that sparse logs state.
        residues: elements of sites that are logged by residues.
        open: roundings that a dishonest log could have chosen, about: two for each entry, and what residues may move.
    """

    n_bytes: int = 0
    payloads: int = 0
    entries: int = 0
    residues: int = 0
    open: int = 0


@dataclass(frozen=True)
class LogSize:
    """The log's size by kind of site, over all recorded steps."""

    kinds: Mapping[str, KindOfSite]

    @property
    def open_roundings(self) -> int:
        """Roundings that a dishonest log could have chosen, about; decisions left out."""
        return sum(self.kinds[kind.name.lower()].open for kind in ROUNDED)


@dataclass(frozen=True)
class RunSummary:
    """One run as its directory tells it.

    Attributes:
        directory: where it lies.
        transcript: as far as it is written.
        finished: whether the statement is there.
        log: sizes by kind of site; None where the log was not read, ``log_problem`` saying why.
        recorded_now, seconds: steps and time by phase, for a run recorded just now.
    """

    directory: str
    transcript: Transcript
    finished: bool
    log: LogSize | None = None
    log_problem: str | None = None
    recorded_now: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def specification(self) -> Specification:
        """What was ordered."""
        return self.transcript.specification

    @property
    def steps(self) -> int:
        """Steps recorded so far."""
        return self.transcript.num_steps

    @property
    def parameters(self) -> int:
        """Trained numbers: the sizes of the gradient sites, added up."""
        sizes = site_sizes(self.specification)
        return sum(size for (kind, _), size in sizes.items() if kind == Kind.GRADIENT)

    @property
    def log_bytes(self) -> int:
        """Bytes of all log frames."""
        return sum(record.log_bytes for record in self.transcript.records)

    @property
    def log_bytes_per_step(self) -> float | None:
        """Mean size of a step's log; None before the first step."""
        return self.log_bytes / self.steps if self.steps else None

    @property
    def log_bits_per_parameter_step(self) -> float | None:
        """Bits of log for each parameter in each step; None before the first step."""
        amount = self.parameters * self.steps
        return 8 * self.log_bytes / amount if amount else None

    @property
    def freedom_estimate(self) -> float | None:
        """About which share of roundings a dishonest log could have chosen.

        An honest log states what lies within the band, a dishonest one has twice the band; residues may move what the
        auditor's budget allows. The audit measures it.
        """
        if self.log is None or not self.steps:
            return None
        sizes = site_sizes(self.specification)
        rounded = sum(size for (kind, _), size in sizes.items() if kind in ROUNDED)
        return min(1.0, self.log.open_roundings / (rounded * self.steps)) if rounded else None

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        stated = self.specification
        return {
            **picked(
                self,
                "finished steps parameters log_bytes log_bytes_per_step log_bits_per_parameter_step log_problem",
            ),
            **picked(self, "freedom_estimate recorded_now seconds"),
            **picked(stated, "initial_state seed checkpoint_every accumulation world_size versions"),
            **picked(stated.notes, "lifted_casts densified"),
            "run": self.directory,
            "policy": stated.policy.name,
            "policy_parameters": stated.policy.parameters,
            "steps_ordered": stated.steps,
            "root": self.transcript.root().hex() if self.finished else None,
            "state_root": self.transcript.checkpoints()[-1].state_root,
            "log_kinds": self._kinds(),
            "job": picked(stated.job, "path source_digest dataset_digest settings"),
            "checkpoints": [
                {"steps": checkpoint.steps_done, "state_root": checkpoint.state_root}
                for checkpoint in self.transcript.checkpoints()
            ],
            "loss": self._loss(),
        }

    def __rich__(self) -> Page:
        """Return the page that ``tally show`` prints."""
        headline = f"{self.state()} under policy {self.specification.policy.name}"
        if not self.finished:
            headline += "; tally record --resume goes on with it, or says what stops it"
        style = GOOD if self.finished else UNSURE
        return page(headline, style, self.rows(), *self.kind_table())

    def state(self) -> str:
        """Return whether the run is finished, and how many steps it has."""
        if self.finished:
            return f"finished: {counted(self.steps, 'step')}"
        if self.specification.steps == UNANNOUNCED:
            return f"not finished: {counted(self.steps, 'step')}"
        return f"not finished: {self.steps:,} of {counted(self.specification.steps, 'step')}"

    def rows(self) -> list[Row]:
        """Return what was ordered, what came out, and the size of the log."""
        versions = ", ".join(f"{name} {version}" for name, version in self.specification.versions.items())
        return [*self._job_rows(), *self._state_rows(), *self._log_rows(), ("versions", versions)]

    def summary(self) -> Page:
        """Return the short page that ``tally record`` ends with."""
        rows = [*self._state_rows(), *self._log_rows(), ("time", duration(self.seconds))]
        headline = (
            f"recorded {counted(self.recorded_now, 'step')} under policy {self.specification.policy.name}"
        )
        if self.recorded_now != self.steps:
            headline += f"; the run has {self.steps:,}"
        return page(headline, GOOD, rows)

    def _job_rows(self) -> list[Row]:
        stated = self.specification
        settings = " ".join(f"{name}={value}" for name, value in sorted(stated.job.settings.items()))
        rows: list[Row] = [
            ("job", stated.job.path),
            ("job source", stated.job.source_digest),
            ("settings", settings or "the job's own"),
            ("dataset", stated.job.dataset_digest or "none stated"),
            (
                "order",
                f"{counted(stated.steps, 'step')}, a committed state every {stated.checkpoint_every:,}, seed {stated.seed}, "
                f"policy {stated.policy.name}",
            ),
        ]
        for label, names in (
            ("casts lifted", stated.notes.lifted_casts),
            ("densified", stated.notes.densified),
        ):
            if names:
                rows.append((label, ", ".join(names)))
        return rows

    def _state_rows(self) -> list[Row]:
        last = self.transcript.checkpoints()[-1]
        rows: list[Row] = [("run", self.directory)]
        if self.finished:
            rows.append(("root", self.transcript.root().hex()))
        rows.append(("final state" if self.finished else "last state", last.state_root))
        if not self.finished:
            rows.append(("", f"committed after {counted(last.steps_done, 'step')}"))
        loss = self._loss()
        if loss is not None:
            rows.append(("loss", f"{loss[0]:.4g} in the first step, {loss[1]:.4g} in the last"))
        rows.append(("parameters", f"{self.parameters:,}"))
        return rows

    def _log_rows(self) -> list[Row]:
        per_step, bits = self.log_bytes_per_step, self.log_bits_per_parameter_step
        if per_step is None or bits is None:
            return [("log", "empty")]
        rows: list[Row] = [("log", f"{per_step:,.1f} bytes/step, {bits:.3g} bits/parameter/step")]
        if self.log_problem is not None:
            rows.append(("", Text(f"not read: {self.log_problem}", style=UNSURE)))
        estimate = self.freedom_estimate
        if estimate is not None:
            rows.append(("freedom", f"about {share(estimate)} of roundings; tally audit measures it"))
        return rows

    def _loss(self) -> tuple[float, float] | None:
        losses = [record.loss for record in self.transcript.records if record.loss is not None]
        if not losses:
            return None
        first, last = (parse_hex_float(text, what="loss") for text in (losses[0], losses[-1]))
        return first, last

    def _kinds(self) -> dict[str, object] | None:
        if self.log is None:
            return None
        return {
            name: {"bytes": kind.n_bytes, **picked(kind, "payloads entries residues")}
            for name, kind in self.log.kinds.items()
        }

    def kind_table(self) -> list[Table]:
        """Return the log's size by kind of site as one table; nothing where it was not read or is empty."""
        if self.log is None or not self.steps:
            return []
        columns = ("log by kind of site", "bytes/step", "share", "entries/step", "residues/step")
        rows = [
            (
                name,
                f"{kind.n_bytes / self.steps:,.1f}",
                share(kind.n_bytes / max(self.log_bytes, 1)),
                *(f"{count / self.steps:,.1f}" if count else "" for count in (kind.entries, kind.residues)),
            )
            for name, kind in self.log.kinds.items()
            if kind.n_bytes
        ]
        residues = any(kind.residues for kind in self.log.kinds.values())
        return [Table(columns if residues else columns[:4], rows, numbers=(1, 2, 3, 4))]


def read_run(
    directory: RunDirectory,
    *,
    read_log: bool = True,
    recorded_now: int = 0,
    seconds: Mapping[str, float] | None = None,
) -> RunSummary:
    """Return the report on ``directory``; an unreadable log is part of the report.

    Raises:
        InvalidInput: the specification is missing, or a document is malformed.
        Mismatch: the documents of a finished run contradict each other.
    """
    transcript = directory.load_partial()
    finished = os.path.lexists(directory.statement_path)
    log: LogSize | None = None
    problem: str | None = None
    if read_log:
        try:
            log = _measure(directory, transcript)
        except (InvalidInput, Mismatch, StoreError) as refused:
            problem = str(refused)
    return RunSummary(str(directory.path), transcript, finished, log, problem, recorded_now, seconds or {})


def _measure(directory: RunDirectory, transcript: Transcript) -> LogSize:
    kinds = {name: KindOfSite() for name in (*(kind.name.lower() for kind in Kind), DIRECTORY)}
    every, sizes = transcript.specification.checkpoint_every, site_sizes(transcript.specification)
    table = _first_grids(directory, transcript)
    for start in range(0, transcript.num_steps, every):
        end = min(start + every, transcript.num_steps)
        for data in directory.load_frames(transcript, start, end).values():
            rest = len(data)
            frame = decode_frame(data)
            change = frame.find(SiteAddress(0, 0, Kind.GRID, 0))
            table = table if table is None or change is None else table.apply(change)
            for address, payload in frame:
                found = kinds[Kind(address.kind).name.lower()]
                found.n_bytes += len(payload)
                found.payloads += 1
                rest -= len(payload)
                place = (address.kind, address.ordinal)
                grid = None if table is None else table.sites.get(place)
                if address.kind != Kind.DECISION and grid is not None and grid.residue_bits:
                    size = sizes.get(place, 0)
                    found.residues += size
                    found.open += move_budget(grid, size)
                else:
                    count = _entries_of(Kind(address.kind), payload)
                    found.entries += count
                    found.open += 2 * count
            kinds[DIRECTORY].n_bytes += rest
    return LogSize(kinds)


def _first_grids(directory: RunDirectory, transcript: Transcript) -> GridTable | None:
    """The grids before the first step, which belong to the initial state; None where the policy has no residues."""
    if not transcript.specification.policy.parameters.get("residue_bits"):
        return None
    entries = directory.load_checkpoint(0)
    if GRIDS not in entries:
        raise InvalidInput(f"the initial state has no entry {GRIDS}")
    return GridTable.decode(bytes(entries[GRIDS].data))


def _entries_of(kind: Kind, payload: bytes) -> int:
    """The count that a site's entries begin with (spec/rounding-log.md); grids and calibrations have none."""
    if kind in (Kind.GRID, Kind.CALIBRATION):
        return 0
    reader = Reader(payload, "log")
    if kind == Kind.DECISION:
        reader.varint("band exponent")
        reader.width()
    return reader.varint("count")
