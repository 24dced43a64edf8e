"""What each party of a dispute spent, kept apart although one process plays them all.

In a real dispute the parties have machines of their own: both repeat the segment and answer a round of bisection at the
same time, but the auditor looks at the trainer's list only once it is there. The benchmarks add up that schedule from what
was charged here.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Spender = Literal["trainer", "auditor", "judge"]
Activity = Literal[
    "load", "segment", "traced", "again", "roots", "list", "examination", "moves", "ruling", "panel"
]
"""Load a checkpoint, repeat the segment, the disputed step of it operator by operator, repeat more than that, state roots;
commit to the list, examine it, answer; rule; ask the judge's other arithmetics."""


@dataclass
class Spent:
    """Seconds: elapsed, and of the processor over all threads."""

    wall: float = 0.0
    cpu: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.wall + other.wall, self.cpu + other.cpu)


@dataclass
class Ledger:
    """Seconds by party and activity; charges must not be nested.

    Attributes:
        spent: by party and activity.
        steps: of each plainly repeated step.
    """

    steps: list[Spent] = field(default_factory=list[Spent])
    spent: dict[tuple[Spender, Activity], Spent] = field(
        default_factory=dict[tuple[Spender, Activity], Spent]
    )

    @contextmanager
    def charging(self, who: Spender, activity: Activity) -> Generator[None]:
        """Inside, time passes at the expense of ``who``."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            passed = Spent(time.perf_counter() - wall, time.process_time() - cpu)
            self.spent[(who, activity)] = self.of(who, activity) + passed

    def of(self, who: Spender, *activities: Activity) -> Spent:
        """Return what ``who`` spent on ``activities`` together, on everything if none is named."""
        total = Spent()
        for (spender, activity), spent in self.spent.items():
            if spender == who and (not activities or activity in activities):
                total = total + spent
        return total
