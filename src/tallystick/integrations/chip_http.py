"""Records over HTTP: a collector's server, and the client that a chip in remote mode uses.

    POST /v1/records   body: a CBOR array of records; answer: a CBOR array of receipts
    409                 refused for good (a fork, a gap, a stranger), with one line of text

The standard library's server, for a closed network; put a TLS proxy before it elsewhere. Records and receipts are
signed, so a proxy can withhold but not change them.
"""

from __future__ import annotations

import http.client
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tallystick.errors import InvalidInput, Mismatch, ProtocolViolation, StoreError
from tallystick.fleet.agent.collector import Collector
from tallystick.signing.cose import encode_cbor, parse_cbor

PATH = "/v1/records"
BODY_LIMIT = 1 << 20
TIMEOUT = 30.0  # seconds a connection may rest


class HttpCollector:
    """A collector that is reached over HTTP; a failed connection is for now, a refusal for good."""

    def __init__(self, url: str, *, timeout: float = 10.0) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise InvalidInput(f"collector {url}: must be http://HOST:PORT or https://HOST:PORT")
        self.url, self._parts, self._timeout = url, parts, timeout

    def submit(self, frames: list[bytes]) -> list[bytes]:
        """Return a receipt for each record.

        Raises:
            StoreError: out of reach for now.
            ProtocolViolation: refused for good.
        """
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.netloc, timeout=self._timeout)
        try:
            body = encode_cbor(list(frames))
            connection.request(
                "POST", self._parts.path.rstrip("/") + PATH, body, {"Content-Type": "application/cbor"}
            )
            answer = connection.getresponse()
            data = answer.read(BODY_LIMIT + 1)
        except (OSError, http.client.HTTPException) as problem:
            raise StoreError(f"collector {self.url}: is out of reach ({problem})") from problem
        finally:
            connection.close()
        if answer.status == 409:
            text = data[:500].decode("utf-8", "replace")
            raise ProtocolViolation(f"collector {self.url}: refuses: {text}")
        if answer.status != 200:
            raise StoreError(f"collector {self.url}: answered {answer.status}")
        try:
            receipts = parse_cbor(data, what="receipts", limit=BODY_LIMIT)
        except InvalidInput as problem:
            raise StoreError(f"collector {self.url}: answered with something else ({problem})") from problem
        if not isinstance(receipts, list) or not all(isinstance(item, bytes) for item in receipts):
            raise StoreError(f"collector {self.url}: answered with something else than receipts")
        return [bytes(item) for item in receipts]


def serve_collector(collector: Collector, host: str, port: int) -> ThreadingHTTPServer:
    """Return a server that is bound and not yet serving; call its ``serve_forever``.

    Raises:
        StoreError: the address cannot be bound.
    """
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        timeout = TIMEOUT

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            is_number = length.isascii() and length.isdigit() and len(length) < 20
            if self.path != PATH or not is_number or int(length) > BODY_LIMIT:
                self._answer(400, b"POST up to 1 MiB of CBOR to " + PATH.encode())
                return
            try:
                frames = parse_cbor(self.rfile.read(int(length)), what="records", limit=BODY_LIMIT)
                if not isinstance(frames, list) or not all(isinstance(item, bytes) for item in frames):
                    raise InvalidInput("records: must be a CBOR array of byte strings")
                with lock:
                    receipts = collector.submit(frames)
            except StoreError as problem:
                self._answer(503, str(problem).encode())
            except (InvalidInput, Mismatch, ProtocolViolation) as problem:
                self._answer(409, str(problem).encode())
            else:
                self._answer(200, encode_cbor(receipts))

        def log_message(self, *message: object, **named: object) -> None:
            del message, named

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    try:
        return ThreadingHTTPServer((host, port), Handler)
    except OSError as problem:
        raise StoreError(f"{host}:{port}: cannot be listened on ({problem.strerror})") from problem
