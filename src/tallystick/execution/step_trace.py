"""One step as a list of operators with their results, as long as these are kept."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tallystick.commit.state import HeldState, StateSummary
from tallystick.commit.tensors import chunk_hashes, joined
from tallystick.dispute.operator_list import (
    Operator,
)
from tallystick.errors import InvalidInput
from tallystick.execution.step import StepOutcome

KINDS = {
    "F32": "<f4", "F64": "<f8", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "u1",
    "F16": "<f2", "BF16": "<u2",
}  # fmt: skip
Array = np.ndarray


@dataclass
class Value:
    """One result: where it stands in the list, and its elements as they lie in memory, as long as they are kept."""

    source: tuple[int, int]
    dtype: str
    elements: int
    data: Tensor | Array | None
    hashes: list[bytes] | None = None
    promised: list[Future[list[bytes]]] = field(default_factory=list[Future[list[bytes]]])

    def settle(self) -> None:
        """Return when the chunk hashes that were asked for are there; until then the data must not change."""
        if self.promised:
            self.hashes, self.promised = joined(self.promised), []


@dataclass
class StepTrace:
    """A traced step.

    Attributes:
        operators: the list.
        values: results by (leaf, output); empty for an auditor.
        chunk: bytes in a chunk of a result's tree.
        incomplete: why the list cannot stand for the step, or None.
        outcome: of the step.
        summary: of the state after it.
        after: that state, if it was kept.
        held_bytes: size of all results.
    """

    operators: list[Operator]
    values: dict[tuple[int, int], Value]
    chunk: int
    incomplete: str | None
    outcome: StepOutcome | None = None
    summary: StateSummary | None = None
    after: HeldState | None = None
    held_bytes: int = 0

    def hashes(self, source: tuple[int, int]) -> list[bytes]:
        """Return a result's chunk hashes."""
        value = self.values[source]
        if value.hashes is None:
            data = np.ascontiguousarray(self.array(source))
            value.hashes = chunk_hashes(data.data if data.size else memoryview(b""), self.chunk)
        return value.hashes

    def array(self, source: tuple[int, int]) -> Array:
        """Return a result's elements as they lie in memory.

        Raises:
            InvalidInput: it was not kept.
        """
        value = self.values.get(source)
        if value is None or value.data is None:
            raise InvalidInput(f"operator {source[0]}: output {source[1]} was not kept")
        return value.data if isinstance(value.data, np.ndarray) else array_of(value.data)


def array_of(tensor: Tensor) -> Array:
    """Return a flat tensor's elements as an array that shares its memory; booleans are bytes, bfloat16 its bits."""
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8).numpy()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return tensor.numpy()
