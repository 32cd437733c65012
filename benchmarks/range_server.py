"""An HTTP server of files by ranges of bytes: it counts what it sends, throttles connections, and fails on demand.

    python -m benchmarks.range_server FOLDER --rate 50e6

prints its port, then serves until its input ends; `GET /:counts` answers what was sent so far as JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

SENT_AT_ONCE = 1 << 18
HELD_S = 600.0


@dataclass
class Faults:
    """What goes wrong: so many next answers have a `status`, or end after `cut_after` bytes; `deny` answers all so."""

    num_next: int = 0
    status: int = 0
    cut_after: int = 0
    deny: int = 0


@dataclass
class Sent:
    """What was sent: bytes in all, `(name, start, end)` of every whole range of a file, and answers at once at most."""

    num_bytes: int = 0
    ranges: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    at_once: int = 0
    most_at_once: int = 0

    def tensor_bytes(self) -> int:
        """Return bytes of ranges of safetensors files."""
        return sum(
            (end - start) * times for (name, start, end), times in self.ranges.items() if name.endswith(".safetensors")
        )


class RangeServer:
    """Serves a folder on a port of 127.0.0.1 while its context lasts. `rate` is bytes per second of one connection.

    Answers begin once as many as `holds_until` have been asked for at once, or after `HELD_S`. `paths` maps patterns of
    paths to what they stand for below the folder; `answers` are bodies by their paths, and `headers` those of all
    answers.
    """

    def __init__(self, folder: Path, *, rate: float = 0.0, paths: dict[str, str] | None = None) -> None:
        self.folder, self.rate, self.paths = folder, rate, paths or {}
        self.sent, self.faults, self.changing = Sent(), Faults(), threading.Condition()
        self.holds_until = 0
        self.answers: dict[str, bytes] = {}
        self.headers: dict[str, str] = {}
        self._server = _Quiet(("127.0.0.1", 0), type("Bound", (_Answering,), {"served": self}))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def file_at(self, path: str) -> Path:
        """Return the file that a path of a URL names."""
        for pattern, replacement in self.paths.items():
            path = re.sub(pattern, replacement, path)
        return self.folder / path.lstrip("/")

    def take_fault(self) -> Faults | None:
        """Return the fault of the next answer, if there is one."""
        with self.changing:
            if self.faults.deny:
                return Faults(status=self.faults.deny)
            if self.faults.num_next <= 0:
                return None
            self.faults.num_next -= 1
            return self.faults

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Quiet(ThreadingHTTPServer):
    """A client that is gone is no error."""

    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Log nothing."""


class _Answering(BaseHTTPRequestHandler):
    """Answers GET and HEAD."""

    protocol_version = "HTTP/1.1"
    served: RangeServer

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        if self.path == "/:counts":
            sent = self.served.sent
            counts = {
                "num_bytes": sent.num_bytes,
                "most_at_once": sent.most_at_once,
                "ranges": sum(sent.ranges.values()),
            }
            self._send(200, json.dumps(counts | {"tensor_bytes": sent.tensor_bytes()}).encode())
        else:
            self._answer(has_body=True)

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _answer(self, *, has_body: bool) -> None:
        fault = self.served.take_fault()
        if fault is not None and fault.status:
            return self._send(fault.status, b"a fault", has_body=has_body)
        fixed = self.served.answers.get(self.path.partition("?")[0])
        if fixed is not None:
            return self._send(200, fixed, has_body=has_body)
        file = self.served.file_at(self.path.partition("?")[0])
        if not file.is_file():
            return self._send(404, b"", has_body=has_body)
        size = file.stat().st_size
        start, end = 0, size
        if found := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            start, end = int(found[1]), min(int(found[2]) + 1, size)
        if start > end:
            return self._send(416, b"", has_body=has_body)
        self.send_response(206 if end - start < size else 200)
        self.send_header("Content-Length", str(end - start))
        for name, value in self.served.headers.items():
            self.send_header(name, value)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{file.stat().st_mtime_ns}"')
        self.end_headers()
        if has_body:
            self._send_range(file, start, end, cut_after=fault.cut_after if fault else 0)
        return None

    def _send(self, status: int, body: bytes, *, has_body: bool = True) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in self.served.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def _send_range(self, file: Path, start: int, end: int, *, cut_after: int) -> None:
        served, place, began = self.served, start, time.monotonic()
        with served.changing:
            served.sent.at_once += 1
            served.sent.most_at_once = max(served.sent.most_at_once, served.sent.at_once)
            served.changing.notify_all()
            served.changing.wait_for(lambda: served.sent.most_at_once >= served.holds_until, timeout=HELD_S)
        try:
            with file.open("rb") as content:
                content.seek(start)
                while place < end and not (cut_after and place - start >= cut_after):
                    part = content.read(min(SENT_AT_ONCE, end - place, cut_after or end))
                    self.wfile.write(part)
                    place += len(part)
                    if served.rate:
                        time.sleep(max(0.0, began + (place - start) / served.rate - time.monotonic()))
        except ConnectionError:
            self.close_connection = True
        finally:
            with served.changing:
                served.sent.at_once -= 1
                served.sent.num_bytes += place - start
                if place == end:
                    served.sent.ranges[file.name, start, end] += 1
        if place < end:
            self.close_connection = True


def main() -> None:
    """Serve a folder as a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rate", type=float, default=0.0, help="bytes per second of one connection")
    options = parser.parse_args()
    with RangeServer(options.folder, rate=options.rate) as server:
        print(server.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
