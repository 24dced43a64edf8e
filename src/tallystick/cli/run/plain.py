"""What a recorded job costs without Tallystick: its plain PyTorch loop, timed in a process of its own.

    python -m tallystick.cli.run.plain RUN

Trains the job of the run in float32 for as many steps and prints the loop's seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tallystick.store.files import RunDirectory


def plain_seconds(directory: RunDirectory, job: str | None = None) -> float:
    """Return the seconds of the plain loop over all steps of the run; the first step, which allocates, counts too.

    Raises:
        InvalidInput: the run or its job cannot be read.
    """
    import torch

    from tallystick.cli.options import choose_source
    from tallystick.roles.plain_loop import PlainLoop

    specification = directory.load_specification()
    built = choose_source(job, specification.job.path).build(specification.job.settings, specification.seed)
    loop = PlainLoop(built, torch.float32)
    return sum(loop.step(number)["total"] for number in range(specification.steps))


def main(arguments: list[str]) -> int:
    """Print the plain loop's seconds for the run in ``arguments[0]``, of the job ``arguments[1]`` if that is no shipped one."""
    print(plain_seconds(RunDirectory(Path(arguments[0])), *arguments[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
