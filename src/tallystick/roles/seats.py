"""What a referee knows of each party of a dispute, and how it asks for more."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from tallystick.commit.state import (
    SUMMARY_LIMIT,
    Entry,
    EntrySummary,
    HeldState,
    StateSummary,
    parse_state_summary,
    summarise,
)
from tallystick.dispute.exchange import ANSWER_LIMIT, Answer, Question, QuestionChannel, ask_one, size_of
from tallystick.dispute.moves import hash_in
from tallystick.dispute.terms import Party
from tallystick.errors import InvalidInput, Mismatch
from tallystick.execution.hashing import leaf_hashes
from tallystick.run.transcript import Transcript
from tallystick.store.files import frame_digest


class StepParty(Protocol):
    """What a judge of one step asks of a party."""

    def witness_at(self, index: int, names: Sequence[str] | None = None) -> HeldState | None:
        """Return the state after ``index`` steps, or entries of it; None if the party cannot open it."""
        ...

    def commitment_at(self, index: int) -> bytes:
        """Return what the party claims for the state after ``index`` steps."""
        ...

    def find_unopened_checkpoint(self, index: int) -> str | None:
        """Return why the party cannot open its own last checkpoint up to ``index``, or None if it can."""
        ...

    def frame(self, step: int) -> bytes:
        """Return the trainer's log of a step.

        Raises:
            InvalidInput: there is none.
        """
        ...


class Seat:
    """What the referee knows of one party, and how it asks for more; nothing is asked for twice.

    A state of more than ``most`` bytes, or whose names have more than ``most_names`` bytes in a question, is not taken: the
    party that claims it cannot open it.
    """

    def __init__(
        self,
        table: QuestionChannel,
        party: Party,
        transcript: Transcript,
        hints: Mapping[str, object],
        most: int,
        most_names: int,
    ) -> None:
        self.table, self.transcript, self.hints = table, transcript, hints
        self.most, self.most_names = most, most_names
        self.party: Party = party
        self.claims = {c.steps_done: bytes.fromhex(c.state_root) for c in transcript.checkpoints()}
        self.claims[0] = bytes.fromhex(transcript.specification.initial_state)
        self._summaries: dict[int, StateSummary | str] = {}
        self._states: dict[tuple[int, tuple[str, ...]], HeldState | None] = {}
        self._frames: dict[int, bytes | str] = {}

    def question(self, index: int) -> Question:
        """Return the question for the state's root after ``index`` steps."""
        return Question(self.party, "claim", {"index": index, **self.hints})

    def commitment_at(self, index: int) -> bytes:
        """Return what the party claims for the state after ``index`` steps: what it published, else what it answers."""
        if index not in self.claims:
            self.claims[index] = ask_one(self.table, self.question(index), read_claim)
        return self.claims[index]

    def confirm(self, index: int) -> None:
        """Have the party sign what it published for the state after ``index`` steps: its documents may come from anybody."""

        def read(answer: Answer) -> None:
            if (said := read_claim(answer)) != self.claims[index]:
                raise Mismatch(f"answer: claims state {said.hex()}, published was {self.claims[index].hex()}")

        ask_one(self.table, self.question(index), read)

    def summary_at(self, index: int) -> StateSummary | str:
        """Return the summary of the state that opens the party's claim, or why there is none."""
        if index not in self._summaries:
            root = self.commitment_at(index)

            def read(answer: Answer) -> StateSummary | str:
                if answer.cannot is not None:
                    return answer.cannot
                (part,) = answer.expect_parts(1)
                summary = parse_state_summary(bytes(part))
                if summary.root() != root:
                    raise Mismatch(
                        f"answer: the summary is of state {summary.root().hex()}, claimed is {root.hex()}",
                        where="state of the summary",
                        own=summary.root().hex(),
                        stated=root.hex(),
                    )
                if (size := sum(entry.nbytes for entry in summary.entries)) > self.most:
                    return f"the state has {size} bytes, at most {self.most} are taken"
                if (size := sum(nbytes_of_name(entry.name) for entry in summary.entries)) > self.most_names:
                    return f"the state's names have {size} bytes, at most {self.most_names} are taken"
                return summary

            question = Question(self.party, "summary", {"index": index}, (), SUMMARY_LIMIT)
            self._summaries[index] = ask_one(self.table, question, read)
        return self._summaries[index]

    def witness_at(self, index: int, names: Sequence[str] | None = None) -> HeldState | None:
        """Return the state that opens the party's claim, all of it or the entries of those names; None if it cannot open it."""
        summary = self.summary_at(index)
        if isinstance(summary, str):
            return None
        entries = [entry for entry in summary.entries if names is None or entry.name in names]
        wanted = tuple(entry.name for entry in entries)
        if (index, wanted) not in self._states:
            body = {"index": index, "names": list(wanted)}
            question = Question(self.party, "entries", body, (), sum(entry.nbytes for entry in entries))
            self._states[(index, wanted)] = ask_one(
                self.table, question, partial(_read_entries, entries, summary)
            )
        return self._states[(index, wanted)]

    def forget(self, index: int) -> None:
        """Hold the state after ``index`` steps no longer; it is asked for again if it is wanted."""
        for place in [each for each in self._states if each[0] == index]:
            del self._states[place]

    def find_unopened_checkpoint(self, index: int) -> str | None:
        """Return why the party cannot open its own last checkpoint up to ``index``, or None if it can."""
        start = max(c.steps_done for c in self.transcript.checkpoints() if c.steps_done <= index)
        summary = self.summary_at(start)
        if isinstance(summary, str):
            return summary
        return (
            None
            if self.witness_at(start) is not None
            else f"the state after {start} steps is not handed over"
        )

    def frame(self, step: int) -> bytes:
        """Return the trainer's log of a step, which its record names.

        Raises:
            InvalidInput: the trainer says that it has none.
        """
        if step not in self._frames:
            record = self.transcript.record(step)
            if record.log_bytes > ANSWER_LIMIT:  # nobody could hand it over
                raise InvalidInput(
                    f"the log of step {step} has {record.log_bytes} bytes, at most {ANSWER_LIMIT} are taken"
                )

            def read(answer: Answer) -> bytes | str:
                if answer.cannot is not None:
                    return answer.cannot
                data = bytes(answer.expect_parts(1)[0])
                if frame_digest(data) != record.log:
                    raise Mismatch(f"answer: the log of step {step} is not the one that its record names")
                return data

            question = Question(self.party, "frame", {"step": step}, (), record.log_bytes)
            self._frames[step] = ask_one(self.table, question, read)
        found = self._frames[step]
        if isinstance(found, str):
            raise InvalidInput(found)
        return found


def nbytes_of_name(name: str) -> int:
    """Return how long a state entry's name is in a question."""
    return len(json.dumps(name)) + 1


def read_claim(answer: Answer) -> bytes:
    """Return the root that an answer claims."""
    answer.expect_parts(0)
    return hash_in(answer.fields("commitment").text("commitment"), "a commitment")


def _read_entries(entries: Sequence[EntrySummary], summary: StateSummary, answer: Answer) -> HeldState | None:
    if answer.cannot is not None:
        return None
    held: dict[str, Entry] = {}
    for stated, part in zip(entries, answer.expect_parts(len(entries)), strict=True):
        if size_of(part) != stated.nbytes:
            raise InvalidInput(
                f"answer: entry {stated.name!r} has {stated.nbytes} bytes, got {size_of(part)}"
            )
        held[stated.name] = Entry(stated.name, stated.dtype, stated.shape, memoryview(part))
    with ThreadPoolExecutor(os.cpu_count() or 1, "tally-hash") as pool:
        found = summarise(held.values(), pool=pool, leaves=leaf_hashes)
    if list(found.entries) != list(entries):
        raise Mismatch("answer: the entries are not those of the summary")
    return HeldState(held, summary)
