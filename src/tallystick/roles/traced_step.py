"""A step of a loop written down while it runs, so that it can be run again without the loop."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tallystick.errors import Nondeterminism
from tallystick.execution.pass_trace import PassTrace
from tallystick.execution.rounding.context import RoundingContext
from tallystick.execution.rounding.following import FollowingContext
from tallystick.execution.session.session import Session
from tallystick.execution.step import batch_digest

ZEROS = "gradient/"  # before the name of a parameter whose gradient was zero, not none, when the step began


class TracedStep:
    """The session's next step; ``carries`` if the optimizer did not take the one before, whose gradients are still there.

    Raises:
        Nondeterminism: they are not zero; by name.
    """

    def __init__(self, session: Session, *, carries: bool) -> None:
        self._session = session
        gradients = {name: p.grad for name, p in session.parameters if p.grad is not None}
        if carries:
            session.trained.verify_no_gradients(session.step)
        self._zeros = {ZEROS + name: gradient for name, gradient in gradients.items()}
        self.trace = PassTrace({**_tensors(session), **self._zeros})

    def data(self) -> list[Tensor]:
        """Return the tensors from outside that the step follows from, in the order of their digests."""
        return sorted((tensor for _, tensor in self.trace.outside()), key=batch_digest)

    def run_again(self, context: RoundingContext) -> None:
        """Run the step's operators again in the pass that is open under ``context``; its gradients are left on the parameters.

        Raises:
            OtherShapes: they do not fit the decisions taken there.
        """
        session, trace = self._session, self.trace
        opened = session.open_step
        parameters = dict(session.parameters)
        zeros = {name: torch.zeros_like(parameters[name.removeprefix(ZEROS)]) for name in self._zeros}
        again = trace.repetition({**_tensors(session), **zeros})
        for number in range(len(trace.parts)):
            with (
                opened.micro_batch(number),
                session.arithmetic.autocast(session.tensors.device.type, enabled=False),
                torch.no_grad(),
            ):
                again.run(number)
            if number in trace.losses:
                opened.note_loss(again.value(trace.losses[number]))
        for name, value in trace.gradients.items():
            parameters[name].grad = again.value(value)
        if isinstance(context, FollowingContext):
            context.read = again.read


def _tensors(session: Session) -> dict[str, Tensor]:
    return {**dict(session.tensors.floating()), **dict(session.tensors.whole_buffers())}


class CarriedMemory:
    """Memory that the operators of earlier steps made and that is still held: none of it is part of the state."""

    def __init__(self) -> None:
        self._alive: dict[int, StorageWeakRef] = {}

    def verify_used(self, trace: PassTrace, step: int) -> None:
        """Return if a step used none of it; what its own operators made and left is such memory from then on.

        Raises:
            Nondeterminism: it did: no auditor has the same numbers there.
        """
        for memory, tensor in trace.outside():
            if memory in self._alive:
                what = "make it a buffer of the model or of a module in extra"
                if isinstance(tensor, nn.Parameter):
                    what = "it is a parameter that another optimizer trains: a run has one model and one optimizer"
                raise Nondeterminism(
                    f"step {step}: uses a tensor of shape {list(tensor.shape)} that an earlier step computed and that is no part "
                    f"of the state, so that it is rounded nowhere; {what}"
                )
        self._alive = {
            key: ref for key, ref in self._alive.items() if not ref.expired()
        } | trace.still_alive()
