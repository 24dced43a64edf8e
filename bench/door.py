"""How much longer a recorded step takes by ``tallystick.attach`` than in a loop over ``Recorder``: in turns, in one process.

    python bench/door.py [--rounds 60] [--width 128] [--policy fp32]

Two text models alike, one recorded by each, take steps in turns, each first in every other round. Prints the medians of their
steps in milliseconds and the median of the ratios within a round, of time on the clock and on the processor; the same of two
loops over ``Recorder``, which is what the measurement itself makes of no difference.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tallystick
from tallystick.roles.attached import Attached, ProgramRun, attach, wanting

WORDS, LENGTH, BATCH, WARM_UP = 512, 64, 8, 6


class Text(nn.Module):
    """A small transformer that says which word comes next."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.table(words)))


def batch_of(step: int) -> torch.Tensor:
    """Return a batch of made-up words."""
    return torch.randint(0, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    """Return the loss of the next words."""
    return nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def made(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and its optimizer."""
    torch.manual_seed(0)
    model = Text(width)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def by_recorder(path: Path, given: argparse.Namespace) -> Callable[[int], None]:
    """Return what takes a step in a loop over ``Recorder``."""
    model, optimizer = made(given.width)
    run = tallystick.Recorder(path, policy=given.policy, steps=None, program=Path(__file__))
    run.__enter__()
    run.prepare(model, optimizer)

    def step(number: int) -> None:
        with run.step(batch_of(number)) as words:
            run.backward(loss_of(model, words))
            optimizer.step()
            optimizer.zero_grad()

    return step


def by_door(path: Path, given: argparse.Namespace) -> Callable[[int], None]:
    """Return what takes a step of a script that has attached its model."""
    model, optimizer = made(given.width)

    def begin() -> tallystick.Recorder:
        return tallystick.Recorder(path, policy=given.policy, steps=None, program=Path(__file__))

    with wanting(ProgramRun(begin)):
        run: Attached = attach(model, optimizer)

    def step(number: int) -> None:
        loss_of(model, batch_of(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.close_step()

    return step


def ratios(first: Any, second: Any, rounds: int) -> tuple[list[float], ...]:
    """Return what each round's step took of both, on the clock and on the processor, in seconds."""
    times: tuple[list[float], ...] = ([], [], [], [])
    for number in range(rounds + WARM_UP):
        for which in (0, 1) if number % 2 else (1, 0):
            clock, processor = time.perf_counter(), time.process_time()
            (first, second)[which](number)
            if number >= WARM_UP:
                times[which].append(time.perf_counter() - clock)
                times[2 + which].append(time.process_time() - processor)
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--policy", default="fp32")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name, first, second in (
        ("attach over Recorder", by_recorder, by_door),
        ("Recorder over Recorder", by_recorder, by_recorder),
    ):
        with tempfile.TemporaryDirectory() as folder:
            times = ratios(
                first(Path(folder, "first"), given), second(Path(folder, "second"), given), given.rounds
            )
        plain, door, plain_cpu, door_cpu = times
        clock, cpu = (
            statistics.median(b / a for a, b in zip(*pair, strict=True))
            for pair in ((plain, door), (plain_cpu, door_cpu))
        )
        medians = " and ".join(f"{1000 * statistics.median(each):.1f} ms" for each in (plain, door))
        print(f"{name}: {medians}; in a round {clock:.3f} on the clock, {cpu:.3f} on the processor")


if __name__ == "__main__":
    main()
