"""What a run or an audit came to, for the trackers that its experiments are in: MLflow, TensorBoard, and those that take a dict.

For instance, after the last step of a script::

    run = tallystick.attach(model, optimizer)
    ...
    run.finish()
    log_result(run.result, mlflow)          # or a torch.utils.tensorboard.SummaryWriter

Neither library is imported here. A tracker's word is its own: what proves anything is the run directory, and who signed for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from tallystick.errors import InvalidInput
from tallystick.roles.audit_report import AuditReport
from tallystick.run.documents import RunStatement


def metrics_of(result: RunStatement | AuditReport | None) -> dict[str, float]:
    """Return the numbers of a statement or a report, by names that begin with ``tally/``; none of a script left alone.

    Of a report: steps repeated; elements of committed states that differ; roundings and decisions that the log took from the
    auditor's own, how many noise explains at most, and the share that it could have chosen; the relative size of the largest
    move of one step's gradient, and of the largest that the budget allows; how far the log's choices led one tensor at most,
    over its way; parameters whose gradient was nothing but noise (``noise.freedom.Freedom``).
    """
    if result is None:
        return {}
    found: dict[str, float] = {"steps": result.steps}
    if isinstance(result, AuditReport):
        freedom = result.freedom
        found |= {
            "differing_elements": result.differing_elements,
            "moved": freedom.moved,
            "move_budget": freedom.move_budget,
            "decisions_moved": freedom.decisions_moved,
            "freedom": freedom.fraction,
            "largest_move": freedom.largest_move,
            "largest_steer": freedom.largest_steer,
            "led": freedom.led,
            "silenced_parameters": freedom.silenced_parameters,
        }
    return {f"tally/{name}": float(value) for name, value in found.items()}


def tags_of(result: RunStatement | AuditReport | None) -> dict[str, str]:
    """Return the root of the run in hexadecimal, and of a recorded one that of its final state, by names as in ``metrics_of``.

    An audit's verdict is not among them: ``tally audit`` asks other arithmetics before it accuses, after the script has ended.
    """
    if result is None:
        return {}
    final = {"tally/final_state": result.final_state} if isinstance(result, RunStatement) else {}
    return {"tally/root": result.root, **final}


def log_result(result: RunStatement | AuditReport | None, tracker: Any) -> None:
    """Log both to a tracker: the module ``mlflow``, what else has its ``log_metrics`` and ``set_tags``, or a ``SummaryWriter``.

    Of the module it is the run that is active, or was last: transformers' Trainer ends its own with the training. If there was
    none, one is begun and ended.

    Raises:
        InvalidInput: it has the methods of neither.
    """
    numbers, texts = metrics_of(result), tags_of(result)
    if all(hasattr(tracker, name) for name in ("log_metrics", "set_tags")):
        if result is not None:  # MLflow begins a run where it is given nothing, too
            _log_to_mlflow(numbers, texts, tracker)
    elif all(hasattr(tracker, name) for name in ("add_scalar", "add_text")):
        for name, number in numbers.items():
            tracker.add_scalar(name, number, 0 if result is None else result.steps)
        for name, text in texts.items():
            tracker.add_text(name, text)
    else:
        raise InvalidInput(
            f"tracker: {type(tracker).__name__} has neither log_metrics and set_tags (MLflow) nor add_scalar and add_text "
            "(TensorBoard); metrics_of and tags_of return dicts for any other"
        )


def _log_to_mlflow(numbers: Mapping[str, float], texts: Mapping[str, str], tracker: Any) -> None:
    is_module = all(hasattr(tracker, name) for name in ("active_run", "last_active_run", "MlflowClient"))
    run = (tracker.active_run() or tracker.last_active_run()) if is_module else None
    if run is not None:
        client = tracker.MlflowClient()
        for name, number in numbers.items():
            client.log_metric(run.info.run_id, name, number)
        for name, text in texts.items():
            client.set_tag(run.info.run_id, name, text)
        return
    with tracker.start_run() if is_module else nullcontext():
        tracker.log_metrics(numbers)
        tracker.set_tags(texts)
