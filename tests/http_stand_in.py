"""What stand-ins of servers share: a server in a thread, and a handler that answers in JSON and logs nothing."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HttpStandIn(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # connections that wait: a process may ask for many rows at a time

    def __init__(self, handler: type["JsonHandler"], port: int = 0):
        super().__init__(("127.0.0.1", port), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    @contextmanager
    def running(self) -> Iterator[Any]:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()


class JsonHandler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...

    def body(self) -> bytes:
        """Of the request."""
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def reply(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Bytes as they are, other values as JSON."""
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def reply_models(self, names: list[str]) -> None:
        """As /v1/models does."""
        self.reply({"data": [{"id": name} for name in names]})
