"""What an owner hands over, as files: declared runs with their documents, and the directories of its chips.

    DIR/runs/NAME/  NAME.report.json  NAME.opening.json  NAME.batches/STEP.batch        DIR/chips/UEID/

Everything in it is the owner's word; keys, heads and chips to ask for come from elsewhere.

Reports are handed in before a period's beacon speaks; an announcement of the draw names their root (spec/plan.md 7).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tallystick.commit.merkle import leaf_hash, root
from tallystick.errors import InvalidInput, Mismatch, StoreError
from tallystick.fleet.provenance.transcripts import ReportOpening, RunReport
from tallystick.store.chips import ChipDirectory
from tallystick.store.documents import read_document
from tallystick.store.files import RunDirectory


@dataclass(frozen=True)
class DeclaredRun:
    """A run as an owner shows it in the neutral place: its report, what opens it, and its directory."""

    name: str
    report: RunReport
    opening: ReportOpening
    directory: RunDirectory

    def batches(self) -> Iterator[Path]:
        """Return the files that open batches of the run, in no particular order; none where nothing was opened."""
        folder = self.directory.path.with_name(f"{self.name}.batches")
        return folder.glob("*.batch")


@dataclass(frozen=True)
class OwnerFolder:
    """What an owner hands over: ``runs/NAME`` with ``NAME.report.json`` and ``NAME.opening.json``, and ``chips/UEID``.

    What lies in it is the owner's; keys and heads come from elsewhere.
    """

    path: Path

    def chips(self) -> list[ChipDirectory]:
        """Return the directories of the chips shown."""
        return [ChipDirectory(p) for p in sorted((self.path / "chips").iterdir()) if p.is_dir()]

    def runs(self) -> list[DeclaredRun]:
        """Return the declared runs.

        Raises:
            InvalidInput: a document is malformed.
            StoreError: one is missing.
        """
        found: list[DeclaredRun] = []
        for path in sorted((self.path / "runs").glob("*.report.json")):
            name = path.name.removesuffix(".report.json")
            found.append(
                DeclaredRun(
                    name,
                    read_document(RunReport, path),
                    read_document(ReportOpening, path.with_name(f"{name}.opening.json")),
                    RunDirectory(self.path / "runs" / name),
                )
            )
        return found


def report_leaves(folder: Path) -> list[bytes]:
    """Return the leaves, ascending, of all reports below a folder of what owners handed in (``*.report.json``).

    Raises:
        InvalidInput: a document is malformed, or two are the same report.
        StoreError: there is no such folder.
    """
    if not folder.is_dir():
        raise StoreError(f"{folder}: there is no such folder")
    found: dict[bytes, Path] = {}
    for path in sorted(folder.rglob("*.report.json")):
        leaf = report_leaf(read_document(RunReport, path))
        if leaf in found:
            raise InvalidInput(f"{path}: is the same report as {found[leaf]}; it counts once")
        found[leaf] = path
    return sorted(found)


def report_leaf(report: RunReport) -> bytes:
    """Return the leaf of one report: of its canonical bytes."""
    return leaf_hash(report.encode())


def verify_reported(
    runs: Sequence[DeclaredRun], handed_in: Sequence[bytes], stated: tuple[bytes, int]
) -> None:
    """Return if the reports ``handed_in`` are those that an announcement states by root and count, the runs' among them.

    Raises:
        Mismatch: there are others, or a run was reported after they closed; by name.
    """
    own = root(handed_in), len(handed_in)
    if own != stated:
        raise Mismatch(
            f"reports: these are {own[1]} of root {own[0].hex()}, announced are {stated[1]} of root {stated[0].hex()}",
            where="reports of the announcement",
            own=own[0].hex(),
            stated=stated[0].hex(),
        )
    among = frozenset(handed_in)
    for each in runs:
        if report_leaf(each.report) not in among:
            raise Mismatch(
                f"run {each.name}: its report is none of the {own[1]} that were handed in before the beacon spoke"
            )
