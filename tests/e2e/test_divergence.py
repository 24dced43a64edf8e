"""Every cause is produced for real, diagnosed, and not found in a neighbour that looks like it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tallystick.commit.encoding import hex_float
from tallystick.commit.state import Entry, summarise
from tallystick.diagnosis.causes import Divergence
from tallystick.diagnosis.explain import explain_audit
from tallystick.diagnosis.run_comparison import explain_runs
from tallystick.execution.dispatch.randomness import RandomStream
from tallystick.execution.job import Job, JobSource, find_source
from tallystick.execution.session.hyperparameters import snap
from tallystick.execution.session.step import OpenStep
from tallystick.execution.step import batch_digest
from tallystick.numerics.kernels.measures import fingerprint
from tallystick.numerics.policy import find_policy
from tallystick.roles import trainer
from tallystick.roles.auditor import audit
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory, frame_digest
from tallystick.testing.cheats import CHEATS, forge, tampered

SETTINGS = {"width": "8", "batch": "16"}
STEPS, EVERY = 8, 4
AT = 3  # the state after this step is committed
EARLY = 1  # and after this one it is not
SLOW_FP64 = pytest.param("fp64", marks=pytest.mark.slow)
BRIEF = 0.5  # seconds for causes that repetition does not confirm


def order(policy: str = "fp32") -> Order:
    return Order(find_source("digits"), SETTINGS, find_policy(policy), steps=STEPS, checkpoint_every=EVERY)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def explained(run: RunDirectory, *, seconds: float = 60.0, source: JobSource | None = None) -> Divergence:
    source = find_source("digits") if source is None else source
    report = audit(run, source)
    found = explain_audit(run, source, report, seconds=seconds)
    assert found is not None, report.verdict
    return found


def named(found: Divergence, *statuses: str) -> set[str]:
    return {f.cause for f in found.findings if f.status in (statuses or ("confirmed", "fits"))}


def with_batches(run: RunDirectory, given: Order, change: Callable[[Callable[[int], Any], int], Any]) -> None:
    """Record with changed data and claim the job's own."""
    honest = given.build().batch

    def tamper(job: Job) -> None:
        own = job.batch
        job.batch = lambda step: change(own, step)

    record(tampered(given, tamper), run)
    forge(run, lambda r: replace(r, batch=batch_digest(honest(r.step))))


def with_numbers(run: RunDirectory, given: Order, at: int, **numbers: float) -> None:
    """Record one step with other hyper-parameters and claim the job's own."""
    honest: dict[int, dict[str, float]] = {}
    count = 0

    def tamper(job: Job) -> None:
        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if count == at:
                for index, group in enumerate(optimizer.param_groups):
                    honest[index] = {name: group[name] for name in numbers}
                    group.update({name: group[name] * factor for name, factor in numbers.items()})

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            nonlocal count
            if count == at:
                for index, group in enumerate(optimizer.param_groups):
                    group.update(honest[index])
            count += 1

        job.optimizer.register_step_pre_hook(before)
        job.optimizer.register_step_post_hook(after)

    record(tampered(given, tamper), run)

    def edit(r: Any) -> Any:
        schedule = tuple((g, n, hex_float(honest[g][n]) if n in numbers else v) for g, n, v in r.schedule)
        return replace(r, schedule=schedule) if r.step == at else r

    forge(run, edit)


# -- data -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [AT, EARLY])
def test_the_batch_of_another_step_is_found_by_repetition(run: RunDirectory, at: int) -> None:
    with_batches(run, order(), lambda own, step: own(step + 2) if step == at else own(step))

    found = explained(run)

    assert (found.step, found.cause and found.cause.cause, found.cause and found.cause.status) == (
        at,
        "other_data",
        "confirmed",
    )
    assert f"the batch of step {at + 2}" in found.cause.text
    assert found.operator is not None
    assert (found.operator.operation.name, found.operator.operation.module) == ("aten::convolution", "conv1")
    assert (found.after, found.how) == (at + 1, "committed" if at == AT else "reconstructed")


@pytest.mark.parametrize("policy", ["fp32", SLOW_FP64])
def test_data_that_nobody_can_guess_fits_and_is_not_confirmed(run: RunDirectory, policy: str) -> None:
    CHEATS["other_data"](AT).run(order(policy), run)

    found = explained(run, seconds=BRIEF)

    assert found.cause is not None
    assert (found.cause.cause, found.cause.status) == ("other_data", "fits")
    assert "model/buffer/norm1.running_mean" in found.cause.text
    assert not named(found, "confirmed")
    assert "random_stream" not in named(found)
    assert "altered_log" not in named(found)


@pytest.mark.parametrize("policy", ["fp32", SLOW_FP64])
def test_one_changed_label_is_named(run: RunDirectory, policy: str) -> None:
    CHEATS["poisoned_label"](AT).run(order(policy), run)

    found = explained(run)

    assert found.cause is not None
    assert (found.cause.cause, found.cause.status) == ("other_data", "confirmed")
    assert "element 0 of the batch's whole numbers" in found.cause.text
    assert found.operator is not None
    assert found.operator.operation.name == "aten::nll_loss_forward"


def test_a_record_that_admits_another_batch_is_matched_with_its_step(run: RunDirectory) -> None:
    record(tampered(order(), _early_batches), run)

    found = explained(run)

    assert found.step == 0
    assert named(found, "confirmed") == {"other_data"}
    assert any("it is that of step 1's batch" in f.text for f in found.findings)


def _early_batches(job: Job) -> None:
    own = job.batch
    job.batch = lambda step: own(step + 1)


# -- the update -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fp32", SLOW_FP64, pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("at", [AT, EARLY])
def test_a_raised_rate_is_confirmed_with_its_factor(run: RunDirectory, at: int, policy: str) -> None:
    CHEATS["other_rate"](at).run(order(policy), run)

    found = explained(run)

    assert found.cause is not None
    assert (found.step, found.cause.cause, found.cause.status) == (at, "other_rate", "confirmed")
    assert "1.5 times the learning rate" in found.cause.text
    assert found.update_only
    assert found.operator is None
    assert named(found) == {"other_rate"}


def test_a_rate_that_is_in_no_list_is_estimated_from_the_update(run: RunDirectory) -> None:
    with_numbers(run, order(), AT, lr=1.37)

    found = explained(run)

    assert found.cause is not None
    assert (found.cause.cause, found.cause.status) == ("other_rate", "confirmed")
    assert "1.37 times" in found.cause.text


def test_another_momentum_is_no_other_rate(run: RunDirectory) -> None:
    with_numbers(run, order(), AT, momentum=0.5 / snap(0.9))  # of the number that a session keeps

    found = explained(run)

    assert found.cause is not None
    assert (found.cause.cause, found.cause.status) == ("other_hyperparameter", "confirmed")
    assert "momentum 0.5" in found.cause.text
    assert "other_rate" not in named(found)


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_a_skipped_step_is_confirmed(run: RunDirectory, policy: str) -> None:
    CHEATS["skipped_steps"](AT).run(order(policy), run)

    found = explained(run)

    assert found.cause is not None
    assert (found.step, found.cause.cause, found.cause.status) == (AT, "skipped_step", "confirmed")
    assert named(found) == {"skipped_step"}


# -- random numbers ---------------------------------------------------------------------------------


def test_dropout_drawn_from_another_seed_is_confirmed_with_its_operator(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = OpenStep.micro_batch

    def other(opened: OpenStep, number: int) -> Any:
        if opened.number == AT:
            opened.stream = RandomStream(5)
        return own(opened, number)

    with monkeypatch.context() as recording:
        recording.setattr(OpenStep, "micro_batch", other)
        record(order(), run)

    found = explained(run)

    assert found.cause is not None
    assert (found.step, found.cause.cause, found.cause.status) == (AT, "random_stream", "confirmed")
    assert "seed 5" in found.cause.text
    assert found.operator is not None
    assert (found.operator.operation.name, found.operator.operation.module) == ("aten::bernoulli_", "dropout")
    assert "other_data" not in named(found)


def test_dropout_drawn_from_an_unknown_seed_fits_and_the_data_are_not_blamed_alone(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = OpenStep.micro_batch

    def other(opened: OpenStep, number: int) -> Any:
        if opened.number == AT:
            opened.stream = RandomStream(987_654_321)
        return own(opened, number)

    with monkeypatch.context() as recording:
        recording.setattr(OpenStep, "micro_batch", other)
        record(order(), run)

    found = explained(run, seconds=BRIEF)

    assert "random_stream" in named(found, "fits")
    assert not named(found, "confirmed")
    stream = next(f for f in found.findings if f.cause == "random_stream")
    assert "buffers that see the input before that are the same" in stream.text


# -- log and weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fp32", SLOW_FP64])
def test_a_forged_entry_is_confirmed_by_obeying_it(run: RunDirectory, policy: str) -> None:
    CHEATS["forged_entry"](4).run(order(policy), run)

    found = explained(run, seconds=BRIEF)

    assert found.cause is not None
    assert (found.step, found.cause.cause, found.cause.status) == (4, "altered_log", "confirmed")
    assert "gradient of conv1.weight element" in found.cause.text
    assert found.state is not None
    assert {t.differing for t in found.state.tensors} == {1}


def test_a_forged_entry_is_an_altered_log_whether_or_not_it_leads_to_the_stated_value(
    run: RunDirectory,
) -> None:
    CHEATS["forged_entry"](AT).run(order(), run)

    found = explained(run, seconds=BRIEF)

    assert found.cause is not None
    assert (found.step, found.cause.cause) == (AT, "altered_log")
    if (
        found.cause.status != "confirmed"
    ):  # which of the two it is follows from how fine that element's grid is
        assert found.cause.status == "fits"
        assert not named(found, "confirmed")


def test_a_log_whose_bytes_were_changed_is_broken(run: RunDirectory) -> None:
    record(order(), run)
    path = run.log_path(0)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

    found = explained(run)

    assert found.cause is not None
    assert (found.cause.cause, found.cause.status) == ("broken_log", "confirmed")


def test_the_log_of_another_step_is_recognised(run: RunDirectory) -> None:
    record(order(), run)
    transcript = run.load_transcript()
    frames = run.load_frames(transcript, 0, EVERY)
    frames[AT] = frames[AT - 1]
    run.log_path(0).write_bytes(b"".join(frames[step] for step in range(EVERY)))
    forge(
        run,
        lambda r: replace(r, log=frame_digest(frames[AT]), log_bytes=len(frames[AT])) if r.step == AT else r,
    )

    found = explained(run, seconds=BRIEF)

    assert any(f.cause == "altered_log" and f.text.endswith(f"that of step {AT - 1}") for f in found.findings)


def edit_last_state(
    run: RunDirectory, change: Callable[[np.ndarray], None], *, fingerprint_too: bool
) -> None:
    """Change ``hidden.weight`` of the final state; with ``fingerprint_too`` the last record states the edited state's."""
    entries = run.load_checkpoint(STEPS)
    name = "model/hidden.weight"
    values = np.frombuffer(bytes(entries[name].data), dtype="<f4").copy()
    change(values)
    entries[name] = Entry(name, "F32", entries[name].shape, values.tobytes())
    root = summarise(entries.values()).root().hex()
    run.write_checkpoint(STEPS, list(entries.values()))
    floating = sorted(each for each, entry in entries.items() if entry.dtype == "F32")
    total = sum(
        fingerprint(np.frombuffer(entries[each].data, dtype="<f4"), number << 40)
        for number, each in enumerate(floating)
    )
    mark = f"{total % 2**64:016x}"

    def edit(r: Any) -> Any:
        if r.step != STEPS - 1:
            return r
        return replace(r, state_root=root, fingerprint=mark if fingerprint_too else r.fingerprint)

    forge(run, edit)


def _lift(values: np.ndarray) -> None:
    values[:5] += np.float32(0.01)


@pytest.mark.parametrize(("fingerprint_too", "status"), [(False, "confirmed"), (True, "fits")])
def test_edited_weights_are_seen_by_what_did_not_change(
    run: RunDirectory, fingerprint_too: bool, status: str
) -> None:
    record(order(), run)
    edit_last_state(run, _lift, fingerprint_too=fingerprint_too)

    found = explained(run, seconds=BRIEF)

    assert found.cause is not None
    assert (found.step, found.cause.cause, found.cause.status) == (STEPS - 1, "edited_weights", status)
    assert "model/hidden.weight" in found.cause.text
    assert named(found) == {"edited_weights"}


# -- arithmetic -------------------------------------------------------------------------------------


def test_two_honest_runs_of_other_arithmetic_part_by_noise_alone(tmp_path: Path) -> None:
    first, second = RunDirectory(tmp_path / "first"), RunDirectory(tmp_path / "second")
    # A wider model on the finest grid: some forty roundings go another way in these steps, where one or none would be chance.
    fine = find_policy("fp32", chosen={"gradient_floor": -10})
    given = replace(order(), policy=fine, settings={**SETTINGS, "width": "32"})
    record(given, first)
    record(replace(given, jitter=True), second)

    found = explain_runs(first, second, given.source)

    assert found.cause is not None
    assert (found.cause.cause, found.cause.status) == ("last_bit_noise", "confirmed")
    assert found.state is not None
    assert 0 < found.state.differing < found.state.elements / 100
    assert "other_data" not in named(found)


def test_a_cheated_run_is_no_noise(tmp_path: Path) -> None:
    first, second = RunDirectory(tmp_path / "first"), RunDirectory(tmp_path / "second")
    record(order(), first)
    CHEATS["other_rate"](AT).run(order(), second)

    found = explain_runs(first, second, find_source("digits"))

    assert found.cause is not None
    assert (found.step, found.cause.cause, found.cause.status) == (AT, "other_rate", "confirmed")
    assert "last_bit_noise" not in named(found)


def test_a_run_and_itself_do_not_part(run: RunDirectory) -> None:
    record(order(), run)

    found = explain_runs(run, run, find_source("digits"))

    assert (found.step, found.state, found.findings) == (None, None, [])


@contextmanager
def kernel(name: str, own: Callable[..., Any]) -> Generator[None]:
    """Inside, torch computes one operator on the CPU by ``own``: a library of another make."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library.impl(name, own, "CPU")
        yield
    finally:
        library._destroy()


def _cut(x: torch.Tensor) -> torch.Tensor:
    """Factors with ten bits, as some devices take them when a library's default says so."""
    return (x.contiguous().view(torch.int32) & ~((1 << 13) - 1)).view(torch.float32)


@pytest.mark.parametrize("version", ["2.9.0", None])
def test_another_library_is_suspected_where_versions_differ_and_only_there(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    honest = trainer.environment_versions
    now: set[int] = set()

    def tamper(job: Job) -> None:
        own = job.batch

        def batch(step: int) -> Any:
            now.clear()
            now.add(step)
            return own(step)

        job.batch = batch

    def addmm(
        bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
    ) -> torch.Tensor:
        # Not in step 0, before which the noise is measured: a library that rounds so would measure it.
        return beta * bias + alpha * (torch.mm(_cut(a), _cut(b)) if AT in now else torch.mm(a, b))

    with monkeypatch.context() as recording:
        if version is not None:
            recording.setattr(trainer, "environment_versions", lambda: {**honest(), "torch": version})
        with kernel("addmm", addmm):
            record(tampered(order(), tamper), run)

    found = explained(run, seconds=BRIEF)

    assert not named(found, "confirmed")
    assert ("library_version" in named(found, "fits")) == (version is not None)
    if version is not None:
        text = next(f.text for f in found.findings if f.cause == "library_version")
        assert "2.9.0" in text


EMBEDDING = """
import torch
from torch.nn.functional import cross_entropy
from tallystick.execution.job import Job


class Bag(torch.nn.Module):
    def __init__(self, words, hidden):
        super().__init__()
        self.words = torch.nn.Embedding(words, 64)
        self.hidden = torch.nn.Linear(64, hidden)
        self.head = torch.nn.Linear(hidden, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(torch.tanh(self.words(x)).mean(dim=1))))


def build(settings):
    generator = torch.Generator().manual_seed(0)
    words, hidden = int(settings["words"]), int(settings["hidden"])
    model = Bag(words, hidden)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-64, 64, parameter.shape, generator=generator) / 64)

    def batch(step):
        drawn = torch.Generator().manual_seed(step)
        return torch.randint(0, words, (128, 64), generator=drawn), torch.randint(0, 4, (128,), generator=drawn)

    return Job(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5),
        batch=batch,
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        steps=12,
    )
"""


def _reversed_scatter(
    gradient: torch.Tensor, indices: torch.Tensor, size: int, padding: int, scale: bool
) -> torch.Tensor:
    """The gradient of a look-up with its terms added up from the last to the first."""
    assert padding < 0
    assert not scale
    rows = gradient.reshape(-1, gradient.shape[-1]).flip(0)
    total = torch.zeros(size, gradient.shape[-1], dtype=gradient.dtype)
    return total.index_add_(0, indices.reshape(-1).flip(0), rows)


def _reversed_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.bmm(a.flip(1).unsqueeze(0), b.flip(0).unsqueeze(0)).squeeze(0)


def _embedding_order(tmp_path: Path, words: int, hidden: int) -> Order:
    job = tmp_path / "bag.py"
    job.write_text(EMBEDDING)
    settings = {"words": str(words), "hidden": str(hidden)}
    return Order(
        find_source(str(job)),
        settings,
        find_policy("fp32", chosen={"gradient_floor": -9}),
        steps=12,
        checkpoint_every=4,
    )


def test_sums_over_look_ups_in_another_order_fit_a_scatter(tmp_path: Path) -> None:
    given = _embedding_order(tmp_path, 4096, 32)
    first, second = RunDirectory(tmp_path / "first"), RunDirectory(tmp_path / "second")
    record(given, first)
    with kernel("embedding_dense_backward", _reversed_scatter):
        record(given, second)

    found = explain_runs(first, second, given.source)

    assert [(f.cause, f.status) for f in found.findings] == [
        ("last_bit_noise", "confirmed"),
        ("scatter_order", "fits"),
    ]
    assert "model/words.weight" in found.findings[1].text


def test_noise_everywhere_is_no_scatter(tmp_path: Path) -> None:
    given = _embedding_order(tmp_path, 8, 512)
    first, second = RunDirectory(tmp_path / "first"), RunDirectory(tmp_path / "second")
    record(given, first)
    with kernel("mm", _reversed_mm):
        record(given, second)

    found = explain_runs(first, second, given.source)

    assert found.cause is not None
    assert (found.cause.cause, found.cause.status) == ("last_bit_noise", "confirmed")
    assert found.state is not None
    assert {t.name for t in found.state.tensors} - {
        "model/words.weight",
        "optimizer/words.weight/momentum_buffer",
    }
    assert "scatter_order" not in named(found)


TINY = """
import torch
from torch.nn.functional import cross_entropy
from tallystick.execution.job import Job


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tiny = torch.nn.Parameter(torch.linspace(1.0, 2.0, 16) * 2.0**-128)
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.head(x) + (self.tiny * 2.0**-20).sum()


def build(settings):
    generator = torch.Generator().manual_seed(0)
    model = Small()
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.copy_(torch.randint(-64, 64, parameter.shape, generator=generator) / 128)

    def batch(step):
        drawn = torch.Generator().manual_seed(step)
        x = torch.randint(-64, 64, (16, 8), generator=drawn) / 64
        return x, torch.randint(0, 4, (16,), generator=drawn)

    return Job(
        model=model,
        optimizer=torch.optim.SGD(
            [{"params": [model.head.weight, model.head.bias]}, {"params": [model.tiny], "lr": 2.0**-10}],
            lr=0.125, weight_decay=0.25,
        ),
        batch=batch,
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        steps=8,
    )
"""


def _tiny_order(tmp_path: Path) -> Order:
    job = tmp_path / "tiny.py"
    job.write_text(TINY)
    return Order(find_source(str(job)), {}, find_policy("fp32"), steps=8, checkpoint_every=4)


def test_flushed_subnormals_are_confirmed(tmp_path: Path, run: RunDirectory) -> None:
    given = _tiny_order(tmp_path)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    torch.set_flush_denormal(False)

    def tamper(job: Job) -> None:
        count = 0

        def before(*_: Any) -> None:
            torch.set_flush_denormal(count == AT)

        def after(*_: Any) -> None:
            nonlocal count
            torch.set_flush_denormal(False)
            count += 1

        job.optimizer.register_step_pre_hook(before)
        job.optimizer.register_step_post_hook(after)

    try:
        record(tampered(given, tamper), run)
    finally:
        torch.set_flush_denormal(False)

    found = explained(run, source=given.source)

    assert found.cause is not None
    assert (found.step, found.cause.cause, found.cause.status) == (AT, "denormals", "confirmed")
    assert found.state is not None
    assert [t.name for t in found.state.tensors] == ["model/tiny"]
    assert found.state.tensors[0].flushed == found.state.tensors[0].differing == 16


def test_normal_numbers_set_to_zero_are_no_flushing(run: RunDirectory) -> None:
    record(order(), run)
    edit_last_state(run, lambda values: values[:5].fill(0.0), fingerprint_too=True)

    found = explained(run, seconds=BRIEF)

    assert "denormals" not in named(found)
    assert "edited_weights" in named(found)
