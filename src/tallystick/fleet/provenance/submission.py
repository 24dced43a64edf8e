"""What an owner hands over, as files: declared runs with their documents, and the directories of its chips.

    DIR/runs/NAME/  NAME.report.json  NAME.opening.json  NAME.batches/STEP.batch        DIR/chips/UEID/

Everything in it is the owner's word; keys, heads and chips to ask for come from elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
