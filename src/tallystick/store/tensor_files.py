"""States and models as safetensors files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import IO, TypeVar

import safetensors

from tallystick.commit.state import DTYPE_BYTES, Entry, EntrySummary
from tallystick.commit.tensor_file import check_tensor_file
from tallystick.errors import InvalidInput
from tallystick.store.regular import read_regular

STATE_METADATA = "tallystick/state/1"


def load_state_file(
    path: Path, needed: str = "a safetensors file is needed", *, folder: bool = False
) -> dict[str, Entry]:
    """Return the entries of a safetensors file, by name.

    Raises:
        InvalidInput: the file is missing, no safetensors file with one meaning, or has a tensor of a dtype that no state holds.
        StoreError: it cannot be read.
    """
    data = read_regular(path, needed, folder=folder, follow=not folder)
    check_tensor_file(BytesIO(data), len(data), what=path.name)
    try:
        tensors = safetensors.deserialize(data)
    except (safetensors.SafetensorError, ValueError) as problem:
        raise InvalidInput(f"{path.name}: not a safetensors file ({problem})") from None
    entries: dict[str, Entry] = {}
    for name, tensor in tensors:
        code = str(tensor["dtype"])
        if code not in DTYPE_BYTES:
            raise InvalidInput(f"{path.name}: {name} has dtype {code}, which no state holds")
        entries[name] = Entry(name, code, tuple(tensor["shape"]), memoryview(tensor["data"]))
    return entries


def write_state(file: IO[bytes], entries: list[Entry], each: Callable[[Entry], Entry] | None) -> None:
    """Write the safetensors format tensor by tensor, so that no second copy of the state is made."""
    header, ordered = safetensors_header(entries, STATE_METADATA)
    file.write(header)
    for entry in ordered:
        file.write(entry.data if each is None else each(entry).data)


def weights_pieces(state: Iterable[Entry]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of ``model.safetensors``, the trained model in a committed state, piece by piece.

    Parameters and buffers under the names the model gives them, in the order of the format, with the one metadata key
    that loaders ask for. One state makes one file, so whoever has the state can tell the file's digest.
    """
    entries = [
        Entry(entry.name.removeprefix("model/").removeprefix("buffer/"), entry.dtype, entry.shape, entry.data)
        for entry in state
        if entry.name.startswith("model/")
    ]
    if not entries or len({entry.name for entry in entries}) != len(entries):
        raise InvalidInput(
            f"weights: the state has {len(entries)} parameters and buffers, or two of one name"
        )
    yield from tensor_pieces(entries)


def tensor_pieces(entries: list[Entry]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of the one file that ``tally export`` writes for these tensors, piece by piece."""
    header, ordered = safetensors_header(entries, "pt")
    yield header
    for entry in ordered:
        yield entry.data


Tensor = TypeVar("Tensor", Entry, EntrySummary)


def safetensors_header(entries: list[Tensor], metadata: str) -> tuple[bytes, list[Tensor]]:
    """Return the header with its length, and the entries in the order of their bytes behind it."""
    header: dict[str, Mapping[str, object]] = {"__metadata__": {"format": metadata}}
    offset = 0
    ordered = sorted(
        entries, key=lambda entry: (-DTYPE_BYTES[entry.dtype], entry.name)
    )  # the format's own order: aligned
    for entry in ordered:
        size = DTYPE_BYTES[entry.dtype] * math.prod(entry.shape)
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded, ordered
