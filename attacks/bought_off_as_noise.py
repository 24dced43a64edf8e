"""Declares the narrowest bands, which nobody else's noise fits into, and then multiplies the final weights by three.

Whoever cannot reproduce a noisy step accuses nobody of it. The second run states the false weights' own fingerprint too, so
that no record contradicts the state.
"""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
from stage import STEPS, Stage, edit_checkpoint, main

from tallystick.commit.state import Entry
from tallystick.evidence.run_verifier import verify_run
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.rounding.grids import is_noise_only
from tallystick.execution.session import session
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind
from tallystick.roles.trainer import record
from tallystick.run.transcript import state_fingerprint
from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import must
from tallystick.testing.cheats import forge


def treble(entries: dict[str, Entry]) -> None:
    for name, entry in entries.items():
        if name.startswith("model/") and entry.dtype == "F32":
            data = (3 * np.frombuffer(entry.data, dtype="<f4")).astype("<f4").tobytes()
            entries[name] = Entry(name, "F32", entry.shape, data)


def restate(run: RunDirectory) -> None:
    stated = f"{state_fingerprint(run.load_checkpoint(STEPS)):016x}"
    forge(run, lambda r: r if r.step != STEPS - 1 else replace(r, fingerprint=stated))


def attack(stage: Stage) -> str:
    honest = session.Session.recording_context

    def make(self: session.Session, before: GridTable) -> RecordingContext:
        made = honest(self, before)
        lowest = self.policy.gradient_band[0]
        narrow = {
            place: replace(grid, band=lowest)
            if place[0] == Kind.GRADIENT and not is_noise_only(grid) and not grid.residue_bits
            else grid
            for place, grid in made.table.sites.items()
        }
        made.table, made._grids = GridTable(narrow), dict(narrow)
        return made

    found: list[str] = []
    for name in ("contradicted", "restated"):
        run = stage.run(name)
        with patch.object(session.Session, "recording_context", make):
            record(stage.order(), run)
        edit_checkpoint(run, STEPS, treble)
        if name == "restated":
            restate(run)
        else:
            verdict = verify_run(run).verdict
            must(verdict == "mismatch", f"verify, which repeats nothing, says {verdict}")
        found.append(stage.caught_by_audit_and_dispute(run, step=STEPS - 1, verdicts={"mismatch"}))
    return "; ".join(found)


if __name__ == "__main__":
    main(attack, __doc__)
