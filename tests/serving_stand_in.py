"""What stands for vLLM's server in tests: an HTTP server with its streamed API, counters, planted speeds and faults.

Also a program, in the place of a Python with vLLM:  stand_in -m MODULE --host HOST --port PORT --model M ...
"""

import asyncio
import hashlib
import json
import os
import sys
import threading
from contextlib import contextmanager, suppress

VLLM = "vllm:spec_decode_num_"


class StandIn:
    """step: seconds per forward. accepted: of `length` drafts each, one entry a round; empty: it drafts nothing.
    fault(number of the question, body): `drop`, `hang`, (status, headers, text), or nothing. cards: what /v1/models
    says, instead of the names."""

    def __init__(self, *, step=0.001, accepted=(), fault=None, counters=True, model="M", key="",
                 style="vllm", other_template=False, ids=True, usage=True, started=None, other_text=(),
                 length=4, cards=None, version=None, looping=()):  # fmt: skip
        self.step, self.accepted, self.fault = step, list(accepted), fault or (lambda *_: None)
        self.has_counters, self.key, self.style = counters, key, style
        self.other_template, self.gives_ids, self.other_text = other_template, ids, set(other_text)
        self.looping = looping  # last ids of prompts whose answers repeat a token
        self.bodies, self.num_now, self.most_at_once = [], 0, 0
        self.gives_usage, self.started = usage, started
        self.states = None  # a FakeServer
        self.names = [model]  # by which it may be asked
        self.cards, self.version = cards, version
        self.length, self.applied = length, {}  # sampling settings that llama-server says it has used
        self.rounds, self.drafted, self.at, self.tokens, self.requests = 0, 0, [0] * 8, 0, 0

    def metrics(self):
        started = "" if self.started is None else f"process_start_time_seconds {self.started}\n"
        return started + self.counted()

    def counted(self):
        if not self.has_counters or self.style == "llama-server":
            return "# none\n"
        if not self.accepted:
            return f"{self.style}:num_requests_running 0\n"
        if self.style == "sglang":
            lines = [f'sglang:spec_verify_calls_total{{model_name="m"}} {self.rounds}']
            lines += [f'sglang:generation_tokens_total{{is_streaming="true"}} {self.tokens}']
            lines += [f'sglang:num_requests_total{{is_streaming="true"}} {self.requests}']
        else:
            labels = 'engine="0",model_name="m"'
            lines = [
                f"{VLLM}drafts_total{{{labels}}} {self.rounds}.0",
                f"{VLLM}draft_tokens_total{{{labels}}} {self.drafted}.0",
            ]
            lines += [f"{VLLM}accepted_tokens_total{{{labels}}} {sum(self.at)}.0"]
            lines += [
                f'{VLLM}accepted_tokens_per_pos_total{{{labels},position="{i}"}} {n}.0'
                for i, n in enumerate(self.at[:4])
            ]
            lines += [f"{VLLM}drafts_created{{{labels}}} 1.7e+09"]
        return "\n".join(lines) + "\n"

    async def handle(self, reader, writer):
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await self.answer(reader, writer)
        writer.close()

    async def answer(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        line, *rest = head.split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in rest)}
        path = line.split()[1]
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            return self.say(
                writer, 401, json.dumps({"error": {"message": f"wrong key {headers.get('authorization', '')}"}})
            )
        if line.startswith("GET"):
            models = json.dumps({"data": self.cards or [{"id": name} for name in self.names]})
            told = {"/health": "", "/metrics": self.metrics(), "/v1/models": models}
            told |= {"/version": json.dumps({"version": self.version})} if self.version else {}
            told |= {"/props": '{"default_generation_settings": {}}'} if self.style == "llama-server" else {}
            return self.say(writer, 200 if path in told else 404, told.get(path, ""))
        asked = json.loads(body)
        if len(self.names) > 1 and asked["model"] != self.names[-1]:
            return self.say(writer, 404, json.dumps({"error": {"message": f"asked without {self.names[-1]}"}}))
        self.bodies.append(asked)
        fault = self.fault(len(self.bodies), asked)
        if fault == "drop":
            return None
        if fault == "hang":
            return await asyncio.sleep(60)
        if fault is not None:
            return self.say(writer, *fault)
        if path == "/completion":  # llama-server's own form
            new = [3 + (sum(asked["prompt"]) + i) % 50 for i in range(asked["n_predict"])]
            told = {"tokens": new, "stop_type": "limit", "generation_settings": self.applied}
            return self.say(writer, 200, json.dumps(told))
        self.num_now += 1
        self.most_at_once = max(self.most_at_once, self.num_now)
        try:
            if asked.get("stream"):
                await self.stream(writer, asked, is_chat="chat" in path)
            else:
                await self.whole(writer, asked)
        finally:
            self.num_now -= 1

    def say(self, writer, status, text, headers=()):
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(text.encode())}", *headers, "Connection: close", "", ""]
        writer.write("\r\n".join(lines).encode() + text.encode())

    def new_ids(self, asked):
        """An answer, which depends on the question alone."""
        source = int(hashlib.sha256(json.dumps(asked.get("messages") or asked["prompt"]).encode()).hexdigest()[:8], 16)
        new = [3 + (source + i * i) % 50 for i in range(asked["max_tokens"])]
        if not asked.get("messages") and asked["prompt"][-1] in self.looping:
            new = new[:1] * len(new)
        if source % 1000 in self.other_text or -1 in self.other_text:
            new[1] = 2
        return new

    async def whole(self, writer, asked):
        """An answer to a prompt of ids, which is not streamed; one that asks for states gets them, where it has any."""
        if self.states is not None and asked.get("kv_transfer_params"):
            return self.say(writer, 200, json.dumps(await asyncio.to_thread(self.states.answer, asked)))
        new = self.new_ids(asked)
        await asyncio.sleep(self.step * len(new))
        choice = {"index": 0, "text": " ".join(map(str, new)), "finish_reason": "length"}
        choice |= {"prompt_token_ids": asked["prompt"]}
        if self.gives_ids and asked.get("return_token_ids"):
            choice |= {"token_ids": new}
        self.say(writer, 200, json.dumps({"choices": [choice], "usage": {"completion_tokens": len(new)}}))

    async def stream(self, writer, asked, *, is_chat):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        prompt = asked.get("prompt") if not is_chat else [1, 2, 3]
        if self.other_template:
            prompt = [9, *prompt]
        new = self.new_ids(asked)
        at, turn = 0, 0
        while at < len(new):
            await asyncio.sleep(self.step)
            count = 1
            if at and self.accepted:
                taken = self.accepted[turn % len(self.accepted)]
                turn, count = turn + 1, 1 + taken
                self.rounds, self.drafted = self.rounds + 1, self.drafted + self.length
                for i in range(min(taken, len(new) - at - 1)):
                    self.at[i] += 1
            ids = new[at : at + count]
            text = " ".join(map(str, ids)) + " "
            choice = {"index": 0, **({"delta": {"content": text}} if is_chat else {"text": text})}
            if self.gives_ids and asked.get("return_token_ids"):
                choice |= {"token_ids": ids} | ({"prompt_token_ids": prompt} if not at and not is_chat else {})
            at += len(ids)
            choice["finish_reason"] = "length" if at == len(new) else None
            part = {"choices": [choice]} | (
                {"prompt_token_ids": prompt} if self.gives_ids and is_chat and turn == 0 else {}
            )
            self.event(writer, json.dumps(part))
        self.tokens, self.requests = self.tokens + len(new), self.requests + 1
        ended = {"choices": [], "usage": {"completion_tokens": len(new)} if self.gives_usage else None}
        if self.style == "llama-server":
            counts = {"draft_n": self.length * turn, "draft_n_accepted": len(new) - 1 - turn} if self.accepted else {}
            ended["timings"] = {"predicted_n": len(new), **counts}
        self.event(writer, json.dumps(ended))
        self.event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def event(self, writer, data):
        text = f"data: {data}\n\n".encode()
        writer.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")


class Steady(StandIn):
    """The same answer to every question, made once, each part of it at its own time: takes little of a core, and what
    comes late is made up for."""

    def __init__(self, *, step, num_tokens):
        super().__init__(step=step)
        texts = [json.dumps({"choices": [{"index": 0, "text": f"{i} ", "token_ids": [i]}]}) for i in range(num_tokens)]
        texts[-1] = texts[-1].replace('"index"', '"finish_reason": "length", "index"')
        parts = [f"data: {text}\n\n" for text in texts]
        self.parts = [f"{len(part):x}\r\n{part}\r\n".encode() for part in parts]

    async def stream(self, writer, asked, *, is_chat):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        start = asyncio.get_running_loop().time()
        for number, part in enumerate(self.parts, start=1):
            await asyncio.sleep(max(0.0, start + number * self.step - asyncio.get_running_loop().time()))
            writer.write(part)
        writer.write(b"0\r\n\r\n")
        await writer.drain()


@contextmanager
def listening(stand_in, port=0):
    """Its URL; it runs in a thread of its own."""
    loop, ready, told = asyncio.new_event_loop(), threading.Event(), {}

    async def serve():
        server = await asyncio.start_server(stand_in.handle, "127.0.0.1", port)
        told["port"] = server.sockets[0].getsockname()[1]
        told["server"] = server
        stand_in.stop = lambda: loop.call_soon_threadsafe(server.close)
        ready.set()

    def run():
        try:
            loop.run_until_complete(serve())
        except OSError as error:
            told["error"] = error
            ready.set()
            return
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait()
    if "error" in told:
        raise told["error"]
    try:
        yield f"http://127.0.0.1:{told['port']}"
    finally:

        def end():
            told["server"].close()
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.call_soon(loop.stop)

        loop.call_soon_threadsafe(end)
        thread.join()


if __name__ == "__main__":
    FLAGS = dict(zip(sys.argv[1:], [*sys.argv[2:], ""], strict=True))
    HOW = (
        {}
        if {"--model", "--model-path"} & FLAGS.keys()
        else {"style": "llama-server", "ids": False, "length": int(FLAGS.get("--spec-draft-n-max", 4))}
    )
    HOW["step"] = float(FLAGS.get("--step", 0.001))
    LIFE = int(FLAGS.get("--answers", 10**9))  # questions that are not streamed, after which it is killed
    HOW |= {"fault": lambda number, asked: os._exit(3) if number > LIFE and not asked.get("stream") else None}
    DRAFTS = [2] if {"--speculative-config", "--spec-type"} & FLAGS.keys() else []
    STAND_IN = StandIn(accepted=DRAFTS, **HOW)
    if "--lora-modules" in FLAGS:
        STAND_IN.names += [FLAGS["--lora-modules"].partition("=")[0]]
    if "--kv-transfer-config" in FLAGS:
        sys.path.append(os.path.join(os.path.dirname(__file__), "data_pipelines", "served"))
        from fake_server import fake_of  # pyright: ignore[reportMissingImports]

        STAND_IN.states = fake_of(FLAGS)
        STAND_IN.names = STAND_IN.states.names
    with listening(STAND_IN, port=int(FLAGS["--port"])):
        threading.Event().wait()
