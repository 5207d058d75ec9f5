"""An S3 server that fails: a proxy in front of a real one that answers some requests in the ways in which the outside world goes wrong.

    python tests/support/faults.py UPSTREAM PORT SEED KIND=RATE...        until SIGTERM or Ctrl-C; then prints how many of each kind it did

| kind        | what becomes of a request |
|---|---|
| `500`, `503` | an S3 error instead of an answer; the request never reaches the server |
| `timeout`   | nothing is answered until the client gives up |
| `reset`     | the connection is reset |
| `truncated` | the request is done, and half of the answer's body is sent under the full Content-Length |
| `wrong`     | one byte differs: of the object on its way down (GET), or of the body on its way up (PUT) |

A request without a body that a kind could damage passes unharmed and is not counted. Listings pass `wrong` too: nothing in S3 guards them.
"""

import json
import random
import signal
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPMessage, parse_headers
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import BinaryIO
from urllib.parse import parse_qs, urlsplit

KINDS = ("500", "503", "timeout", "reset", "truncated", "wrong")
CODES = {"500": "InternalError", "503": "SlowDown"}
LONGEST_SILENCE = 30.0  # seconds


class Proxy(ThreadingHTTPServer):
    """`url`, `counts` (faults done, per kind) and `requests` (all that came)."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, upstream: str, rates: dict[str, float], seed: int, port: int = 0):
        if unknown := set(rates) - set(KINDS):
            raise ValueError(f"{sorted(unknown)} are no kinds of fault: take some of {KINDS}")
        if sum(rates.values()) > 1:
            raise ValueError(f"the rates {rates} sum up to more than 1")
        self.upstream = (urlsplit(upstream).hostname, urlsplit(upstream).port)
        self.rates, self.counts, self.requests = rates, Counter(), 0
        self._random, self._lock, self.stopping = random.Random(seed), threading.Lock(), threading.Event()
        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def draw(self) -> tuple[str | None, float]:
        """The fault that is due for the next request, if any, and a place in [0, 1) for the byte that it damages."""
        with self._lock:
            self.requests += 1
            chance, place = self._random.random(), self._random.random()
        for kind, rate in self.rates.items():
            if chance < rate:
                return kind, place
            chance -= rate
        return None, place

    def count(self, kind: str) -> None:
        with self._lock:
            self.counts[kind] += 1

    def shutdown_request(self, request) -> None:
        # Closed without the polite shutdown before it, which would spoil a reset.
        self.close_request(request)

    def handle_error(self, request, client_address) -> None:
        # Clients that give up are what this server is for.
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def handle_expect_100(self) -> bool:
        # The server behind decides whether it wants the body.
        return True

    def log_message(self, *args) -> None:
        pass

    def _serve(self) -> None:
        kind, place = self.server.draw()
        if kind in ("500", "503", "timeout", "reset"):
            self.server.count(kind)
            self._refuse(kind)
        else:
            self._forward(kind, place)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def _refuse(self, kind: str) -> None:
        self.close_connection = True
        if kind == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        if kind == "timeout":
            self._wait_for_client_to_leave()
            return
        if "Expect" not in self.headers:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
        code = CODES[kind]
        body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>A fault made for a test.</Message></Error>'.encode()
        self.send_response(int(kind))
        for name, value in {
            "Content-Type": "application/xml",
            "Content-Length": str(len(body)),
            "Connection": "close",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _wait_for_client_to_leave(self) -> None:
        self.connection.settimeout(0.1)
        end = time.monotonic() + LONGEST_SILENCE
        while time.monotonic() < end and not self.server.stopping.is_set():
            with suppress(TimeoutError):
                # What it still sends is thrown away; nothing at all means that it has gone.
                if not self.connection.recv(1 << 16):
                    return

    def _forward(self, kind: str | None, place: float) -> None:
        with (
            socket.create_connection(self.server.upstream, timeout=LONGEST_SILENCE) as upstream,
            upstream.makefile("rb") as answers,
        ):
            # As they came, the Host among them: it is part of what the client has signed.
            lines = [
                f"{self.command} {self.path} HTTP/1.1",
                *(f"{name}: {value}" for name, value in self.headers.items() if name.lower() != "connection"),
            ]
            upstream.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1"))
            head = None
            if self.headers.get("Expect", "").lower() == "100-continue":
                head = _head(answers)
                if head[0].split()[1] == b"100":
                    self.send_response_only(100)
                    self.end_headers()
                    head = None
            if head is None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if kind == "wrong" and self.command == "PUT" and body:
                    self.server.count(kind)
                    body = _flipped(body, place)
                upstream.sendall(body)
                head = _head(answers)
            else:
                self.close_connection = True  # the body that was not wanted may come all the same
            status, headers = head
            answer = b"" if self.command == "HEAD" or status.split()[1] in (b"204", b"304") else _body(answers, headers)
        sent = answer
        if kind == "wrong" and answer and self._is_object(status):
            self.server.count(kind)
            sent = _flipped(answer, place)
        if kind == "truncated" and answer:
            self.server.count(kind)
            sent, self.close_connection = answer[: len(answer) // 2], True
        kept = [
            f"{n}: {v}"
            for n, v in headers.items()
            if n.lower() not in ("connection", "content-length", "transfer-encoding")
        ]
        length = headers["Content-Length"] if self.command == "HEAD" else len(answer)
        kept += [] if length is None else [f"Content-Length: {length}"]
        kept += ["Connection: close"] if self.close_connection else []
        self.wfile.write(status + "\r\n".join([*kept, "", ""]).encode("latin-1") + sent)

    def _is_object(self, status: bytes) -> bool:
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        return self.command == "GET" and status.split()[1] in (b"200", b"206") and "list-type" not in query


def _head(stream: BinaryIO) -> tuple[bytes, HTTPMessage]:
    status = stream.readline()
    if not status:
        raise ConnectionResetError("the server behind closed the connection")
    return status, parse_headers(stream)


def _body(stream: BinaryIO, headers: HTTPMessage) -> bytes:
    if headers.get("Transfer-Encoding", "").lower() != "chunked":
        return stream.read(int(headers["Content-Length"])) if "Content-Length" in headers else stream.read()
    parts = []
    while size := int(stream.readline().split(b";")[0], 16):
        parts.append(stream.read(size))
        stream.readline()
    return b"".join(parts)


def _flipped(data: bytes, place: float) -> bytes:
    at = int(place * len(data))
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@contextmanager
def faulty(upstream: str, rates: dict[str, float], seed: int, port: int = 0) -> Iterator[Proxy]:
    """A proxy in front of the S3 server at `upstream`; each of `rates` is the share of requests that fail in that way. Port 0 takes a free one."""
    proxy = Proxy(upstream, rates, seed, port)
    thread = threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.stopping.set()
        proxy.shutdown()
        thread.join()
        proxy.server_close()


def main(upstream: str, port: str, seed: str, *rates: str) -> None:
    with faulty(
        upstream, {kind: float(rate) for kind, _, rate in (r.partition("=") for r in rates)}, int(seed), int(port)
    ) as proxy:
        print(proxy.url, flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
        print(json.dumps({"requests": proxy.requests, **proxy.counts}), flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
