"""In what two runs differ by their own documents: what was ordered, and what each step's record says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from tallystick.commit.encoding import parse_hex_float
from tallystick.diagnosis.causes import Divergence, Explanation
from tallystick.run.documents import Specification, StepRecord
from tallystick.run.program import compare_programs
from tallystick.run.transcript import Transcript


def first_parting(own: Transcript, stated: Transcript, differ: Callable[[int], bool]) -> int | None:
    """Return the first step whose data, loss, schedule or state differ, by the two runs' records; None if none does.

    ``differ`` is asked whether the states committed after so many steps hold other numbers, where only their roots differ.
    """
    for mine, theirs in zip(own.records, stated.records, strict=False):
        same_log = replace(mine, log=theirs.log, log_bytes=theirs.log_bytes)
        if same_log == theirs:
            continue
        if replace(same_log, state_root=theirs.state_root) != theirs:
            return mine.step
        if mine.state_root is not None and theirs.state_root is not None and differ(mine.step + 1):
            return mine.step
    return None


def specification_differences(own: Specification, stated: Specification) -> dict[str, tuple[str, str]]:
    """Return in what two specifications order different work: name to (own, stated); versions and notes left out."""
    pairs: dict[str, tuple[str, str]] = {}
    for name in ("seed", "steps", "checkpoint_every", "accumulation", "world_size"):
        pairs[name] = (str(getattr(own, name)), str(getattr(stated, name)))
    programs = compare_programs(own.job.program, stated.job.program)
    pairs |= {each.subject: (each.own, each.stated) for each in programs}
    pairs["job source"] = (own.job.source_digest, stated.job.source_digest)
    pairs["dataset"] = (str(own.job.dataset_digest), str(stated.job.dataset_digest))
    pairs["policy"] = (own.policy.name, stated.policy.name)
    for what, mine, theirs in (
        ("setting", own.job.settings, stated.job.settings),
        ("policy", own.policy.parameters, stated.policy.parameters),
    ):
        for name in sorted(mine.keys() | theirs.keys()):
            pairs[f"{what} {name}"] = (str(mine.get(name, "default")), str(theirs.get(name, "default")))
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def record_differences(own: StepRecord, stated: StepRecord, batches: Mapping[str, int]) -> list[Explanation]:
    """Return what two records of one step say of different work: data, hyper-parameters, a skipped optimizer.

    ``batches`` are the steps of our own run by their batches' digests.
    """
    found: list[Explanation] = []
    if own.batch != stated.batch:
        there = batches.get(stated.batch)
        where = "" if there is None else f"; the latter is that of our step {there}"
        text = f"by their own records step {own.step} has other data: batch {_short(own.batch)} against {_short(stated.batch)}"
        found.append(Explanation("other_data", "confirmed", text + where))
    if own.micro_batches != stated.micro_batches:
        text = f"by their own records step {own.step} has {own.micro_batches} micro-batches against {stated.micro_batches}"
        found.append(Explanation("other_data", "confirmed", text))
    mine, theirs = ({(g, n): v for g, n, v in record.schedule} for record in (own, stated))
    for group, name in sorted(mine.keys() | theirs.keys()):
        pair = mine.get((group, name)), theirs.get((group, name))
        if (
            pair[0] == pair[1] or name == "initial_lr"
        ):  # a note of the scheduler's, which the optimizer does not read
            continue
        shown = " against ".join(_value(value) for value in pair)
        cause = "other_rate" if name == "lr" else "other_hyperparameter"
        text = f"by their own records step {own.step} has {name} of group {group} {shown}"
        found.append(Explanation(cause, "confirmed", text))
    if own.skipped != stated.skipped:
        who = "first" if own.skipped else "second"
        text = f"by their own records the {who} run leaves the optimizer out in step {own.step}, the other does not"
        found.append(Explanation("skipped_step", "confirmed", text))
    return found


def _value(value: str | bool | int | None) -> str:
    if not isinstance(value, str):
        return "none" if value is None else str(value)
    return f"{parse_hex_float(value, what='a hyper-parameter'):.9g}"


def different_versions(own: Specification, stated: Specification) -> dict[str, tuple[str, str]]:
    """Return the software whose versions two specifications state differently: name to (own, stated)."""
    mine, theirs = own.versions, stated.versions
    pairs = {
        name: (mine.get(name, "none"), theirs.get(name, "none"))
        for name in sorted(mine.keys() | theirs.keys())
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def read_documents(
    mine: Transcript, theirs: Transcript, found: Divergence
) -> tuple[list[Explanation], int | None]:
    """Return in what two runs are different work by their own documents, and the first step whose records say so.

    What is not compared is noted.
    """
    said: list[Explanation] = []
    orders = specification_differences(mine.specification, theirs.specification)
    if orders:
        shown = [f"{name}: {_short(a)} against {_short(b)}" for name, (a, b) in orders.items()]
        text = "; ".join(shown[:6]) + (f"; and {len(shown) - 6} more" if len(shown) > 6 else "")
        said.append(
            Explanation("other_specification", "confirmed", f"the runs were ordered differently: {text}")
        )
    lengths = mine.num_steps, theirs.num_steps
    if lengths[0] != lengths[1]:
        found.notes.append(
            f"the runs have {lengths[0]} and {lengths[1]} recorded steps: those after {min(lengths)} were not compared"
        )
    batches = {record.batch: record.step for record in reversed(mine.records)}
    for one, other in zip(mine.records, theirs.records, strict=False):
        if (one.step, one.rank) != (other.step, other.rank):
            found.notes.append(
                f"the runs have other ranks: records from step {one.step} on were not compared"
            )
            break
        if differences := record_differences(one, other, batches):
            return said + differences, one.step
    return said, None


def _short(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:16]}.."
