"""A recorded run at hand: its directory, its documents, and what is read by them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tallystick.commit.state import Entry
from tallystick.diagnosis.causes import Divergence
from tallystick.errors import InvalidInput, Mismatch
from tallystick.run.transcript import Transcript
from tallystick.store.files import RunDirectory


@dataclass(frozen=True)
class RecordedRun:
    """A run's directory and the transcript in it."""

    directory: RunDirectory
    transcript: Transcript

    @cached_property
    def roots(self) -> dict[int, str]:
        """The state's root at each checkpoint, by how many steps were done."""
        return {c.steps_done: c.state_root for c in self.transcript.checkpoints()}

    def state(self, done: int) -> dict[str, Entry]:
        """Return the state that was committed to after ``done`` steps.

        Raises:
            InvalidInput, Mismatch: it cannot be read, or is another one.
        """
        return self.directory.load_committed(done, self.roots[done])

    def frame(self, step: int) -> bytes:
        """Return the log of one step.

        Raises:
            InvalidInput, Mismatch: it cannot be read, or is another one.
        """
        return self.directory.load_frames(self.transcript, step, step + 1)[step]

    def state_or_note(self, done: int, found: Divergence) -> dict[str, Entry] | None:
        """Return the state committed to after ``done`` steps; None if none was, or, noted in ``found``, none can be read."""
        if done not in self.roots:
            return None
        try:
            return self.state(done)
        except (InvalidInput, Mismatch) as problem:
            found.notes.append(f"the stated state after {done} steps cannot be read: {problem}")
            return None
