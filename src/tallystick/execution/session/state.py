"""The floating tensors of a session's state: their fingerprint, and whether somebody has changed them between two steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from tallystick.errors import EditedOutside
from tallystick.execution.session.parameters import TrainedParameters
from tallystick.execution.session.tensors import ModelTensors
from tallystick.numerics.optimizers import Marks
from tallystick.numerics.tensor_measures import fingerprint_all, fingerprint_bits, fingerprint_each

SMALL = 1 << 16  # elements up to which a buffer is compared by value
MARKED = 16  # trained parameters of which some values are looked at between two steps


class FloatingState:
    """The floating tensors of a state, by entry name; values are float32 values whatever the dtype."""

    def __init__(self, tensors: ModelTensors, trained: TrainedParameters) -> None:
        self.tensors, self.trained = tensors, trained
        self._left: tuple[list[int], int] | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.tensors.floating():
            yield name, tensor.detach()
        for name, key, value in self.trained.floating_state():
            yield f"optimizer/{name}/{key}", value

    def ordered(self) -> list[Tensor]:
        """Return the tensors in order of their names."""
        return [tensor for _, tensor in sorted(self, key=lambda pair: pair[0])]

    def fingerprint(self) -> int:
        """Return the 64-bit fingerprint over all tensors, in order of their names."""
        return fingerprint_all(self.ordered())

    def new_marks(self) -> Marks:
        """Return what takes the tensors' fingerprints while an optimizer's pass writes them."""
        return Marks({t.data_ptr(): i for i, t in enumerate(self.ordered()) if t.numel()})

    def closing_fingerprint(self, marks: Marks | None) -> int:
        """Return ``fingerprint`` without reading again what the optimizer's own pass took the fingerprint of.

        What is written to a tensor behind autograd's back after that is not seen here. The state committed at a checkpoint
        then has another fingerprint, which is refused.
        """
        if marks is None:
            return self.fingerprint()
        state = self.ordered()
        found = {tensor.data_ptr(): ordinal for ordinal, tensor in enumerate(state) if tensor.numel()}
        if any(found.get(address) != marks.ordinals[address] for address in marks.held):
            return fingerprint_all(state)
        return (fingerprint_all(state, marks.held) + marks.taken) % (1 << 64)

    # -- between two steps -------------------------------------------------------------------

    def marks(self) -> list[int]:
        """Return by what a change of each trained parameter shows: how often torch has seen one, and some of its values.

        The values are what shows a change through ``.data``; they are taken of ``MARKED`` parameters in host memory.
        """
        parameters = [p for _, p in self.trained.named]
        every = -(-len(parameters) // MARKED) or 1
        looked_at = [
            n
            for n in range(0, len(parameters), every)
            if parameters[n].device.type == "cpu" and parameters[n].is_contiguous()
        ]
        found = [p._version for p in parameters]
        for n, value in zip(
            looked_at, fingerprint_each([parameters[n] for n in looked_at], SMALL), strict=True
        ):
            found[n] += value << 64
        return found

    def verify_unedited(self, marks: list[int], fingerprint: int, step: int) -> None:
        """Return if nobody has changed what is trained since a step ended with these ``marks`` and this ``fingerprint``.

        Values that were changed and put back are as they were.

        Raises:
            EditedOutside: somebody has; by name.
        """
        now = self.marks()
        if now == marks or self.fingerprint() == fingerprint:
            return
        changed = next(n for n, (a, b) in enumerate(zip(now, marks, strict=True)) if a != b)
        raise changed_outside(step, self.trained.named[changed][0])

    def leave(self, fingerprint: int | None) -> None:
        """Note how a step has left the state, and its fingerprint; None where the state was put here instead."""
        self._left = None if fingerprint is None else (self.marks(), fingerprint)

    def note(self) -> None:
        """Note how the state is, unless a step has: before anything of the job's own is called between two steps."""
        if self._left is None:
            self.leave(self.fingerprint())

    def verify_left(self, step: int) -> None:
        """Return if nobody has changed what is trained since the last step ended, or the state was noted.

        Raises:
            EditedOutside: somebody has; by name.
        """
        if self._left is not None:
            self.verify_unedited(*self._left, step)

    # -- while the job's own code runs -------------------------------------------------------

    def trained_marks(self) -> dict[str, int]:
        """Return a number for every parameter and optimizer tensor that changes with each of its bits."""
        return {name: fingerprint_bits(p) for name, p in self.trained.named} | {
            f"{name}/{key}": fingerprint_bits(value) for name, key, value in self.trained.floating_state()
        }

    def verify_trained(self, before: Mapping[str, int], step: int) -> None:
        """Return if what the optimizer trains is what it was when ``before`` was taken.

        Raises:
            EditedOutside: it is not; the message names the tensor.
        """
        after = self.trained_marks()
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                raise changed_outside(step, name)


def changed_outside(step: int, name: str) -> EditedOutside:
    """Return what is raised where something other than the optimizer changed what it trains."""
    return EditedOutside(
        f"step {step}: {name} was changed by something other than the optimizer, and that is not rounded; "
        "let the optimizer do it, or train another parameter from which this one follows"
    )
