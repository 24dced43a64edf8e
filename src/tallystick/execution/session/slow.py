"""What changes beside the optimizer in a step: buffers in the forward pass, averages after the optimizer."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from tallystick.errors import Nondeterminism
from tallystick.execution.session.arithmetic import Arithmetic
from tallystick.execution.session.sites import SiteRounding, slow_ordinal
from tallystick.execution.session.state import SMALL, FloatingState, changed_outside
from tallystick.numerics.tensor_measures import fingerprint_bits


class SlowTensors:
    """Buffers, frozen parameters and extra modules in one step, and how they were when they were last looked at.

    Args:
        rounding: of the step.
        arithmetic: of the step.
        state: that holds them.
        follows_up: whether something changes them after the optimizer.
    """

    def __init__(
        self, rounding: SiteRounding, arithmetic: Arithmetic, state: FloatingState, *, follows_up: bool
    ) -> None:
        self.rounding, self.arithmetic, self.follows_up = rounding, arithmetic, follows_up
        self.tensors, self.trained = state.tensors, state.trained
        self._seen = {name: _looked_at(name, tensor) for name, tensor in self.tensors.slow_values()}
        self._whole = {name: tensor.clone() for name, tensor in self.tensors.whole_buffers()}

    def before(self) -> dict[str, Tensor]:
        """Return what the buffers were when the step began, those of whole numbers included, by name."""
        floating = ((name, values) for name, (_, _, values) in self._seen.items())
        return self._whole | {name: values for name, values in floating if isinstance(values, Tensor)}

    def round_buffers(self) -> None:
        """Round the buffers that changed since they were last looked at.

        Raises:
            Nondeterminism: a parameter that no optimizer trains changed; by name.
        """
        for ordinal, (name, buffer) in enumerate(self.tensors.slow_values()):
            if not self._has_changed(name, buffer):
                continue
            if "/buffer/" not in name:
                raise Nondeterminism(
                    f"step {self.rounding.step}: {name} is a parameter that no optimizer trains, and it was changed where the "
                    "grid of running statistics would hold it still; change averages of weights and such in a job's "
                    "`after_step`, or in `with recorder.follow_up()` after prepare(.., follows_up=True)"
                )
            with torch.no_grad():
                dense = buffer.contiguous()  # a buffer assigned anew may have any layout
                self.rounding.buffer(ordinal, dense, name)
                if dense is not buffer:
                    buffer.copy_(dense)
            if self.follows_up:
                self._seen[name] = _looked_at(name, buffer)

    @contextmanager
    def following_up(self) -> Generator[None]:
        """After the optimizer, be where averages and other slow values change: in float64, from numbers both sides know.

        What is changed inside is rounded as the optimizer's state is, to float32 with a band of a few last bits of float64:
        a coarser grid would hold a slow average where it is.

        Raises:
            EditedOutside: a trained parameter was changed, which is the optimizer's to do; by name.
        """
        assert self.follows_up
        self.round_buffers()
        with torch.no_grad():
            trained = [(name, p, p.data) for name, p in self.trained.named]
            slow = {
                name: (t, t.data.to(torch.float32, copy=t.dtype == torch.float64))
                for name, t in self.tensors.slow()
            }
            for _, p, _ in trained:
                p.data = p.data.double()
            for tensor, _ in slow.values():
                tensor.data = tensor.data.double()
        try:
            with self.arithmetic.in_optimizer(self.trained.optimizer):
                yield
            for name, p, narrow in trained:
                if not torch.equal(p.data, narrow.double()):
                    raise changed_outside(self.rounding.step, name)
        finally:
            for _, p, narrow in trained:
                p.data = narrow
        self._round_slow({name: narrow for name, (_, narrow) in slow.items()})

    def _round_slow(self, before: Mapping[str, Tensor]) -> None:
        """Round what changed of tensors that are float64, and were ``before``, and give them back their dtype."""
        compute = self.arithmetic.compute
        with torch.no_grad():
            for ordinal, (name, tensor) in enumerate(self.tensors.slow()):
                old, new = before[name], tensor.data.double().contiguous()
                if torch.equal(new, old.double()):
                    tensor.data = old.to(compute)
                    continue
                out = new if compute == torch.float64 else torch.empty_like(new, dtype=torch.float32)
                site = slow_ordinal(self.trained, ordinal, is_portable=self.arithmetic.is_portable)
                self.rounding.state(site, new, old, out, name)
                tensor.data = out
                self._seen[name] = _looked_at(name, tensor)

    def _has_changed(self, name: str, buffer: Tensor) -> bool:
        """Compare values, or of what is large and frozen a sum over the bits: batch norm and ``.data`` do not count writes."""
        pointer, version, before = self._seen[name]
        if isinstance(before, Tensor):
            return not torch.equal(buffer, before)
        return (pointer, version) != (buffer.data_ptr(), buffer._version) or fingerprint_bits(
            buffer
        ) != before


def _looked_at(name: str, tensor: Tensor) -> tuple[int, int, Tensor | int]:
    """Return what shows later whether a tensor was changed, and of a buffer what it was."""
    is_kept = "/buffer/" in name or tensor.numel() <= SMALL
    values = tensor.clone() if is_kept else fingerprint_bits(tensor)
    return tensor.data_ptr(), tensor._version, values
