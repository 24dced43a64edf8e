"""Whether a job is the same in every process: asked before its data or settings convict anybody (spec/dispute.md 14).

The order of a set of strings hangs on the interpreter's hash seed, an unseeded generator on the clock. Whoever repeats such a
job has other data, and so has whoever repeats it again. Two processes with other hash seeds build it; what they do not have
in common is nobody's doing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tallystick.errors import TallyError
from tallystick.execution.job import JobSource
from tallystick.execution.step import batch_digest
from tallystick.store.files import RunDirectory

HASH_SEEDS = ("1", "2")
PARTS = {"settings": "optimizer and scheduler", "built": "what is not trained", "batch": "the data"}


def find_unsteady(run: Path, source: JobSource | None, step: int) -> str | None:
    """Return what two processes on this machine do not agree on, of the job of the ``run`` and of its data in ``step``.

    None if they agree, or if the job is no file's and cannot be given to another process.
    """
    if source is None or type(source) is not JobSource:
        return None
    asked = {
        "job": source.path, "run": str(run.resolve()), "source": base64.b64encode(source.source).decode(), "step": step,
    }  # fmt: skip
    paths = os.pathsep.join(path for path in sys.path if path)
    started = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "tallystick.roles.rebuilt"],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )
        for seed in HASH_SEEDS
    ]  # fmt: skip
    said = [child.communicate(json.dumps(asked).encode())[0] for child in started]
    if any(child.returncode for child in started):
        return "another process cannot build the job"
    one, other = (json.loads(line) for line in said)
    parts = [name for key, name in PARTS.items() if one[key] != other[key]]
    if not parts:
        return None
    return (
        f"step {step}: two processes on one machine do not agree on {' and '.join(parts)} of the job: the order of a set, "
        "an unseeded generator, the clock? Sort sets, seed generators in build() and batch()"
    )


def main() -> int:
    """Answer one question on standard input."""
    from tallystick.roles.auditor import Replay, open_replay

    asked: Mapping[str, str] = json.loads(sys.stdin.buffer.read())
    source = JobSource(asked["job"], base64.b64decode(asked["source"]))
    try:
        replay = open_replay(RunDirectory(Path(asked["run"])).load_transcript().specification, source)
        if not isinstance(replay, Replay):
            return 1
        settings = hashlib.sha256()
        for _, entry in sorted(replay.settings.items()):
            settings.update(hashlib.sha256(entry.data).digest())
        built = [b"" if each.trained else each.digest for _, each in sorted(replay.built.items())]
        found = {
            "batch": batch_digest(replay.job.batch(int(asked["step"]))),
            "built": hashlib.sha256(b"".join(built)).hexdigest(),
            "settings": settings.hexdigest(),
        }
    except TallyError:
        return 1
    sys.stdout.write(json.dumps(found))
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    os._exit(main())  # threads and workers of the job are not waited for
