"""Shard maps of models that several ranks hold: which part of each of the state's entries lies in whose memory.

    torch.distributed.fsdp.fully_shard(model)                 # or parallelize_module, distribute_tensor, DDP
    shards = shards_of(model, optimizer)                      # on every rank, before the first step: it is committed to
    tallystick.observe(chip, model, optimizer)

What a ``DTensor`` says of its placements and its mesh is what torch's own checkpoints go by. A parameter that is no ``DTensor``
is whole on every rank, as under data parallelism; one of another rank (a pipeline's) is in that rank's map alone. The map goes
into ``transcripts.ReportOpening``; the developer's word until a snapshot is matched with it, bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from tallystick.errors import InvalidInput
from tallystick.execution.session.parameters import without_state
from tallystick.fleet.provenance.transcripts import Slice
from tallystick.integrations.observed import tensors_of


def shards_of(
    model: nn.Module, optimizer: Optimizer, group: dist.ProcessGroup | None = None
) -> tuple[tuple[Slice, ...], ...]:
    """Return the shard map of all ranks of ``group``, by rank; each of them calls this. Without torch.distributed it has one.

    The model is what the wrapper wraps (``ddp.module``): entries have the names of the state that is committed.

    Raises:
        InvalidInput: a part that is no box of its tensor, or that nobody has summed up; by name.
    """
    mine = slices_of(model, optimizer)
    if not dist.is_initialized():
        return (mine,)
    rows: list[list[list[object]]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(rows, [piece.row() for piece in mine], group=group)
    return tuple(tuple(Slice.read_row(row) for row in rank) for rank in rows)


def slices_of(model: nn.Module, optimizer: Optimizer) -> tuple[Slice, ...]:
    """Return this rank's part of the shard map; the regions have the names that ``tallystick.observe`` gives them.

    Raises:
        InvalidInput: as ``shards_of``.
    """
    found = [_slice(name, tensor) for name, _, tensor in tensors_of(model, optimizer)]
    names = {id(p): name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not optimizer.state.get(p):
                found += _kept_of(names.get(id(p), "unnamed"), p, optimizer, group)
    return tuple(sorted(found, key=lambda piece: piece.entry))


def _kept_of(name: str, p: Tensor, optimizer: Optimizer, group: Mapping[str, Any]) -> Iterator[Slice]:
    """Yield what the optimizer will keep of a parameter from its first step on, as it keeps it of a small one."""
    small, probe = nn.Parameter(torch.zeros(2, 3)), without_state(optimizer)
    small.grad = torch.ones_like(small)
    probe.param_groups = [{**group, "params": [small]}]
    probe.step()
    for key, value in probe.state[small].items():
        if isinstance(value, Tensor):
            entry = f"optimizer/{name}/{key}"
            if value.shape == small.shape:
                yield _slice(entry, p)
            elif value.numel() == 1:
                yield Slice(entry, entry, 0, 1)
            else:
                raise InvalidInput(
                    f"{entry}: {type(optimizer).__name__} keeps {tuple(value.shape)} of {tuple(small.shape)} elements, "
                    "and which part of it a rank has is known after its first step alone"
                )


def _slice(name: str, tensor: Tensor) -> Slice:
    if not isinstance(tensor, DTensor):
        return Slice(name, name, 0, tensor.numel())
    if any(placement.is_partial() for placement in tensor.placements):
        raise InvalidInput(
            f"{name}: its parts are summands ({tensor.placements}), and no state is committed in summands"
        )
    local, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    held = tuple(tensor.to_local().shape)
    if tuple(local) != held:
        raise InvalidInput(f"{name}: holds {held}, and {tensor.placements} give {tuple(local)}")
    return box(name, tuple(tensor.shape), tuple(local), tuple(offset))


def box(name: str, shape: Sequence[int], local: Sequence[int], offset: Sequence[int]) -> Slice:
    """Return the slice of an entry of ``shape`` that has ``local`` elements from ``offset`` on, by dimension.

    Raises:
        InvalidInput: they are not runs of one length, one distance apart; by name.
    """
    count = math.prod(local)
    cut = [at for at, (part, whole) in enumerate(zip(local, shape, strict=True)) if part != whole]
    if not cut or not count:
        return Slice(name, name, 0, count)
    inner = math.prod(shape[cut[-1] + 1 :])
    run, stride = local[cut[-1]] * inner, shape[cut[-1]] * inner
    start = sum(at * math.prod(shape[dim + 1 :]) for dim, at in enumerate(offset))
    if count == run:
        return Slice(name, name, start, count)
    # Rows that follow each other: before the last dimension that is cut another may be, if none is whole before that.
    outer = cut[:-1]
    if len(outer) > 1 or (outer and math.prod(shape[: outer[0]]) > 1):
        raise InvalidInput(f"{name}: {tuple(local)} of {tuple(shape)} is no part that a shard map can name")
    return Slice(name, name, start, count, run, stride)
