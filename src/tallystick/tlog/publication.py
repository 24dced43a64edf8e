"""Which documents are published in a log, and as what."""

from __future__ import annotations

from collections.abc import Callable

from tallystick.commit.encoding import parse_json
from tallystick.errors import InvalidInput
from tallystick.run.documents import STATEMENT_FORMAT, parse_run_statement
from tallystick.run.sample import ANNOUNCEMENT_FORMAT, DRAW_FORMAT, parse_announcement, parse_draw
from tallystick.signing.dsse import ENVELOPE_LIMIT, parse_envelope
from tallystick.tlog.tree import LogEntry

DOCUMENT_LIMIT = ENVELOPE_LIMIT


def entry_of(document: bytes) -> LogEntry:
    """Return the log entry of a run statement, a signed statement, or a sampled audit's announcement or draw.

    Raises:
        InvalidInput: it is none of them, or malformed.
    """
    value = parse_json(document, what="document", limit=DOCUMENT_LIMIT)
    stated = value.get("format") if isinstance(value, dict) else None
    known: dict[object, tuple[str, Callable[[bytes], object]]] = {
        STATEMENT_FORMAT: ("run", parse_run_statement),
        ANNOUNCEMENT_FORMAT: ("draw", parse_announcement),
        DRAW_FORMAT: ("draw", parse_draw),
    }
    if isinstance(value, dict) and "payloadType" in value:
        parse_envelope(document).statement()
        return LogEntry.of("statement", document)
    if not isinstance(stated, str) or stated not in known:
        raise InvalidInput(
            f"document: neither a signed statement nor one of {', '.join(map(str, known))}; nothing else is published"
        )
    kind, parse = known[stated]
    parse(document)
    return LogEntry.of(kind, document)
