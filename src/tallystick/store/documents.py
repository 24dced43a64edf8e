"""Documents in files of their own."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from tallystick.commit.codec import Document
from tallystick.store.files import read_whole

D = TypeVar("D", bound=Document)


def read_document(kind: type[D], path: Path) -> D:
    """Return the document of ``kind`` that a file holds.

    Raises:
        StoreError: it cannot be read.
        InvalidInput: it is too large, or no such document.
    """
    what, limit = kind.about()
    return kind.parse(read_whole(path, limit=limit, what=f"the file of a {what}"), what=str(path))
