"""What each party of a dispute spent, kept apart although one process plays them all.

In a real dispute the parties have machines of their own: both repeat the segment and answer a round of bisection at the
same time, but the auditor looks at the trainer's list only once it is there. ``Ledger.beyond_segment`` adds up that
schedule from what was charged here.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, get_args

Spender = Literal["trainer", "auditor", "judge"]
Deed = Literal[
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

    def fields(self) -> dict[str, float]:
        """Return both as a JSON object."""
        return {"cpu": self.cpu, "wall": self.wall}

    @classmethod
    def parse(cls, fields: Mapping[str, float]) -> Spent:
        """Return what ``fields`` gave away."""
        return cls(fields["wall"], fields["cpu"])


@dataclass
class Ledger:
    """Seconds by party and deed; charges must not be nested.

    Attributes:
        spent: by party and deed.
        steps: of each plainly repeated step.
    """

    steps: list[Spent] = field(default_factory=list[Spent])
    spent: dict[tuple[Spender, Deed], Spent] = field(default_factory=dict[tuple[Spender, Deed], Spent])

    @property
    def step(self) -> Spent:
        """What a plain repeated step takes, the median; nothing if none was repeated."""
        if not self.steps:
            return Spent()
        return Spent(median(each.wall for each in self.steps), median(each.cpu for each in self.steps))

    @contextmanager
    def charging(self, who: Spender, deed: Deed) -> Generator[None]:
        """Inside, time passes at the expense of ``who``."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            passed = Spent(time.perf_counter() - wall, time.process_time() - cpu)
            self.spent[(who, deed)] = self.of(who, deed) + passed

    def of(self, who: Spender, *deeds: Deed) -> Spent:
        """Return what ``who`` spent on ``deeds`` together, on everything if none is named."""
        total = Spent()
        for (spender, deed), spent in self.spent.items():
            if spender == who and (not deeds or deed in deeds):
                total = total + spent
        return total

    def beyond_segment(self) -> Spent:
        """Return what the dispute took beyond repeating one segment, the parties on machines of their own.

        The slower party's share of what both do at once, plus everything that one does while the other waits. The disputed
        step belongs to the segment: where it was repeated operator by operator, a plain step is taken off. Sending is
        left out.
        """
        both = self._beside("trainer"), self._beside("auditor")
        slower = Spent(max(each.wall for each in both), max(each.cpu for each in both))
        turns = self.of("trainer", "list", "moves") + self.of("auditor", "examination", "moves")
        return slower + turns + self.of("judge")

    def _beside(self, who: Spender) -> Spent:
        spent, step = self.of(who, "again", "roots", "traced"), self.step
        known = (who, "traced") in self.spent
        return Spent(spent.wall - step.wall, spent.cpu - step.cpu) if known else spent

    def fields(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return everything as JSON objects by party and deed."""
        found: dict[str, dict[str, dict[str, float]]] = {}
        for (who, deed), spent in sorted(self.spent.items()):
            found.setdefault(who, {})[deed] = spent.fields()
        return found

    @classmethod
    def parse(
        cls, fields: Mapping[str, Mapping[str, Mapping[str, float]]], step: Mapping[str, float]
    ) -> Ledger:
        """Return the ledger whose ``fields`` are these and whose median step is ``step``."""
        found = cls([Spent.parse(step)])
        for who in get_args(Spender):
            for deed in get_args(Deed):
                if deed in fields.get(who, {}):
                    found.spent[(who, deed)] = Spent.parse(fields[who][deed])
        return found
