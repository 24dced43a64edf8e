"""An interrupted recording of a program gone on with.

A program cannot be begun in its middle: it runs from its beginning, and its recorded steps are repeated from the log, each of
which has to give every byte that was recorded. One that declares that it keeps nothing of what it computes but its state has them
passed over, except for the last segment.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from tallystick.errors import InvalidInput
from tallystick.execution.determinism import environment_versions
from tallystick.execution.program import LocalProgram
from tallystick.execution.rounding.following import FollowingContext
from tallystick.execution.session.session import Session
from tallystick.execution.snapshot import load_state
from tallystick.execution.step import StepOutcome
from tallystick.roles.comparison import compare_step
from tallystick.roles.initial_state import built_of, compare_beginning, find_other_setting, settings_of
from tallystick.roles.replay import adopting
from tallystick.roles.run_writer import RunWriter
from tallystick.roles.same_order import other_machine, verify_same_order, verify_same_program
from tallystick.run.documents import Specification
from tallystick.run.program import Program
from tallystick.run.transcript import Transcript
from tallystick.store.files import RunDirectory
from tallystick.store.resumption import Resumption, find_resumption

Specified = Callable[[str, Program], Specification]


@dataclass
class TakenUp:
    """A run that is gone on with.

    Attributes:
        directory: where it lies.
        program: the one that is running.
        kept: what there is of the run.
        stated: its specification; of a run that ended between two segments, as if it went on.
        notices: what somebody should know.
        passes: whether the program declares that it keeps nothing of what it computes.
    """

    directory: RunDirectory
    program: LocalProgram
    kept: Resumption
    stated: Specification
    notices: list[str] = field(default_factory=list[str])
    passes: bool = False
    _frames: dict[int, bytes] = field(default_factory=dict[int, bytes])
    _context: FollowingContext | None = None

    @property
    def done(self) -> int:
        """How many steps stay."""
        return self.kept.done

    @property
    def first_repeated(self) -> int:
        """The first step that is repeated: of the last segment that stays, or of all."""
        every = self.stated.checkpoint_every
        return max(self.done - 1, 0) // every * every if self.passes else 0

    @property
    def context(self) -> FollowingContext:
        """What the step that is being repeated follows."""
        assert self._context is not None
        return self._context

    def verify_beginning(self, session: Session, specified: Specified) -> None:
        """Return if the program begins as the run did.

        Raises:
            InvalidInput: it is another order, or begins with other settings or other tensors that nobody trains; by name.
            OtherProgram: it is another program.
        """
        self.program.name_variables()
        own = specified(self.stated.initial_state, self.stated.job.program)
        if self.done == self.stated.steps < own.steps:
            if self.done % self.stated.checkpoint_every:
                raise InvalidInput(
                    f"--resume: the run is complete: it ended after {self.done} steps, between two checkpoints"
                )
            self.stated = replace(self.stated, steps=own.steps)
        verify_same_order(self.stated, replace(own, notes=self.stated.notes))
        verify_same_program(self.program, self.stated.job.program)
        state = self.directory.load_committed(0, self.stated.initial_state)
        other = find_other_setting(settings_of(session), state)
        changed = compare_beginning(built_of(session), state).changed
        if other is not None or changed is not None:
            raise InvalidInput(f"--resume: the program begins otherwise than the run: {other or changed}")

    @contextmanager
    def following(self, session: Session) -> Generator[None]:
        """Be where the session's next step follows its log; of the first one, from the state committed before it."""
        step, every = session.step, self.stated.checkpoint_every
        if step == self.first_repeated:
            root = self.stated.initial_state if not step else str(self.kept.records[step - 1].state_root)
            load_state(session, self.directory.load_committed(step, root))
        if step not in self._frames:
            transcript, end = Transcript(self.stated, self.kept.records), min(step + every, self.done)
            self._frames = self.directory.load_frames(transcript, step, end)
        self._context = session.following_context(self._frames[step])
        with adopting(session, self.kept.records[step]):
            yield

    def verify(self, session: Session, outcome: StepOutcome) -> None:
        """Return if the step just repeated is what was recorded.

        Raises:
            InvalidInput: it is not; by name.
        """
        context = self.context
        context.finish()
        session.settle(context)
        found = compare_step(self.kept.records[session.step - 1], outcome, context.violations)
        if found:
            raise InvalidInput(
                f"--resume: {found[0]}: the program takes another way than it did, or this machine cannot repeat it; "
                "record it anew, into another directory"
            )

    def go_on(self, session: Session, writer: RunWriter, specified: Specified) -> None:
        """Have ``writer`` go on from the last committed state; what is not of it is removed from the directory.

        Raises:
            InvalidInput: the order differs in what a step shows (casts that were lifted); by name.
            OtherProgram: by now the program is another one.
        """
        if self.done:
            verify_same_order(self.stated, specified(self.stated.initial_state, self.stated.job.program))
        verify_same_program(self.program, self.stated.job.program, whole=bool(self.done))
        root = self.kept.records[-1].state_root if self.done else self.stated.initial_state
        writer.take_up(self.stated, self.program, str(root), self.kept)


def take_up(directory: RunDirectory, program: LocalProgram) -> TakenUp | None:
    """Return what there is of a run to go on with; None if nothing of it would be lost, and the directory is ready for a new one.

    Raises:
        StoreError, InvalidInput: as ``find_resumption``.
    """
    kept = find_resumption(directory)
    if kept.specification is None:
        kept.cut_back()
        return None
    here = replace(kept.specification, versions=environment_versions())
    said = [*other_machine(kept.specification, here), kept.notice()]
    return TakenUp(directory, program, kept, kept.specification, [text for text in said if text is not None])
