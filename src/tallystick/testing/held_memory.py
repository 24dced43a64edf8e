"""Memory of this process as a probe sees it: what a simulated chip holds."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from tallystick.fleet.agent.memory import Observation, Region, reader_of


class HeldMemory:
    """Memory that somebody in this process hands over: what a simulated chip holds."""

    def __init__(self, take: Callable[[], Sequence[tuple[Region, bytes | memoryview]]]) -> None:
        self.take = take
        self.step: int | None = None
        self.torn = False

    @contextmanager
    def frozen(self, *, copy: bool) -> Generator[Observation]:
        """Hold the memory still: it is this thread's, so nothing else runs."""
        held = [(region, bytes(data) if copy else data) for region, data in self.take()]
        yield Observation(
            tuple(region for region, _ in held),
            tuple(reader_of(data) for _, data in held),
            self.step,
            self.torn,
        )
