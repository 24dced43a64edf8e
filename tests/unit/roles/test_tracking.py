"""What trackers of experiments are given of a run and of an audit."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tallystick.errors import InvalidInput
from tallystick.execution.noise.freedom import Freedom
from tallystick.integrations.tracking import log_result, metrics_of, tags_of
from tallystick.roles.audit_report import AuditReport, SegmentResult
from tallystick.run.documents import RunStatement

STATEMENT = RunStatement(tree_size=6, root="ab" * 32, steps=5, final_state="cd" * 32)
ROOTS = {"tally/root": "ab" * 32, "tally/final_state": "cd" * 32}


class Mlflow:
    """As ``mlflow``, and a client of its own, take them."""

    def __init__(self) -> None:
        self.metrics, self.tags = dict[str, float](), dict[str, str]()

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics |= metrics

    def set_tags(self, tags: dict[str, Any]) -> None:
        self.tags |= tags


class SummaryWriter:
    """As that of ``torch.utils.tensorboard`` takes them."""

    def __init__(self) -> None:
        self.scalars, self.texts = list[tuple[str, float, int | None]](), dict[str, str]()

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        self.scalars.append((tag, scalar_value, global_step))

    def add_text(self, tag: str, text_string: str) -> None:
        self.texts[tag] = text_string


class Module(Mlflow):
    """As the module: with runs, which go by their number."""

    def __init__(self, active: int | None = None, last: int | None = None) -> None:
        super().__init__()
        self.active, self.last, self.begun = active, last, 0
        self.logged = list[tuple[int, str, object]]()

    def active_run(self) -> SimpleNamespace | None:
        return None if self.active is None else SimpleNamespace(info=SimpleNamespace(run_id=self.active))

    def last_active_run(self) -> SimpleNamespace | None:
        return None if self.last is None else SimpleNamespace(info=SimpleNamespace(run_id=self.last))

    def MlflowClient(self) -> Module:  # noqa: N802 # as it is called there
        return self

    def log_metric(self, run_id: int, key: str, value: float) -> None:
        self.logged.append((run_id, key, value))

    set_tag = log_metric

    def start_run(self) -> AbstractContextManager[None]:
        self.begun += 1
        return nullcontext()


@pytest.mark.parametrize(("active", "last", "run"), [(1, 2, 1), (None, 2, 2), (1, None, 1)])
def test_mlflows_run_is_the_active_one_or_the_last(active: int | None, last: int | None, run: int) -> None:
    module = Module(active, last)
    log_result(STATEMENT, module)
    assert module.logged == [(run, "tally/steps", 5.0), *((run, *each) for each in ROOTS.items())]
    assert (module.begun, module.metrics, module.tags) == (0, {}, {})


def test_where_mlflow_has_no_run_one_is_begun() -> None:
    module = Module()
    log_result(None, module)
    assert module.begun == 0
    log_result(STATEMENT, module)
    assert (module.begun, module.metrics, module.tags) == (1, {"tally/steps": 5.0}, ROOTS)


def report() -> AuditReport:
    segments = [SegmentResult(0, 3, "match"), SegmentResult(3, 5, "match", differing_elements=2)]
    freedom = Freedom(near=4, elements=16, moved=3, expected_moves=2.0, decisions_moved=1, led=0.5)
    return AuditReport("run", "sse4", "ab" * 32, segments, freedom)


def test_a_statement_is_logged_with_its_roots_to_either_tracker() -> None:
    mlflow, board = Mlflow(), SummaryWriter()
    for tracker in (mlflow, board):
        log_result(STATEMENT, tracker)
    assert mlflow.metrics == {"tally/steps": 5.0}
    assert mlflow.tags == board.texts == ROOTS
    assert board.scalars == [("tally/steps", 5.0, 5)]


def test_of_an_audit_are_logged_the_freedom_and_no_verdict() -> None:
    mlflow, board = Mlflow(), SummaryWriter()
    for tracker in (mlflow, board):
        log_result(report(), tracker)
    found = mlflow.metrics
    assert (found["tally/moved"], found["tally/freedom"], found["tally/led"]) == (3.0, 0.25, 0.5)
    assert (found["tally/differing_elements"], found["tally/decisions_moved"], found["tally/steps"]) == (
        2,
        1,
        5,
    )
    assert found["tally/move_budget"] == report().freedom.move_budget > 3
    assert {name: value for name, value, step in board.scalars if step == 5} == found == metrics_of(report())
    assert mlflow.tags == board.texts == tags_of(report()) == {"tally/root": "ab" * 32}


def test_a_script_that_is_left_alone_logs_nothing() -> None:
    class Nothing:
        """A tracker that begins a run when it is asked for anything."""

        def log_metrics(self, metrics: object) -> None:
            raise AssertionError(metrics)

        set_tags = log_metrics

    board = SummaryWriter()
    log_result(None, Nothing())
    log_result(None, board)
    assert (board.scalars, board.texts, metrics_of(None), tags_of(None)) == ([], {}, {}, {})


def test_what_is_no_tracker_is_named() -> None:
    with pytest.raises(InvalidInput, match="tracker: list has neither log_metrics"):
        log_result(STATEMENT, [])
