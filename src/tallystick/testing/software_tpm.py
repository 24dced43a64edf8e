"""A TPM 2.0 in software, for tests: Debian's swtpm behind a socket, gone with its folder.

    with software_tpm(folder) as tcti:
        key = make_tpm_key(tcti)

Whoever runs it can read its memory: it shows that the code speaks to a TPM, never that a key is safe.
"""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tallystick.errors import StoreError

START_SECONDS = 10.0
LONGEST_SOCKET = 100  # bytes of a path that a Unix socket can have, less what swtpm appends


def missing_for_tpm() -> str | None:
    """Return what is missing here to test with a TPM, None if nothing is."""
    if shutil.which("swtpm") is None:
        return "swtpm is not installed (Debian: scripts/debian.sh)"
    if importlib.util.find_spec("tpm2_pytss") is None:
        return "tpm2-pytss is not installed (the extra tallystick[tpm])"
    return None


@contextmanager
def software_tpm(folder: Path) -> Generator[str]:
    """Run a TPM whose state lies in ``folder``; yields how it is reached. The same folder is the same TPM.

    Raises:
        StoreError: swtpm is missing, or did not start.
    """
    place = folder / "tpm"
    if len(str(place)) > LONGEST_SOCKET:
        raise StoreError(f"{place}: is too long a path for a socket")
    program = shutil.which("swtpm")
    if program is None:
        raise StoreError("swtpm is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    control = place.with_name("tpm.ctrl")
    for path in (place, control):
        path.unlink(missing_ok=True)
    process = subprocess.Popen(
        [program, "socket", "--tpm2", "--tpmstate", f"dir={folder}", "--server", f"type=unixio,path={place}",
         "--ctrl", f"type=unixio,path={control}", "--flags", "not-need-init,startup-clear"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + START_SECONDS
        while not (_is_listening(control) and _is_listening(place)):
            if process.poll() is not None or time.monotonic() > deadline:
                raise StoreError(f"swtpm did not start (exit code {process.poll()})")
            time.sleep(0.01)
        yield f"swtpm:path={place}"
    finally:
        process.terminate()
        process.wait()


def _is_listening(path: Path) -> bool:
    """Whether a connection is taken: a socket's name is there a moment before that."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
        return True
