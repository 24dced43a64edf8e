"""One of several ranks that hold a recorded run's states between them, observed by the agent of a chip of its own.

    python rank.py RANK RANKS KIND STORE RUN CHIP SHARDS

It cuts the model of ``digits`` over the ranks as KIND says (ddp, fsdp2, tp, both, pipeline), takes its part of the states after
as many steps as its input says, by torch's own loading of checkpoints, and writes the shard map to SHARDS.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer

from tallystick.commit.state import Entry
from tallystick.execution.job import find_source
from tallystick.integrations.observed import Registration
from tallystick.integrations.run_replayer import RunReplayer
from tallystick.integrations.sharded import shards_of
from tallystick.store.chips import ChipDirectory
from tallystick.store.files import RunDirectory

PLAN = {"hidden": ColwiseParallel(), "head": RowwiseParallel()}
STAGES = (("conv1", "norm1"), ("conv2", "norm2"), ("hidden",), ("head",))
WHOLE = StateDictOptions(full_state_dict=True, strict=False)


def cut(model: nn.Module, kind: str, rank: int, ranks: int) -> None:
    if kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    elif kind == "tp":
        parallelize_module(model, init_device_mesh("cpu", (ranks,)), PLAN)
    elif kind == "both":
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], PLAN)
        fully_shard(model, mesh=mesh["dp"])
    elif kind == "pipeline":
        mine = {name for stage in STAGES[rank::ranks] for name in stage}
        for name in [name for name, _ in model.named_children() if name not in mine]:
            delattr(model, name)


def values_in(state: Mapping[str, Entry], front: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(front): torch.from_numpy(
            np.frombuffer(entry.data, "<f4").reshape(entry.shape).copy()
        )
        for name, entry in state.items()
        if name.startswith(front) and entry.dtype == "F32"
    }


def take(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Entry]) -> None:
    """Take what this rank holds of a state: of the momentum first, by the same way."""
    momenta = {
        name.removesuffix("/momentum_buffer"): each for name, each in values_in(state, "optimizer/").items()
    }
    weights = values_in(state, "model/")
    names = [name for name, _ in model.named_parameters()]  # in one order: torch's loading is collective
    for values in (momenta, weights):
        set_model_state_dict(model, {name: values[name] for name in names}, options=WHOLE)
        if values is momenta:
            for p in model.parameters():
                optimizer.state[p]["momentum_buffer"] = p.detach().clone()


def main() -> None:
    rank, ranks, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    store, run, chip, shards = (Path(each) for each in sys.argv[4:])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    source = find_source("digits")
    replayer = RunReplayer(RunDirectory(run), source)
    job = source.build(replayer.transcript.specification.job.settings, 1)
    model = job.model
    held = nn.parallel.DistributedDataParallel(model).module if kind == "ddp" else model
    cut(held, kind, rank, ranks)
    optimizer = torch.optim.SGD(held.parameters(), lr=0.05, momentum=0.9)
    registration: Registration | None = None
    committed = shards_of(held, optimizer)  # before the optimizer has anything
    for line in sys.stdin:
        ((_, state),) = replayer.states([int(line)])
        take(held, optimizer, state)
        if registration is not None:
            registration.close()
        registration = Registration(ChipDirectory(chip), held, optimizer, steps_done=int(line))
        if shards_of(held, optimizer) != committed:
            raise SystemExit("the shard map is another one than before the first step")
        if rank == 0:
            shards.write_text(json.dumps([[piece.row() for piece in each] for each in committed]))
        dist.barrier()
        print("ready", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
