"""Batches, jobs and profiles: digests that miss nothing, cuts that lose nothing, sources that say what they are."""

from __future__ import annotations

import collections
import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tallystick.errors import InvalidInput, JobFailed, Nondeterminism
from tallystick.execution.determinism import (
    INSTRUCTION_SETS,
    Profile,
    environment_versions,
    parse_profile,
    repeatable,
)
from tallystick.execution.job import find_source
from tallystick.execution.step import batch_digest, session_batch, split_batch, verify_batches_are_pure
from tallystick.numerics.policy import FP32, FP64

X = torch.arange(12.0).reshape(4, 3)
Pair = collections.namedtuple("Pair", "left right")

DIFFERENT: list[Any] = [
    X,
    X.reshape(3, 4),
    X.double(),
    X + 1,
    X.to(torch.int64),
    -X * 0,
    X * 0,
    (X,),
    [X, X],
    (X, X + 1),
    (X + 1, X),
    {"x": X},
    {"y": X},
    {"x": X, "y": X},
    {"x": {"y": X}},
    (X, None),
    (X, 1),
    (X, True),
    (X, 1.0),
    (X, "1"),
    torch.zeros(0, 3),
    torch.zeros(3, 0),
    torch.tensor(True),
    torch.tensor(1, dtype=torch.uint8),
    X.bfloat16(),
    X.half(),
]


def test_no_two_different_batches_have_one_digest() -> None:
    digests = [batch_digest(batch) for batch in DIFFERENT]
    assert len(set(digests)) == len(DIFFERENT)
    assert all(len(d) == 64 for d in digests)


def test_the_layout_and_the_kind_of_sequence_do_not_matter() -> None:
    assert batch_digest(X.t().contiguous().t()) == batch_digest(X)
    assert batch_digest([X, 1]) == batch_digest((X, 1)) == batch_digest(Pair(X, 1))
    assert batch_digest({"a": X, "b": 1}) == batch_digest({"b": 1, "a": X})


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ({1: X}, "keys must be strings, got 1"),
        ((X, object()), r"batch\[1\]: a object has no digest"),
        ({"deep": [X.to_sparse()]}, r"batch\.deep\[0\]: sparse, nested and complex tensors have no digest"),
        ({"big": 2**70}, r"batch\.big: the whole number 1180591620717411303424 has more than 63 bits"),
        (X.to(torch.complex64), "batch: sparse, nested and complex"),
    ],
)
def test_a_batch_that_cannot_be_named_is_refused(batch: Any, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        batch_digest(batch)


def test_micro_batches_are_equal_cuts_that_lose_nothing() -> None:
    batch = Pair({"x": X, "names": "kept"}, [torch.arange(4), 7])
    parts = split_batch(batch, 2)
    assert [type(part) for part in parts] == [Pair, Pair]
    assert torch.equal(torch.cat([part.left["x"] for part in parts]), X)
    assert [part.right[0].tolist() for part in parts] == [[0, 1], [2, 3]]
    assert [(part.left["names"], part.right[1]) for part in parts] == [("kept", 7)] * 2
    assert split_batch(batch, 1)[0] is batch
    with pytest.raises(InvalidInput, match=r"shape \[4, 3\] cannot be cut into 3 micro-batches"):
        split_batch(X, 3)
    with pytest.raises(InvalidInput, match=r"shape \[\] cannot be cut"):
        split_batch((X, torch.tensor(1.0)), 2)


def test_floating_tensors_of_a_batch_come_in_the_policys_dtype(zoo: Any, open_job: Any) -> None:
    for policy, dtype in ((FP64, torch.float64), (FP32, torch.float32)):
        session = open_job(zoo.build({}), policy)
        placed = session_batch(session, (X.double(), torch.arange(3), "text"))
        assert placed[0].dtype == dtype
        assert placed[1].dtype == torch.int64
        assert placed[2] == "text"


def test_a_batch_that_depends_on_the_past_is_refused(zoo: Any) -> None:
    job = zoo.build({})
    verify_batches_are_pure(job)
    job.batch = lambda step: torch.rand(4)
    with pytest.raises(Nondeterminism, match=r"batch\(0\) gave digest \w+\.\. and later"):
        verify_batches_are_pure(job)
    calls: list[int] = []

    def counting(step: int) -> torch.Tensor:
        calls.append(step)
        return torch.tensor([step, len(calls) > 3])

    job.batch = counting
    with pytest.raises(Nondeterminism, match=r"batch\(\d+\) gave digest"):
        verify_batches_are_pure(job)


# -- jobs --------------------------------------------------------------------------------------


def test_a_source_is_a_file_a_module_or_a_shipped_name(tmp_path: Path) -> None:
    shipped = find_source("digits")
    assert shipped.path == "tallystick.jobs.digits"
    assert shipped.digest == hashlib.sha256(shipped.source).hexdigest()
    assert find_source("tallystick.jobs.digits") == shipped
    file = tmp_path / "mine.py"
    file.write_text("def build(settings): return settings")
    assert find_source(str(file)).source == file.read_bytes()
    for path in ("no_such_module", "tallystick.jobs.nothing", "..digits", str(tmp_path / "absent.py"), ""):
        with pytest.raises(InvalidInput, match=r"no such file|neither a shipped job"):
            find_source(path)


def test_a_job_is_built_from_the_bytes_that_its_digest_names(tmp_path: Path) -> None:
    """Not from the file as it is by then."""
    body = "import torch\nfrom tallystick.execution.job import Job\ndef build(s):\n    m = torch.nn.Linear(2, {n})\n"
    body += "    return Job(m, torch.optim.SGD(m.parameters(), lr=0.1), lambda t: torch.ones(2, 2), lambda m, b: m(b).sum(), 3)\n"
    file = tmp_path / "job.py"
    file.write_text(body.replace("{n}", "3"))
    source = find_source(str(file))
    file.write_text(body.replace("{n}", "4"))
    assert source.build({}).model.out_features == 3
    assert find_source(str(file)).build({}).model.out_features == 4


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = 1", r"needs a function build\(settings\) -> Job, found none"),
        ("build = 3", r"needs a function build\(settings\) -> Job, found none"),
        ("def build(settings): return 3", "build returned int, a Job is needed"),
    ],
)
def test_a_source_without_a_job_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(text)
    with pytest.raises(InvalidInput, match=reason):
        find_source(str(file)).build({})


def test_a_source_without_build_is_not_executed(tmp_path: Path) -> None:
    """It is a training script, given without ``python``: it would train to its end first."""
    file = tmp_path / "train.py"
    file.write_text("raise AssertionError")
    with pytest.raises(InvalidInput, match=r"found none; a training script is given as -- python FILE"):
        find_source(str(file)).build({})


def test_a_source_that_fails_is_not_remembered(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text("1 // 0  # before build")
    for _ in range(2):
        with pytest.raises(JobFailed, match=r"its file raised ZeroDivisionError: .* \(line 1 of job.py\)"):
            find_source(str(file)).build({})


# -- profiles ----------------------------------------------------------------------------------


def test_profiles_are_read_and_written_alike() -> None:
    for text in ("native", "native,threads=3", "native,jitter", "native,threads=1,jitter"):
        assert str(parse_profile(text)) == text
    assert parse_profile("jitter") == Profile(jitter=True)
    assert parse_profile("threads=2").environment() == {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    for text in ("", "fast", "threads=0", "threads=two", "threads=1025", "threads=+1", "native;jitter"):
        with pytest.raises(InvalidInput, match="profile"):
            parse_profile(text)


@pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="these are x86-64 instruction sets"
)
def test_an_instruction_set_sets_every_library(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = parse_profile("sse4,threads=1")
    assert profile.environment() == {
        **INSTRUCTION_SETS["sse4"],
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    for name in profile.environment():
        monkeypatch.delenv(name, raising=False)
    assert profile.needs_process
    for name, value in profile.environment().items():
        monkeypatch.setenv(name, value)
    assert not profile.needs_process


def test_the_environment_is_stated() -> None:
    versions = environment_versions()
    assert {
        "torch",
        "python",
        "numpy",
        "machine",
        "cpu_capability",
        "threads",
        "tallystick",
    } <= versions.keys()
    assert all(isinstance(value, str) for value in versions.values())
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") is None or isinstance(
        os.environ["CUBLAS_WORKSPACE_CONFIG"], str
    )


def test_repeatable_makes_torch_refuse_what_it_cannot_repeat() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with (
        pytest.raises(RuntimeError, match="does not have a deterministic implementation"),
        repeatable("float32"),
    ):
        nn.functional.max_unpool2d(torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1, dtype=torch.int64), 2)
    assert torch.are_deterministic_algorithms_enabled() is before
