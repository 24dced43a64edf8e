"""What a run directory holds: read without torch, finished or not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tallystick.commit.encoding import parse_hex_float
from tallystick.errors import InvalidInput, Mismatch, StoreError
from tallystick.evidence.run_verifier import GRIDS, site_sizes
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind, SiteAddress, decode_frame
from tallystick.numerics.policy import move_budget
from tallystick.reports.layout import GOOD, QUIET, UNSURE, Row, counted, duration, page, share
from tallystick.run.documents import Specification
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
class RunReport:
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
            "run": self.directory,
            "finished": self.finished,
            "policy": stated.policy.name,
            "steps": self.steps,
            "steps_ordered": stated.steps,
            "root": self.transcript.root().hex() if self.finished else None,
            "state_root": self.transcript.checkpoints()[-1].state_root,
            "initial_state": stated.initial_state,
            "parameters": self.parameters,
            "log_bytes": self.log_bytes,
            "log_bytes_per_step": self.log_bytes_per_step,
            "log_bits_per_parameter_step": self.log_bits_per_parameter_step,
            "log_kinds": self._kinds(),
            "log_problem": self.log_problem,
            "freedom_estimate": self.freedom_estimate,
            "job": {
                "path": stated.job.path,
                "source_digest": stated.job.source_digest,
                "dataset_digest": stated.job.dataset_digest,
                "settings": dict(stated.job.settings),
            },
            "policy_parameters": dict(stated.policy.parameters),
            "seed": stated.seed,
            "checkpoint_every": stated.checkpoint_every,
            "accumulation": stated.accumulation,
            "world_size": stated.world_size,
            "checkpoints": [
                {"steps": checkpoint.steps_done, "state_root": checkpoint.state_root}
                for checkpoint in self.transcript.checkpoints()
            ],
            "loss": self._loss(),
            "lifted_casts": list(stated.notes.lifted_casts),
            "densified": list(stated.notes.densified),
            "versions": dict(stated.versions),
            "recorded_now": self.recorded_now,
            "seconds": dict(self.seconds),
        }

    def __rich__(self) -> RenderableType:
        """Return the page that ``tally show`` prints."""
        if self.finished:
            headline, style = f"finished: {counted(self.steps, 'step')} under policy {self._policy()}", GOOD
        else:
            headline = (
                f"not finished: {self.steps:,} of {counted(self.specification.steps, 'step')} under policy "
                f"{self._policy()}; tally record --resume goes on with it"
            )
            style = UNSURE
        rows = [*self._job_rows(), *self._state_rows(), *self._log_rows()]
        rows.append(("versions", ", ".join(f"{k} {v}" for k, v in self.specification.versions.items())))
        return page(headline, style, rows, *self._kind_table())

    def summary(self) -> RenderableType:
        """Return the short page that ``tally record`` ends with."""
        rows = [*self._state_rows(), *self._log_rows(), ("time", duration(self.seconds))]
        headline = f"recorded {counted(self.recorded_now, 'step')} under policy {self._policy()}"
        if self.recorded_now < self.steps:
            headline += f"; the run has {self.steps:,}"
        return page(headline, GOOD, rows)

    def _policy(self) -> str:
        return self.specification.policy.name

    def _job_rows(self) -> list[Row]:
        stated = self.specification
        settings = " ".join(f"{name}={value}" for name, value in sorted(stated.job.settings.items()))
        dataset, every = stated.job.dataset_digest, stated.checkpoint_every
        rows: list[Row] = [
            ("job", f"{stated.job.path}, source {stated.job.source_digest[:16]}.."),
            ("settings", settings or "the job's own"),
            ("dataset", "none stated" if dataset is None else f"{dataset[:16]}.."),
            (
                "order",
                f"{counted(stated.steps, 'step')}, a committed state every {every}, seed {stated.seed}",
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
            name: {
                "bytes": kind.n_bytes,
                "payloads": kind.payloads,
                "entries": kind.entries,
                "residues": kind.residues,
            }
            for name, kind in self.log.kinds.items()
        }

    def _kind_table(self) -> list[RenderableType]:
        if self.log is None or not self.steps:
            return []
        table = Table(box=None, padding=(0, 2), header_style=QUIET)
        table.add_column("  log by kind of site")
        with_residues = any(kind.residues for kind in self.log.kinds.values())
        for heading in ("bytes/step", "share", "entries/step", *(["residues/step"] if with_residues else [])):
            table.add_column(heading, justify="right")
        for name, kind in self.log.kinds.items():
            if kind.n_bytes:
                table.add_row(
                    f"  {name}",
                    f"{kind.n_bytes / self.steps:,.1f}",
                    share(kind.n_bytes / max(self.log_bytes, 1)),
                    f"{kind.entries / self.steps:,.1f}" if kind.entries else "",
                    *(
                        [f"{kind.residues / self.steps:,.1f}" if kind.residues else ""]
                        if with_residues
                        else []
                    ),
                )
        return [table]


def read_run(
    directory: RunDirectory,
    *,
    read_log: bool = True,
    recorded_now: int = 0,
    seconds: Mapping[str, float] | None = None,
) -> RunReport:
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
    return RunReport(str(directory.path), transcript, finished, log, problem, recorded_now, seconds or {})


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
    start = 0
    if kind == Kind.DECISION:
        _, start = _varint(payload, 0)  # the band exponent; the symbol width follows
        start += 1
    return _varint(payload, start)[0]


def _varint(data: bytes, start: int) -> tuple[int, int]:
    """The LEB128 number at ``start``, and where it ends."""
    value = 0
    for place, byte in enumerate(data[start:]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, start + place + 1
    raise InvalidInput(f"log: a number of {len(data) - start} bytes does not end")
