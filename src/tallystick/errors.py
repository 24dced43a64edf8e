"""Every exception Tallystick raises on purpose.

    TallyError
    +-- InvalidInput        another party's bytes or arguments are malformed
    +-- Mismatch            well formed and wrong: carries where and both values
    +-- Nondeterminism      something that cannot be repeated elsewhere, by name
    |   +-- EditedOutside   what is trained was changed by something other than the optimizer
    |   +-- StepFailed      under a log, the job's own code or torch raised
    +-- OtherProgram        code that is not the code committed to, by file or distribution
    +-- JobFailed           a job's own code raised: which, where and what
    +-- ProtocolViolation   a move or a call that the rules do not allow
    +-- StoreError          the disk or the object store refused

A lost dispute and a failed audit are verdicts, not exceptions.
The message names the thing, the rule and both values.
"""

from __future__ import annotations


class TallyError(Exception):
    """Root of the tree; the command line prints its message and no traceback."""


class InvalidInput(TallyError):
    """Bytes, files or arguments that do not have the form their specification gives."""


class Mismatch(TallyError):
    """Two well-formed values that had to be equal and are not.

    Attributes:
        where: what they are values of, in words; empty where what is wrong is no pair of values.
        own: what follows from what is at hand, as text; None where ``where`` is empty, or where there is none.
        stated: what somebody states or asked for, likewise.
    """

    def __init__(self, message: str, *, where: str = "", own: object = None, stated: object = None) -> None:
        super().__init__(message)
        self.where = where
        self.own = None if own is None else str(own)
        self.stated = None if stated is None else str(stated)


class Nondeterminism(TallyError):
    """An operation, job or setting that no other machine could repeat."""


class EditedOutside(Nondeterminism):
    """What is trained was changed by something other than the optimizer: that is not rounded, and no log has it."""


class StepFailed(Nondeterminism):
    """Under a log, a step does not end: the job's own code or torch raised."""


class OtherProgram(TallyError):
    """Code that would run, or ran, is not the code that was committed to: nothing is said about anybody's computation."""


class JobFailed(TallyError):
    """A job's own code raised something: its author's, or this machine lacks what it reads."""


class ProtocolViolation(TallyError):
    """A call or move out of order."""


class StoreError(TallyError):
    """Reading or writing an artefact failed; what was written before is intact."""
