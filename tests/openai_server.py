"""A real HTTP server with OpenAI's chat API, which answers or fails as a test says, and a regeneration that asks it."""

import hashlib
import json
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from headstart.data_pipelines.answers.regenerate import regenerate
from headstart.scripts.data.served_answers import by_messages


class Server(ThreadingHTTPServer):
    """Answers with a hash of the request. fault(server, body, number of the attempt at it) may say otherwise."""

    daemon_threads = True

    def __init__(self, fault=None, delay=0.0, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.fault, self.delay = fault or (lambda *_: None), delay
        self.lock, self.num_now, self.most_at_once = threading.Lock(), 0, 0
        self.attempts, self.bodies, self.headers, self.times = Counter(), [], [], []
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, *_):
        """Clients are killed here: no news."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send_response(200)
        payload = json.dumps({"data": [{"id": "tiny"}]}).encode()
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def do_POST(self):
        server, raw = self.server, self.rfile.read(int(self.headers["Content-Length"]))
        body = json.loads(raw)
        with server.lock:
            server.num_now += 1
            server.most_at_once = max(server.most_at_once, server.num_now)
            server.attempts[raw] += 1
            attempt = server.attempts[raw]
            server.bodies.append(body)
            server.headers.append(self.headers)
            server.times.append(time.monotonic())
        try:
            time.sleep(server.delay)
            reply = server.fault(server, body, attempt) or answered(body)
        finally:
            with server.lock:
                server.num_now -= 1
        if reply == "drop":
            self.close_connection = True
            return
        status, headers, payload = reply
        payload = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(payload)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(payload)


def answered(body, *, finish_reason="stop", **message):
    text = hashlib.sha256(json.dumps([body["messages"], body["seed"]]).encode()).hexdigest()
    choice = {"message": {"role": "assistant", "content": text, **message}, "finish_reason": finish_reason}
    return 200, {}, {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}


@contextmanager
def serving(fault=None, delay=0.0, port=0):
    server = Server(fault, delay, port)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def regenerated(config):
    """As `headstart data regenerate` with servers."""
    answers, identity = by_messages(config)
    return regenerate(config, answers, target_identity=identity)
