"""States that are fetched over TCP: kept in memory, under the names that answers give, until they are fetched.

GET /NAME gives a safetensors file and forgets it; DELETE /LABEL forgets all whose names begin with LABEL. Whoever
reaches the address can do both, so it belongs into a network of one's own. Imports nothing of headstart.
"""

import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Thread
from typing import Any

WAIT = 30.0  # seconds until something is there; an answer is out before its states are
KEPT = 600.0  # seconds after which what nobody fetched is forgotten
UNKNOWN, COULD_NOT = 404, 507  # HTTP status


class Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # connections that wait: every process asks for many rows at a time


class Outbox:
    """Keeps what is to be fetched, and listens. address: HOST:PORT."""

    def __init__(self, address: str):
        """Args: address: HOST:PORT of this machine, as those who fetch reach it; port 0: a free one."""
        host, _, port = address.rpartition(":")
        self.kept: dict[str, tuple[float, bytes | str]] = {}  # by name: when it came; a problem, where it is text
        self.changed = Condition()
        outbox = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                content = outbox.taken(self.path[1:])
                if isinstance(content, bytes):
                    self.reply(200, content)
                else:
                    self.reply(UNKNOWN if content is None else COULD_NOT, (content or "not there").encode())

            def do_DELETE(self) -> None:
                outbox.clear(self.path[1:])
                self.reply(200, b"")

            def reply(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None: ...

        self.server = Listener((host, int(port)), Handler)
        self.address = f"{host}:{self.server.server_port}"
        Thread(target=self.server.serve_forever, name="headstart-tcp", daemon=True).start()

    def put(self, name: str, content: bytes | str) -> None:
        """Keep the content of a name; text says why there is none."""
        now = time.monotonic()
        with self.changed:
            self.kept = {key: entry for key, entry in self.kept.items() if now - entry[0] < KEPT}
            self.kept[name] = now, content
            self.changed.notify_all()

    def taken(self, name: str) -> bytes | str | None:
        """The content of a name, once it is there, and not again; None: it does not come."""
        with self.changed:
            self.changed.wait_for(lambda: name in self.kept, timeout=WAIT)
            return self.kept.pop(name, (0.0, None))[1]

    def clear(self, label: str) -> None:
        with self.changed:
            self.kept = {key: entry for key, entry in self.kept.items() if not key.startswith(f"{label}-")}

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
