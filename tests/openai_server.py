"""A real HTTP server with OpenAI's chat API, which answers or fails as a test says, and a regeneration that asks it."""

import hashlib
import json
import threading
import time
from collections import Counter

from headstart.data_pipelines.answers.regenerate import regenerate
from headstart.scripts.data.served_answers import by_messages
from http_stand_in import HttpStandIn, JsonHandler


class Server(HttpStandIn):
    """Answers with a hash of the request. fault(server, body, number of the attempt at it) may say otherwise."""

    def __init__(self, fault=None, delay=0.0, port=0):
        super().__init__(Handler, port)
        self.fault, self.delay = fault or (lambda *_: None), delay
        self.lock, self.num_now, self.most_at_once = threading.Lock(), 0, 0
        self.attempts, self.bodies, self.headers, self.times = Counter(), [], [], []
        self.url += "/v1"

    def handle_error(self, *_):
        """Clients are killed here: no news."""


class Handler(JsonHandler):
    server: Server

    def do_GET(self):
        self.reply_models(["tiny"])

    def do_POST(self):
        server, raw = self.server, self.body()
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
        self.reply(payload, status, headers)


def answered(body, *, finish_reason="stop", **message):
    text = hashlib.sha256(json.dumps([body["messages"], body["seed"]]).encode()).hexdigest()
    choice = {"message": {"role": "assistant", "content": text, **message}, "finish_reason": finish_reason}
    return 200, {}, {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}


def serving(fault=None, delay=0.0, port=0):
    return Server(fault, delay, port).running()


def regenerated(config):
    """As `headstart data regenerate` with servers."""
    answers, identity = by_messages(config)
    return regenerate(config, answers, target_identity=identity)
