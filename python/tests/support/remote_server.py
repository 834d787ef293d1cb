"""A server on 127.0.0.1 that serves ranges of files, counts requests, and fails on purpose."""

from __future__ import annotations

import dataclasses
import http.server
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclasses.dataclass
class Fault:
    """A fault in the first ``times`` requests for a file that start at byte ``begins`` or later.

    Attributes:
        kind: ``drop`` (the connection ends within the body), ``status``, ``whole`` (200), ``other``
            (a different range), ``total`` (a different file length), ``short``, ``long``, ``etag``,
            ``no_etag``, ``encoding``, ``redirect``, ``chunked`` (no length), ``weak`` (a weak
            ETag), ``huge`` (a header of a megabyte), ``wrong_range`` (a Content-Length of a
            different range), ``slow`` (one byte at a time), ``stall`` (no bytes until the client
            disconnects or ``seconds`` have passed).
    """

    kind: str
    begins: int = 0
    times: int = 1
    status: int = 503
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    location: str = ""
    sends: int = 1000
    seconds: float = 20.0
    hits: int = 0


@dataclasses.dataclass
class Seen:
    path: str
    headers: dict[str, str]
    begin: int
    end: int


@dataclasses.dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    declared: int | None = None  # Content-Length, if it is larger than the body
    chunked: bool = False
    stalls: float = 0  # pause in seconds after the header
    drips: float = 0  # pause in seconds after each of the first bytes


class Server:
    """An HTTP server of the dict ``files``; records requests and counts body bytes.

    ``route`` may return the response to a request, or ``None`` for the default response.
    """

    def __init__(
        self, certificate: tuple[Path, Path] | None = None, host: str = "127.0.0.1"
    ) -> None:
        self.files: dict[str, bytes] = {}
        self.etags: dict[str, str] = {}
        self.faults: list[Fault] = []
        self.seen: list[Seen] = []
        self.sent = 0
        self.route: Callable[[Seen], Answer | None] = lambda _: None
        self.lock = threading.Lock()
        outer = self

        class Handler(_Handler):
            server_of = outer

        self.heads = 0  # number of HEAD requests, which are rejected, as clients must not send any
        self.host = f"[{host}]" if ":" in host else host
        self._http = (_QuietIPv6 if ":" in host else _Quiet)((host, 0), Handler)
        self.scheme = "http"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
            self.scheme = "https"
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def url(self, path: str = "", host: str = "") -> str:
        return f"{self.scheme}://{host or self.host}:{self.port}{path}"

    def add_folder(self, folder: Path, below: str = "") -> None:
        for path in folder.iterdir():
            self.files[f"{below}/{path.name}"] = path.read_bytes()

    def reset(self) -> None:
        self.faults, self.seen, self.sent = [], [], 0
        self.etags = {}
        self.route = lambda _: None

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, seen: Seen) -> Answer:
        with self.lock:
            self.seen.append(seen)
        routed = self.route(seen)
        if routed is not None:
            return routed
        return self.ranged(seen, unquote(urlsplit(seen.path).path))

    def ranged(self, seen: Seen, path: str) -> Answer:
        body = self.files.get(path)
        if body is None:
            return Answer(404, {}, b"no such file")
        etag = self.etags.get(path, '"1"')
        total = len(body)
        begin, end = seen.begin, min(seen.end, total)
        if begin >= total:
            return Answer(416, {"Content-Range": f"bytes */{total}"}, b"")
        headers = {"ETag": etag, "Content-Range": f"bytes {begin}-{end - 1}/{total}"}
        answer = Answer(206, headers, body[begin:end])
        fault = self._fault(begin)
        return answer if fault is None else self._spoilt(answer, fault, body)

    def _fault(self, begin: int) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if begin >= fault.begins and fault.hits < fault.times:
                    fault.hits += 1
                    return fault
        return None

    def _spoilt(self, answer: Answer, fault: Fault, whole: bytes) -> Answer:
        etag, span = answer.headers["ETag"], answer.headers["Content-Range"]
        if fault.kind == "drop":
            return dataclasses.replace(
                answer, body=answer.body[: fault.sends], declared=len(answer.body)
            )
        if fault.kind == "status":
            return Answer(fault.status, fault.headers, b"later")
        if fault.kind == "redirect":
            return Answer(302, {"Location": fault.location}, b"")
        if fault.kind == "whole":
            return Answer(200, {"ETag": etag}, whole)
        if fault.kind in ("short", "long"):
            body = answer.body[:-7] if fault.kind == "short" else answer.body + b"more"
            return Answer(206, answer.headers, body)
        if fault.kind == "chunked":
            return dataclasses.replace(answer, chunked=True)
        if fault.kind == "stall":
            return dataclasses.replace(answer, stalls=fault.seconds)
        if fault.kind == "slow":
            return dataclasses.replace(answer, drips=fault.seconds)
        if fault.kind == "wrong_range":
            return dataclasses.replace(answer, declared=len(answer.body) + 4096)
        changed = {
            "weak": {"ETag": 'W/"1"'},
            "huge": {"X-Long": "x" * (1 << 20)},
            "other": {"Content-Range": re.sub(r"\d+-", "1-", span, count=1)},
            "total": {"Content-Range": f"{span}0"},
            "etag": {"ETag": '"2"'},
            "no_etag": {"ETag": ""},
            "encoding": {"Content-Encoding": "gzip"},
        }[fault.kind]
        return Answer(206, {**answer.headers, **changed}, answer.body)


class _Quiet(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Ignore errors of clients that disconnect or reject the certificate, as tests provoke."""


class _QuietIPv6(_Quiet):
    address_family = socket.AF_INET6


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Otherwise a body would wait 40 ms for the acknowledgement of its header.
    disable_nagle_algorithm = True
    server_of: Server

    def do_GET(self) -> None:
        match = _RANGE.fullmatch(self.headers.get("Range", ""))
        begin, end = (int(match[1]), int(match[2]) + 1) if match else (0, 1 << 62)
        headers = {name.lower(): value for name, value in self.headers.items()}
        answer = self.server_of.answer(Seen(self.path, headers, begin, end))
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            if value:
                self.send_header(name, value)
        if answer.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(answer.declared or len(answer.body)))
        self.end_headers()
        self._send(answer)
        with self.server_of.lock:
            self.server_of.sent += len(answer.body)
        if answer.declared:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    def do_HEAD(self) -> None:
        self.server_of.heads += 1
        self.send_error(405)

    def _send(self, answer: Answer) -> None:
        if answer.chunked:
            self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(answer.body), answer.body))
            return
        if answer.stalls:
            self.wfile.flush()
            select.select([self.connection], [], [], answer.stalls)
        for at in range(5 if answer.drips else 0):
            self.wfile.write(answer.body[at : at + 1])
            time.sleep(answer.drips)
        self.wfile.write(answer.body[5 if answer.drips else 0 :])

    def log_message(self, *_: object) -> None:
        """Suppress the log."""
