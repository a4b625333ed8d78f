"""What stands for llama-server in tests: it takes its flags, and answers /health and /completion with made-up timings.

FAKE: `crash`: it does not come up. `other`: its text with a head is another. `fails`: it refuses prompts that hold 9.
`ends`: texts end after 7 tokens, within accepted drafts. `penalises`: it has sampling settings of its own where a
request is silent. `insists`: it applies them whatever is asked. FAKE_LOG: a file for the requests.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

FAKE = os.environ.get("FAKE", "")
FLAGS = dict(zip(sys.argv[1:], [*sys.argv[2:], ""], strict=True))
DEFAULTS = {"temperature": 0.8, "repeat_penalty": 1.3, "xtc_probability": 0.5, "dry_multiplier": 0.8}
K = int(FLAGS.get("--spec-draft-n-max", 0))


def answer(asked):
    prompt, limit = asked["prompt"], asked["n_predict"]
    count = min(limit, 7) if FAKE == "ends" else limit
    tokens = [3 + (sum(prompt) + i) % 50 for i in range(count)]
    timings = {"prompt_ms": 2.0 * len(prompt), "predicted_n": count, "predicted_ms": 10.0 * (count - 1)}
    if K:  # one draft of each round is accepted; the last round's all, where the text ends in it
        rounds = (count - 1) // 2 if FAKE != "ends" else 2
        timings |= {"draft_n": K * rounds, "draft_n_accepted": rounds if FAKE != "ends" else 2 * K}
        timings["predicted_ms"] = 20.0 * rounds * 0.8
        if FAKE == "other":
            tokens[1] = 2
    applied = DEFAULTS if FAKE == "insists" else {**DEFAULTS, **{key: asked[key] for key in asked if key in DEFAULTS}}
    if FAKE == "penalises" and (applied["repeat_penalty"] != 1 or applied["xtc_probability"]):
        tokens[1] = 2
    settings = {"generation_settings": applied} if FAKE in ("penalises", "insists") else {}
    return settings | {"tokens": tokens, "stop_type": "eos" if FAKE == "ends" else "limit", "timings": timings}


class Handler(BaseHTTPRequestHandler):
    def say(self, code, what):
        body = json.dumps(what).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.say(200, {"status": "ok"})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if path := os.environ.get("FAKE_LOG"):
            with open(path, "a") as log:
                log.write(json.dumps([K, asked, sys.argv[1:], os.getpid()]) + "\n")
        if FAKE == "fails" and 9 in asked["prompt"]:
            return self.say(400, {"error": {"message": "no nine"}})
        return self.say(200, answer(asked))

    def log_message(self, *_):
        pass


if FAKE == "crash":
    print("loading\nerror: unknown model architecture: 'eagle9'\nbye", file=sys.stderr)
    sys.exit(3)
HTTPServer((FLAGS["--host"], int(FLAGS["--port"])), Handler).serve_forever()
