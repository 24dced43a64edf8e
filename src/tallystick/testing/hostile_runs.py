"""Run directories of another party as one sequence of bytes each, and everything that commands read of one; for fuzzing.

The bytes are a flag byte and the files in the order of ``FILES``, with ``BETWEEN`` between them; an empty file is absent. A
fuzzer finds no preimages, an attacker signs what it likes: the flags say which digests and roots are made to fit the files
beneath them, as an attacker would (``FITTED``).
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tallystick.cli.terminal import console, json_bytes
from tallystick.commit.state import Entry, hold, open_chunk, summarise
from tallystick.diagnosis.causes import explain_states
from tallystick.dispute.verdict import LogObjection, Verdict
from tallystick.errors import InvalidInput, Mismatch
from tallystick.evidence.bundle import make_bundle, parse_bundle
from tallystick.evidence.bundle_verifier import verify_bundle
from tallystick.evidence.recognition import recognise
from tallystick.evidence.run_verifier import verify_run
from tallystick.evidence.verification import Verification
from tallystick.numerics.policy import POLICIES, policy_of
from tallystick.reports.document import find_sources, read_document
from tallystick.reports.layout import Report
from tallystick.reports.run import read_run
from tallystick.reports.verification import verification_page
from tallystick.roles.statements import gather, identity_of_claimed, sign_run
from tallystick.run.documents import parse_specification, parse_step_records
from tallystick.run.transcript import Transcript, check_fingerprint, state_fingerprint
from tallystick.signing.keys import ed25519_key
from tallystick.store.files import RunDirectory, frame_digest
from tallystick.store.tensor_files import weights_pieces

if TYPE_CHECKING:
    from tallystick.execution.job import JobSource
    from tallystick.roles.replay import Replay

FILES = (
    "specification.json", "steps.jsonl", "run.json", "logs/000000.tlog", "logs/000001.tlog",
    "checkpoints/000000.safetensors", "checkpoints/000001.safetensors", "checkpoints/000002.safetensors",
    "program/tiny.py", "objection.json", "verdict.json", "provenance.intoto.json", "audit.json",
)  # fmt: skip
BETWEEN = b"\n\0--\0\n"
FITTED = {"logs": 1, "roots": 2, "fingerprints": 4, "statement": 8}
ALL_FITTED = sum(FITTED.values())
JOB = b"""import torch
from tallystick.execution.job import Job
from torch.nn.functional import mse_loss


def build(settings):
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).reshape(2, 3) / 8)
        model.bias.zero_()
    return Job(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5),
        batch=lambda step: ((torch.arange(12.0).reshape(4, 3) + step) / 16, torch.ones(4, 2)),
        loss=lambda model, batch: mse_loss(model(batch[0]), batch[1]),
        steps=2,
    )
"""


def pack(path: Path, flags: int = 0) -> bytes:
    """Return the run directory ``path`` as bytes."""
    contents = (file.read_bytes() if (file := path / name).is_file() else b"" for name in FILES)
    return bytes([flags]) + BETWEEN.join(contents)


def unpack(data: bytes, path: Path) -> None:
    """Write the run directory that ``data`` is, in place of whatever is at ``path``; what its flags say is made to fit.

    Raises:
        InvalidInput: it is of one file only, and of those nothing new can be learned.
    """
    if BETWEEN not in data:
        raise InvalidInput("run: one file is no directory")
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    for name, content in zip(FILES, data[1:].split(BETWEEN, len(FILES) - 1), strict=False):
        if content:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
    try:
        _fit(RunDirectory(path), data[0] if data else 0)
    except (InvalidInput, Mismatch, OSError):  # as an attacker, whose documents need not even parse
        return


def _fit(run: RunDirectory, flags: int) -> None:
    specification = parse_specification(run.specification_path.read_bytes())
    records = list(parse_step_records(run.records_path.read_bytes()))
    if flags & FITTED["logs"]:
        for at, record in enumerate(records):
            if (log := run.log_path(at)).is_file():
                frame = log.read_bytes()
                records[at] = replace(record, log=frame_digest(frame), log_bytes=len(frame))
    for done in range(len(records) + 1):
        if not run.checkpoint_path(done).is_file() or not flags & (FITTED["roots"] | FITTED["fingerprints"]):
            continue
        state = run.load_checkpoint(done)
        root, fingerprint = summarise(state.values()).root().hex(), f"{state_fingerprint(state):016x}"
        if not done:
            specification = replace(specification, initial_state=root)
            continue
        record = records[done - 1]
        if flags & FITTED["roots"] and record.state_root is not None:
            record = replace(record, state_root=root)
        if flags & FITTED["fingerprints"]:
            record = replace(record, fingerprint=fingerprint)
        records[done - 1] = record
    transcript = Transcript(specification, tuple(records))
    run.specification_path.write_bytes(specification.encode())
    run.records_path.write_bytes(transcript.encode_records())
    if flags & FITTED["statement"]:
        run.statement_path.write_bytes(transcript.statement().encode())


@functools.cache
def tiny_run(policy: str = "fp32") -> bytes:
    """Return a finished honest run of two steps, recorded here, about 8 KiB."""
    from tallystick.execution.job import find_source
    from tallystick.roles.trainer import Order, record

    with tempfile.TemporaryDirectory(prefix="tallystick-tiny-") as folder:
        job, path = Path(folder) / "tiny.py", Path(folder) / "run"
        job.write_bytes(JOB)
        record(Order(find_source(str(job)), {}, POLICIES[policy], checkpoint_every=1), RunDirectory(path))
        return pack(path)


def seeds() -> Iterator[bytes]:
    """Yield the tiny run as it is and fitted, and under another policy with everything that may lie beside it."""
    from tallystick.execution.job import find_source
    from tallystick.reports.audit import AuditPage
    from tallystick.roles.auditor import audit

    yield tiny_run()
    yield _flagged(tiny_run())
    with tempfile.TemporaryDirectory(prefix="tallystick-tiny-") as folder:
        path = Path(folder)
        unpack(tiny_run("bf16"), path / "run")
        run = RunDirectory(path / "run")
        report = audit(run, find_source(str(run.program_path / "tiny.py")))
        root = run.load_transcript().root().hex()
        for name, data in (
            ("audit.json", json_bytes(AuditPage(report, 0.5).fields())),
            ("provenance.intoto.json", sign_run(run, ed25519_key(bytes(32)), 0)),
            ("objection.json", LogObjection(root, 1, "gradient of weight", -1, "too many entries").encode()),
            ("verdict.json", Verdict("none", "agreement", "same", None, 0, {}, ()).encode()),
        ):
            (run.path / name).write_bytes(data)
        yield pack(run.path)
        yield _flagged(pack(run.path))


def _flagged(run: bytes) -> bytes:
    return bytes([ALL_FITTED]) + run[1:]


# -- what reads it ---------------------------------------------------------------------------------


@functools.cache
def _place() -> tempfile.TemporaryDirectory[str]:
    """One folder a process, gone when it ends."""
    return tempfile.TemporaryDirectory(prefix="tallystick-hostile-")


def _refused(*readers: Callable[[], object]) -> None:
    """Call every reader: each may refuse, none may do anything else."""
    for read in readers:
        try:
            read()
        except (InvalidInput, Mismatch):
            continue


def read_without_torch(data: bytes) -> Verification:
    """Read a run directory as verify, show, report, prove, export, sign and bundle do.

    Raises:
        InvalidInput: the run does not verify, whatever else could be read.
    """
    path = Path(_place().name) / "run"
    unpack(data, path)
    run = RunDirectory(path)
    found: list[Verification] = []
    _refused(
        lambda: recognise(path),
        lambda: found.append(verify_run(run)),
        lambda: _shown(verification_page(found[0])),
        lambda: _shown(read_run(run)),
        lambda: read_document(run, read_run(run), find_sources(run)).html().encode("utf-8"),
        lambda: sign_run(run, ed25519_key(bytes(32)), 0),
        lambda: identity_of_claimed(run),
        lambda: _bundled(path),
        lambda: _proven(run),
        run.load_objection,
        run.load_program,
    )
    if not found or found[0].verdict != "match":
        raise InvalidInput("run: does not verify")
    return found[0]


def _shown(page: Report) -> None:
    json_bytes(page.fields())
    with tempfile.TemporaryFile("w+", encoding="utf-8") as terminal:
        console(terminal).print(page)


def _bundled(path: Path) -> None:
    made = make_bundle(gather(path)).encode()
    parse_bundle(made)
    verify_bundle(made, None, now=0, model=None, file=None, name="bundle")


def _proven(run: RunDirectory) -> None:
    transcript, state = run.load_transcript(), dict[str, Entry]()
    transcript.prove_step(transcript.num_steps - 1).encode()
    for checkpoint in transcript.checkpoints():
        state = run.load_committed(checkpoint.steps_done, checkpoint.state_root)
        summary = summarise(state.values())
        for name in state:
            run.load_entry(checkpoint.steps_done, name)
            _refused(functools.partial(open_chunk, state.values(), name, 0, summary=summary))
    b"".join(weights_pieces(state.values()))


@functools.cache
def _auditor() -> tuple[RunDirectory, JobSource, Replay]:
    """An honest run, its job's source and a session of it, as an auditor has them."""
    from tallystick.execution.job import find_source
    from tallystick.roles.replay import Replay, open_replay

    path = Path(_place().name) / "own"
    unpack(tiny_run(), path)
    run, source = RunDirectory(path), find_source(str(path / "program" / "tiny.py"))
    replay = open_replay(run.load_specification(), source)
    assert isinstance(replay, Replay)
    return run, source, replay


def read_with_torch(data: bytes) -> Transcript:
    """Read a run directory as diff, audit and dispute do, up to where they would repeat the first step.

    Raises:
        InvalidInput, Mismatch: it is no run of the auditor's job, whatever else could be read.
    """
    from tallystick.diagnosis.run_comparison import explain_runs
    from tallystick.reports.divergence import divergence_page
    from tallystick.roles.auditor import choose_segments
    from tallystick.roles.referee import find_other_beginning
    from tallystick.roles.replay import environment_differences

    own, source, replay = _auditor()
    path = Path(_place().name) / "audited"
    unpack(data, path)
    run = RunDirectory(path)
    _refused(
        lambda: _shown(divergence_page(explain_runs(own, run, None))),
        lambda: _shown(divergence_page(explain_runs(run, own, None))),
        lambda: _shown(
            divergence_page(explain_states(own.load_checkpoint(2), run.load_checkpoint(2), ("A", "B")))
        ),
        lambda: find_other_beginning(hold(run.load_checkpoint(0).values()), replay),
    )
    transcript = run.load_transcript()
    environment_differences(transcript.specification)
    source.program.compare_before(transcript.specification.job.program)
    policy_of(transcript.specification.policy.name, transcript.specification.policy.parameters)
    for start, end in choose_segments(transcript, None):
        _read_segment(run, transcript, replay, start, end)
    return transcript


def _read_segment(run: RunDirectory, transcript: Transcript, replay: Replay, start: int, end: int) -> None:
    """Read what an audit reads of one segment, each time as far as it can."""
    from tallystick.execution.snapshot import load_state, state_entries
    from tallystick.roles.comparison import farther_than_trained
    from tallystick.roles.initial_state import compare_beginning, find_other_setting

    roots = {checkpoint.steps_done: checkpoint.state_root for checkpoint in transcript.checkpoints()}
    state = run.load_committed(start, roots[start])
    frames = run.load_frames(transcript, start, end)
    session = replay.session
    own = {entry.name: entry for entry in state_entries(session)}

    def follow() -> None:
        for frame in frames.values():
            session.following_context(frame)

    _refused(
        lambda: find_other_setting(replay.settings, state),
        lambda: compare_beginning(replay.built, state),
        lambda: farther_than_trained(state, own, run.load_committed(end, roots[end])),
        lambda: check_fingerprint(transcript.record(end - 1), run.load_committed(end, roots[end])),
        follow,
    )
    load_state(session, state)
    follow()
