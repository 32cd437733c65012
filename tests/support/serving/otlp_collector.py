"""A collector of spans in this process: OTLP over HTTP, in JSON."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Collector(ThreadingHTTPServer):
    """Keeps what it was sent; answers with `status`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receiver)
        self.url, self.status = f"http://127.0.0.1:{self.server_port}", 200
        self.received: list[tuple[str, dict[str, str], dict[str, Any]]] = []

    @property
    def spans(self) -> list[dict[str, Any]]:
        """All spans, with attributes as a mapping."""
        return [
            {**span, "attributes": {each["key"]: plain(each["value"]) for each in span["attributes"]}}
            for _, _, body in self.received
            for resource in body["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ]


class _Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.received.append((self.path, dict(self.headers), body))
        self.send_response(self.server.status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        return


def plain(value: dict[str, Any]) -> Any:
    """Return the value of an attribute."""
    ((kind, found),) = value.items()
    if kind == "arrayValue":
        return [plain(each) for each in found["values"]]
    return int(found) if kind == "intValue" else found


@contextlib.contextmanager
def running_collector() -> Iterator[Collector]:
    """Serve a collector."""
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield collector
        finally:
            collector.shutdown()
            thread.join()
