"""Whether a job is the same in every process: asked before it convicts anybody (spec/dispute.md 14).

The order of a set of strings hangs on the interpreter's hash seed, an unseeded generator on the clock. Whoever repeats such a
job has other data or another loss, and so has whoever repeats it again. Two processes with other hash seeds build it and
repeat a step; what they do not have in common is nobody's doing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tallystick.commit.state import HeldState
from tallystick.execution.job import JobSource
from tallystick.roles.panel import Question, opinions_on, same_arithmetic

PARTS = {
    "settings": "optimizer and scheduler",
    "built": "what is not trained",
    "batch": "the data",
    "step": "what a step computes",
}


def find_unsteady(
    run: Path, source: JobSource | None, step: int, state: HeldState | None = None
) -> str | None:
    """Return what two processes on this machine do not agree on, of the job of the ``run`` and of its data in ``step``.

    None if they agree, or if the job is no file's and cannot be given to another process.

    Args:
        run: a directory with the run's documents.
        source: the job's.
        step: whose data are compared.
        state: before any step of the run, which both repeat; without it no step is.
    """
    if source is None or type(source) is not JobSource:
        return None
    said = opinions_on(Question("same", run, run, source, step, agreed=state), same_arithmetic())
    found: list[Mapping[str, str]] = []
    for opinion in said:
        if opinion is None or not opinion.answer.startswith("{"):
            return "another process cannot build the job"
        found.append(json.loads(opinion.answer))
    parts = [name for key, name in PARTS.items() if found[0].get(key) != found[1].get(key)]
    if not parts:
        return None
    return (
        f"step {step}: two processes on one machine do not agree on {' and '.join(parts)} of the job: the order of a set, "
        "an unseeded generator, the clock? Sort sets, seed generators in build() and batch()"
    )
