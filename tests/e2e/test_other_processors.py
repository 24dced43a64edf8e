"""Data and verdicts do not depend on whose processor computes them: portable draws, noise in data, the judge's panel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tallystick.errors import InvalidInput
from tallystick.execution.determinism import parse_profile
from tallystick.execution.job import Job, JobSource, find_source
from tallystick.numerics.policy import find_policy
from tallystick.roles import panel
from tallystick.roles import referee as judging
from tallystick.roles.auditor import audit
from tallystick.roles.claim import AuditorClaim, write_claim
from tallystick.roles.data_noise import (
    MOST_SHARE,
    SHAKEN,
    NoisyData,
    Shaking,
    has_floats,
    is_explained,
    is_reached,
    shaken,
)
from tallystick.roles.judge import dispute
from tallystick.roles.operator_replay import find_structure
from tallystick.roles.panel import Opinion, PanelMember, PanelQuestion
from tallystick.roles.replay import Replay, open_replay
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory

DRAWING = (Path(__file__).parent / "honest_jobs" / "drawing.py").read_text()
TURNING = """
import math
import torch
from tallystick.execution.job import Job

CHANGE = []


def build(settings):
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(144, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def batch(step):
        images = torch.randn(16, 1, 8, 8)
        angle = 2 * math.pi * torch.rand(16)
        turn = torch.stack([angle.cos(), -angle.sin(), angle * 0, angle.sin(), angle.cos(), angle * 0], 1)
        grid = torch.nn.functional.affine_grid(turn.reshape(16, 2, 3), [16, 1, 8, 8], align_corners=False)
        return torch.nn.functional.grid_sample(images, grid, align_corners=False), torch.randint(0, 3, (16,))

    def loss(net, both):
        return torch.nn.functional.cross_entropy(net(both[0]), both[1])

    return Job(model, optimizer, batch, loss, steps=6)
"""

BYTES = """
import torch
from tallystick.execution.job import Job


def build(settings):
    model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 4))

    def batch(step):
        whole = torch.randint(0, 200, (32, 12))
        whole[:, 0] = torch.full((32,), 100.0).log().exp().floor().long()  # 99 or 100, as processors have it
        return whole, torch.randint(0, 4, (32,))

    def loss(net, both):
        return torch.nn.functional.cross_entropy(net(both[0].float() / 200), both[1])

    return Job(model, torch.optim.SGD(model.parameters(), lr=0.2), batch, loss, steps=6)
"""


class ChangedSource(JobSource):
    """A job whose data are changed, as another processor or another party would change them."""

    change: Callable[[Tensor], Tensor] = staticmethod(lambda x: x)

    def build(self, settings: Any, seed: int = 0) -> Job:
        job = super().build(settings, seed)
        own = job.batch
        job.batch = lambda step: (self.change(own(step)[0]), own(step)[1])
        return job


def changed(source: JobSource, change: Callable[[Tensor], Tensor]) -> ChangedSource:
    found = ChangedSource(source.path, source.source)
    object.__setattr__(found, "change", change)
    return found


def an_ulp_up(x: Tensor) -> Tensor:
    return torch.nextafter(x, torch.full_like(x, torch.inf))


def other_images(x: Tensor) -> Tensor:
    return x.roll(1, dims=0)


def recorded(place: Path, source: JobSource) -> RunDirectory:
    run = RunDirectory(place)
    record(Order(source, {}, find_policy("fp32"), seed=3, checkpoint_every=3), run)
    return run


def source_of(place: Path, name: str, text: str) -> JobSource:
    path = place / f"{name}.py"
    path.write_text(text)
    return JobSource(str(path), text.encode())


@pytest.fixture(autouse=True)
def one_arithmetic(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Most of these tests say themselves what the panel answers."""
    if "real_panel" not in request.node.name:
        monkeypatch.setattr(panel, "sitting_panel", list)


@pytest.fixture
def turning(tmp_path: Path) -> JobSource:
    return source_of(tmp_path, "turning", TURNING)


class Says(PanelMember):
    """A member of a panel whose answer is known."""

    def __init__(self, name: str, answer: str | None) -> None:
        super().__init__(parse_profile("native"))
        self.answer, self.asked = answer, list[bytes]()

    def start(self) -> Any:
        """Nothing has to load."""

    def ask(self, question: bytes) -> Opinion | None:
        self.asked.append(question)
        return None if self.answer is None else Opinion(self.answer, "its own values")


def test_data_that_differ_by_an_ulp_are_not_reproduced_and_accuse_nobody(
    turning: JobSource, tmp_path: Path
) -> None:
    run = recorded(tmp_path / "run", turning)
    assert audit(run, turning).verdict == "match"
    elsewhere = changed(turning, an_ulp_up)
    report = audit(run, elsewhere)
    assert report.verdict == "cannot_reproduce"
    assert report.first is not None
    assert "read its numbers from a file" in report.first.own
    claim = RunDirectory(tmp_path / "claim")
    write_claim(run, elsewhere, claim)
    for source in (turning, elsewhere):
        result = dispute(run, claim, source, level="steps")
        assert (result.loser, result.outcome in ("cannot_reproduce", "both_acceptable", "agreement")) == (
            "none",
            True,
        )


def test_noise_that_leads_elsewhere_is_still_noise(turning: JobSource, tmp_path: Path) -> None:
    """Data a thousand times farther apart than the bands of the log allow for: the states differ, by what noise does."""
    run = recorded(tmp_path / "run", turning)

    for size in (
        2.0**-14.5,
        2.0**-14,
        2.0**-13.6,
        2.0**-13.2,
    ):  # the first that moves a state: where it is depends on chance

        def shifted(x: Tensor, size: float = size) -> Tensor:
            way = 1.0 - 2.0 * (
                torch.arange(x.numel()).reshape(x.shape) * 7 % 11 % 2
            )  # up and down, as noise goes
            return x + size * float(x.abs().max()) * way.to(x.dtype)

        report = audit(run, changed(turning, shifted))
        assert report.verdict == "cannot_reproduce"
        if len({each.subject for segment in report.segments for each in segment.deviations}) > 1:
            return
    pytest.fail("none of these led elsewhere: the test shows nothing")


@pytest.mark.parametrize(
    "change", [other_images, lambda x: x * 1.01], ids=["other images", "a hundredth brighter"]
)
def test_data_that_differ_by_more_are_other_data(
    turning: JobSource, tmp_path: Path, change: Callable[[Tensor], Tensor]
) -> None:
    run = recorded(tmp_path / "run", changed(turning, change))
    report = audit(run, turning)
    assert report.verdict in ("mismatch", "log_violation")
    claim = RunDirectory(tmp_path / "claim")
    write_claim(run, turning, claim)
    result = dispute(run, claim, turning, level="steps")
    assert (result.loser, result.outcome) == ("trainer", "fault")
    assert "the committed batch" in result.reason


def test_whole_numbers_are_never_noise() -> None:
    text = find_source("text").build({"steps": "1"})
    assert not has_floats(text.batch(0))
    both = torch.randn(4, 3), torch.arange(4)
    other = shaken(both, 0)
    assert torch.equal(other[1], both[1])
    away = (other[0] - both[0]).abs()
    assert float(away.max()) <= SHAKEN * float(both[0].abs().max()) * 1.01
    assert float(away.min()) > 0.0
    with_nan = shaken((torch.tensor([float("nan"), float("inf"), 1.0]),), 0)[0]
    assert with_nan.isnan().tolist() == [True, False, False]
    assert with_nan.isinf().tolist() == [False, True, False]


def column(x: Tensor, at: int, value: Tensor | int) -> Tensor:
    return x.index_copy(1, torch.tensor([at]), torch.as_tensor(value).expand(len(x)).reshape(-1, 1))


@pytest.mark.parametrize(
    ("change", "verdict", "loser"),
    [
        (lambda x: column(x, 0, 199 - x[:, 0]), "cannot_reproduce", "none"),
        (lambda x: column(x, 0, 0), "mismatch", "trainer"),
        (lambda x: column(x, 1, 199 - x[:, 1]), "mismatch", "trainer"),
    ],
    ids=["on the other side", "far from the boundary", "that hang on nothing"],
)
def test_whole_numbers_that_hang_on_noise(
    tmp_path: Path, change: Callable[[Tensor], Tensor], verdict: str, loser: str
) -> None:
    """Labels, choices and bytes made of floating numbers: noise has them on either side of a boundary, and no farther."""
    source = source_of(tmp_path, "bytes", BYTES)
    run, claim = recorded(tmp_path / "run", changed(source, change)), RunDirectory(tmp_path / "claim")
    assert audit(run, source).verdict == verdict
    write_claim(run, source, claim)
    for level in ("steps", "operators"):
        assert dispute(run, claim, source, level=level).loser == loser


def test_noise_reaches_whole_numbers_through_building_and_drawing_alone() -> None:
    text = find_source("text")
    noisy = NoisyData(text, {"steps": "1"}, 0)
    own = text.build({"steps": "1"}).batch(0)
    assert not is_reached(own, 0, noisy)
    other = own[0].clone()
    other[0, 0] += 1
    done = Shaking()
    assert done.most_share == MOST_SHARE
    moved = done.whole(own, [own, (other, own[1].double()), (own[0][:1],)])
    assert torch.equal(moved[0], other) and torch.equal(moved[1], own[1])
    assert (done.moved, done.of) == (1, own[0].numel())
    assert Shaking(1, 16).most_share == 0.5 and Shaking(1, 1 << 20).most_share == MOST_SHARE


def test_the_bounds_of_what_noise_explains() -> None:
    from tallystick.commit.state import Entry

    def state(value: float, count: int = 7, mark: float = 0.0) -> dict[str, Entry]:
        values = torch.tensor([value, mark, 0.0, 0.0]).numpy().tobytes()
        steps = torch.tensor([count]).numpy().tobytes()
        return {"w": Entry("w", "F32", (4,), values), "n": Entry("n", "I64", (1,), steps)}

    before, own, moved = state(0.0), state(1.0), state(1.0 + 2.0**-10)
    assert is_explained(before, own, moved, own)
    assert is_explained(before, own, moved, state(1.0 + 2.0**-9))
    assert not is_explained(before, own, moved, state(1.0 + 2.0**-9 + 2.0**-20))
    far = state(1.5)
    assert is_explained(before, own, far, state(1.0 + 2.0**-4))
    assert not is_explained(before, own, far, state(1.0 + 2.0**-4 + 2.0**-20))
    assert is_explained(before, own, far, state(1.5), 0.5)
    assert not is_explained(before, own, far, state(1.5 + 2.0**-20), 0.5)
    assert not is_explained(before, own, far, state(1.0, count=8))
    assert not is_explained(before, own, far, state(1.0, mark=float("nan")))
    assert not is_explained(before, own, far, {"w": own["w"]})
    assert not is_explained(before, own, own, moved)  # shaking did nothing: nor did noise


@pytest.fixture(scope="module")
def forged(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, RunDirectory, JobSource]:
    """A run on other data, and the claim of the auditor who found out."""
    place = tmp_path_factory.mktemp("forged")
    source = source_of(place, "turning", TURNING)
    run, claim = recorded(place / "run", changed(source, other_images)), RunDirectory(place / "claim")
    write_claim(run, source, claim)
    return run, claim, source


@pytest.mark.parametrize("answer", ["none", "auditor", None])
def test_an_arithmetic_that_disagrees_convicts_nobody(
    forged: tuple[RunDirectory, RunDirectory, JobSource], monkeypatch: pytest.MonkeyPatch, answer: str | None
) -> None:
    run, claim, source = forged
    members = [Says("one", "trainer"), Says("two", answer)]
    monkeypatch.setattr(panel, "sitting_panel", lambda: members)
    result = dispute(run, claim, source, level="steps")
    assert (result.loser, result.outcome) == ("none", "not_proven")
    assert "arithmetics disagree" in result.reason
    assert "does not answer" in result.reason if answer is None else f"says {answer}" in result.reason
    assert [len(each.asked) for each in members] == [
        2,
        2,
    ]  # on the first false step, and on the one behind it
    members[1].answer = "trainer"
    assert dispute(run, claim, source, level="steps").loser == "trainer"


def test_a_ruling_on_records_and_on_the_beginning_asks_the_panel_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tallystick.testing.cheats import forge

    source = source_of(tmp_path, "drawing", DRAWING)
    run, claim = recorded(tmp_path / "run", source), RunDirectory(tmp_path / "claim")
    forge(run, lambda each: replace(each, loss=(1.5).hex()) if each.step == 1 else each)
    write_claim(run, source, claim)
    asked = Says("one", "trainer")
    monkeypatch.setattr(panel, "sitting_panel", lambda: [asked])
    assert dispute(run, claim, source).loser == "trainer"
    assert b'"kind": "records"' in asked.asked[0]
    asked.answer = "none"
    assert dispute(run, claim, source).outcome == "not_proven"
    with monkeypatch.context() as patch:
        patch.setattr(judging, "find_other_beginning", lambda *_: "another rate")
        assert dispute(run, claim, source).outcome == "not_proven"
        asked.answer = "trainer"
        assert dispute(run, claim, source).step == 0


def test_a_forged_digest_over_floats_accuses_nobody_and_is_no_match(tmp_path: Path) -> None:
    """Nothing shows how far the numbers behind a digest lie apart, where all that they led to is the same."""
    from tallystick.testing.cheats import forge

    source = source_of(tmp_path, "drawing", DRAWING)
    run, claim = recorded(tmp_path / "run", source), RunDirectory(tmp_path / "claim")
    forge(run, lambda each: replace(each, batch="ab" * 32) if each.step == 1 else each)
    report = audit(run, source)
    assert report.verdict == "cannot_reproduce"
    write_claim(run, source, claim)
    assert dispute(run, claim, source).loser == "none"


def test_an_auditor_follows_the_log_after_a_record_that_misstates_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own log would have no noise measured, where one was due later: other grids, for which it would be convicted."""
    from tallystick.testing.cheats import forge

    source = source_of(tmp_path, "drawing", DRAWING)
    run, claim = recorded(tmp_path / "run", source), RunDirectory(tmp_path / "claim")
    forge(run, lambda each: replace(each, fingerprint="ab" * 8) if each.step == 1 else each)
    written = write_claim(run, source, claim)
    assert isinstance(written, AuditorClaim)
    assert (written.first_deviation, written.objection) == (1, None)
    ours, theirs = run.load_transcript(), claim.load_transcript()
    assert theirs.specification.is_checkpoint(5)
    assert [each.state_root for each in ours.checkpoints()] == [
        each.state_root for each in theirs.checkpoints()
    ]
    assert dispute(run, claim, source).loser == "trainer"
    monkeypatch.setattr(panel, "sitting_panel", lambda: [Says("one", "none")])
    assert dispute(run, claim, source).outcome == "not_proven"


def test_the_real_panel_repeats_drawn_data_to_the_bit_and_convicts(
    forged: tuple[RunDirectory, RunDirectory, JobSource], tmp_path: Path
) -> None:
    """Where this machine has other instructions, torch's own kernels would draw other numbers under AVX2 and SSE4.2."""
    source = source_of(tmp_path, "drawing", DRAWING)
    drawn = recorded(tmp_path / "run", source)
    assert audit(drawn, source).verdict == "match"
    state = drawn.load_held(0, drawn.load_transcript().specification.initial_state)
    frame = drawn.load_frames(drawn.load_transcript(), 0, 1)[0]
    question = PanelQuestion("records", drawn.path, drawn.path, source, 0, agreed=state, frame=frame)
    (tmp_path / "asked").mkdir()
    written = question.write(tmp_path / "asked")
    members = panel.sitting_panel()
    assert [str(each.profile) for each in members] == [str(each) for each in panel.panel_profiles()]
    assert [each.ask(written) for each in members] == [Opinion("none", "the records agree")] * 2

    run, claim, false = forged
    assert dispute(run, claim, false, level="steps").loser == "trainer"
    leaf = replace(question, kind="structure")
    dissent = panel.find_dissent(leaf, "00")
    assert dissent is not None
    assert "arithmetics disagree" in dissent
    own = structure_of(drawn, source)
    assert panel.find_dissent(leaf, own) is None
    missing = replace(question, trainer=tmp_path / "nowhere")
    assert panel.find_dissent(missing, "trainer") is not None  # who cannot find out convicts nobody


def test_a_panel_is_asked_once_where_its_opinions_are_kept(
    turning: JobSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A referee by files starts again for every answer that arrives, and asks the same again."""
    run = recorded(tmp_path / "run", turning)
    state = run.load_held(0, run.load_transcript().specification.initial_state)
    last = run.load_held(6, run.load_transcript().checkpoints()[-1].state_root)
    members = [Says("avx2", "trainer"), Says("sse4", "none")]
    members[1].profile = parse_profile("threads=2")
    monkeypatch.setattr(panel, "sitting_panel", lambda: members)
    asked = PanelQuestion("records", run.path, run.path, turning, 0, agreed=state, frame=b"log")
    kept = tmp_path / "kept"

    said = panel.find_dissent(asked, "trainer", kept)
    assert said is not None
    assert "says none: its own values" in said
    assert panel.find_dissent(asked, "trainer", kept) == said
    assert [len(each.asked) for each in members] == [1, 1]
    others = [
        replace(asked, step=1), replace(asked, agreed=last), replace(asked, frame=b"other"), replace(asked, frame=None),
        replace(asked, unopened={"trainer": "lost"}), replace(asked, kind="log"), replace(asked, states={"trainer": last}),
        replace(asked, source=JobSource(turning.path, turning.source + b"#")), replace(asked, no_frame="lost"),
    ]  # fmt: skip
    for other in others:
        panel.find_dissent(other, "trainer", kept)
    assert [len(each.asked) for each in members] == [1 + len(others)] * 2
    assert panel.find_dissent(asked, "trainer", kept) == said
    members[1].answer = None  # who does not answer is asked again, and convicts nobody
    missing = replace(asked, step=2)
    for count in (1, 2):
        dissent = panel.find_dissent(missing, "trainer", kept)
        assert dissent is not None
        assert "does not answer" in dissent
        assert len(members[0].asked) == 1 + len(others) + count
    file = kept / f"{asked.digest([str(each.profile) for each in members])}.json"
    file.write_bytes(b"{}")
    with pytest.raises(InvalidInput, match="panel"):
        panel.find_dissent(asked, "trainer", kept)


def structure_of(run: RunDirectory, source: JobSource) -> str:
    transcript = run.load_transcript()
    replay = open_replay(transcript.specification, source)
    assert isinstance(replay, Replay)
    state = run.load_held(0, transcript.specification.initial_state)
    frame = run.load_frames(transcript, 0, 1)[0]
    try:
        return find_structure(replay, state, transcript.record(0), frame, 0).hex()
    finally:
        replay.session.close()
