"""Both parties of a dispute in one process, asked as if files passed between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar, cast

from tallystick.commit.encoding import canonical_json, parse_canonical_json
from tallystick.dispute.exchange import HEAD_LIMIT, Answer, Question
from tallystick.dispute.terms import Party
from tallystick.roles.parties import Respondent

Value = TypeVar("Value")


def _as_asked(question: Question) -> Question:
    """Return the question as a file would bring it; bulk data is passed on as it is."""
    return replace(question, body=_through_json(question.body))


def _as_sent(answer: Answer) -> Answer:
    return replace(answer, body=_through_json(answer.body))


def _through_json(body: Mapping[str, object]) -> dict[str, object]:
    data = canonical_json(dict(body))
    return cast("dict[str, object]", parse_canonical_json(data, what="message", limit=HEAD_LIMIT))


class LocalTable:
    """Both parties in one process, which answer at once and without a clock."""

    deadline = "no deadline"

    def __init__(self, parties: Mapping[Party, Respondent]) -> None:
        self.parties = parties

    def ask(
        self, questions: Mapping[Party, Question], read: Callable[[Party, Answer], Value]
    ) -> Mapping[Party, Value]:
        """Put each question to its party."""
        if any(question.kind == "list" for question in questions.values()):
            self._share()
        return {
            party: read(party, _as_sent(self.parties[party].answer(_as_asked(question))))
            for party, question in questions.items()
        }

    def _share(self) -> None:
        """Let both parties hold a state they agree on only once in this process's memory."""
        mine, other = self.parties["trainer"].trace.held, self.parties["auditor"].trace.held
        for index in mine.keys() & other.keys():
            if mine[index].root == other[index].root:
                other[index] = mine[index]
