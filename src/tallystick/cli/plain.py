"""The control: a recorded job trained again by a plain loop, with no site rounded and nothing logged.

    python -m tallystick.cli.plain RUN OUT

Begins with the run's committed initial weights, ends with the final ones in OUT (float32, little-endian, in
the order of the model's parameters) and prints the loop's seconds. Two machines that run it get two results.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tallystick.store.files import RunDirectory, storing

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def train_plainly(directory: RunDirectory) -> tuple[npt.NDArray[np.float32], float]:
    """Return the final weights (n,) and the seconds that the loop took, in PyTorch's own float32 arithmetic.

    Raises:
        InvalidInput: the run, its job or its initial state cannot be read.
    """
    import numpy as np
    import torch

    from tallystick.execution.job import find_source
    from tallystick.execution.step import split_batch

    specification = directory.load_specification()
    job = find_source(specification.job.path).build(specification.job.settings)
    initial = directory.load_committed(0, specification.initial_state)
    with torch.no_grad():
        for name, parameter in job.model.named_parameters():
            entry = initial[f"model/{name}"]
            values = torch.frombuffer(bytearray(entry.data), dtype=torch.float32)
            parameter.copy_(values.reshape(parameter.shape))
    torch.manual_seed(specification.seed)
    started = time.perf_counter()
    for step in range(specification.steps):
        for part in split_batch(job.batch(step), job.accumulation):
            torch.autograd.backward(job.loss(job.model, part) / job.accumulation)
        if job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(job.model.parameters(), job.clip_norm)
        job.optimizer.step()
        job.optimizer.zero_grad(set_to_none=True)
        if job.scheduler is not None:
            job.scheduler.step()
        if job.after_step is not None:
            job.after_step(step)
    seconds = time.perf_counter() - started
    weights = [p.detach().to("cpu", torch.float32).reshape(-1).numpy() for p in job.model.parameters()]
    return np.concatenate(weights).astype("<f4"), seconds


def main(arguments: list[str]) -> int:
    """Train the run in ``arguments[0]`` plainly and write its weights to ``arguments[1]``."""
    weights, seconds = train_plainly(RunDirectory(Path(arguments[0])))
    out = Path(arguments[1])
    with storing(str(out)):
        out.write_bytes(weights.tobytes())
    print(seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
