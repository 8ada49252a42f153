"""A real S3 server over HTTP, and a proxy before it that counts requests and spoils some of them.

The server (moto) is a process of its own, and the proxy is a thread of the test's process.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from megackpt.storage import ObjectOptions

ACCESS_KEY, SECRET = "AKIAZZTESTACCESSKEY0", "not/really+a/secret/0123456789abcdefghij"
BUCKET = "checkpoints"
PROMPT = {"backoff_s": 0.01, "retry_s": 20.0}


def options_for(port: int, **changes: object) -> ObjectOptions:
    """Return options that lead to a server on this machine, with small parts and short pauses."""
    config = {
        "endpoint": f"http://127.0.0.1:{port}",
        "region": "us-east-1",
        "access_key_id": ACCESS_KEY,
        "secret_access_key": SECRET,
    }
    sizes = {"part_bytes": 256 << 10, "range_bytes": 1 << 20, "ranges_in_flight": 3}
    return ObjectOptions(config=config, **{**sizes, **PROMPT, **changes})  # type: ignore[arg-type]


def ask(port: int, method: str, path: str) -> str:
    """Make a request of our own, not through the library under test; moto checks no signature."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path)
        return connection.getresponse().read().decode()


def unfinished_uploads(port: int, url: str) -> list[str]:
    """Return the keys below an URL whose multipart uploads are neither complete nor aborted."""
    prefix = url.removeprefix(f"s3://{BUCKET}/") + "/"
    keys = re.findall(r"<Key>([^<]*)</Key>", ask(port, "GET", f"/{BUCKET}?uploads"))
    return [key for key in keys if key.startswith(prefix)]


class S3Server:
    """moto's server in a process of its own. Parts may have any size there."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        code = f"import sys; from moto.server import main; main(['-H', '127.0.0.1', '-p', '{self.port}'])"
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code],
            env={"PATH": "/usr/bin:/bin", "S3_UPLOAD_PART_MIN_SIZE": "1", "HOME": "/nonexistent"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                ask(self.port, "PUT", f"/{BUCKET}")
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.close()
                    raise
                time.sleep(0.05)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class Asked:
    """One request that reached the proxy; kind as `kind_of` says, fault what was done to it or ""."""

    kind: str
    path: str
    nbytes: int
    fault: str


def kind_of(method: str, target: str) -> str:
    query = parse_qs(urlsplit(target).query, keep_blank_values=True)
    if "uploadId" in query:
        return {"PUT": "part", "POST": "complete", "DELETE": "abort"}[method]
    if "uploads" in query:
        return "begin"
    if "delete" in query:
        return "delete"
    if "list-type" in query:
        return "list"
    return method.lower()


FAULTS = ("500", "503", "cut", "lost", "half", "stall")
"""Rejected; connection closed before doing anything, after it, and within the answer; no answer in time."""

_ANNOUNCED = {
    "500": "<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>",
    "503": "<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>",
    "429": "<Error><Code>TooManyRequests</Code></Error>",
    "403": f"<Error><Code>SignatureDoesNotMatch</Code><AWSAccessKeyId>{ACCESS_KEY}</AWSAccessKeyId>"
    f"<StringToSign>{SECRET}</StringToSign></Error>",
}


class FaultyProxy:
    """Forwards to a server; choose says what becomes of a request, from its kind and path: a fault, or ""."""

    def __init__(self, server: S3Server, *, stall_s: float = 1.0) -> None:
        self.choose: Callable[[str, str], str] = lambda kind, path: ""
        self.asked: list[Asked] = []
        self.lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self, server.port, stall_s))
        self._http.daemon_threads = True
        self.port = int(self._http.server_address[1])
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))
        self._thread.start()

    def counts(self) -> dict[str, int]:
        """Return the number of requests by kind."""
        return dict(Counter(request.kind for request in self.asked))

    @contextlib.contextmanager
    def counting(self) -> Iterator[dict[str, int]]:
        """Yield what is, after the block, the number of requests in it by kind."""
        before, added = Counter(self.counts()), dict[str, int]()
        yield added
        added.update(Counter(self.counts()) - before)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def _handler(proxy: FaultyProxy, port: int, stall_s: float) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, format: str, *args: object) -> None: ...

        def handle(self) -> None:
            self.upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            with contextlib.suppress(ConnectionError), contextlib.closing(self.upstream):
                super().handle()

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            kind = kind_of(self.command, self.path)
            with proxy.lock:
                fault = proxy.choose(kind, self.path)
                proxy.asked.append(Asked(kind, self.path, len(body), fault))
            if fault in _ANNOUNCED:
                self._answer(int(fault), {}, _ANNOUNCED[fault].encode())
                return
            if fault in ("cut", "stall"):
                time.sleep(stall_s if fault == "stall" else 0)
                self.close_connection = True
                return
            self.upstream.request(self.command, self.path, body, dict(self.headers))
            response = self.upstream.getresponse()
            data = response.read()
            if fault == "lost":
                self.close_connection = True
                return
            self._answer(response.status, dict(response.getheaders()), data, cut=fault == "half")

        def _answer(self, status: int, headers: dict[str, str], data: bytes, *, cut: bool = False) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                    self.send_header(name, value)
            length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(data))
            self.send_header("Content-Length", length)
            if cut and not data:  # there is only a head to be cut
                self.close_connection = True
                return
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data[: len(data) // 2] if cut else data)
            self.close_connection = self.close_connection or cut

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    return Handler
