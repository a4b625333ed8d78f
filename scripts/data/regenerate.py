"""`headstart data regenerate`: has the target answer the prompts itself, through servers or in this process."""

import hashlib
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..overrides import Overrides

if TYPE_CHECKING:
    from ...data_pipelines.answers.conversations import Answer, ChatRequest, Failure
    from ...data_pipelines.answers.regenerate import Answers, RegenerateConfig, RunProgress
    from ...heads.base import DraftHead
    from ...heads.chat.messages import Message
    from ...heads.chat.prompts import ChatTemplate
    from ...heads.target import Target


def regenerate(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML, e.g. configs/data/regenerate_server.yaml.")],
    overrides: Overrides = None,
) -> None:
    """Have the target answer the prompts of a data set itself: what a head learns from should be what it will draft.

    \b
    Example, from a vLLM or SGLang server:
      headstart data regenerate data/regenerate_server.yaml sources=chats.jsonl output=data/mine \\
        target=Qwen/Qwen3-8B servers=[http://localhost:8000/v1] sampling.temperature=0.7
    and without one, in this process:
      headstart data regenerate data/regenerate_local.yaml sources=chats.jsonl output=data/mine target=MODEL

    OUTPUT gets answers.jsonl (rows in input order: messages, finish_reason, truncated, usage) to train on,
    manifest.json (settings, counts), and failed.jsonl where rows could not be answered. The same command again goes on
    where an interrupted run stopped, and asks failed rows again. Exit code 1 where some failed.
    """
    from ...configs.errors import writing_into
    from ...configs.loader import build, read_config
    from ...data_pipelines.answers.regenerate import RegenerateConfig
    from ...data_pipelines.answers.regenerate import regenerate as run

    settings = build(RegenerateConfig, read_config(config, overrides or ()))
    answers, identity = by_servers(settings) if settings.servers else by_engine(settings)
    with writing_into(settings.output), Bar() as bar:
        summary = run(settings, answers, target_identity=identity, show=bar.show)
    counts = summary.counts
    print(
        f"{counts.written} rows in {settings.output}/answers.jsonl, {counts.completion_tokens} tokens answered; "
        f"{counts.truncated} truncated, {counts.failed} failed, {summary.duplicates} duplicates left out"
    )
    if counts.failed:
        print(f"why they failed: {settings.output}/failed.jsonl; the same command asks them again")
        raise typer.Exit(1)


def by_servers(config: "RegenerateConfig") -> tuple["Answers", dict[str, Any]]:
    """Answers of OpenAI-compatible servers; nothing is known of their weights."""
    from ...data_pipelines.answers.asking import by_threads
    from ...data_pipelines.answers.client import OpenAIClient

    client = OpenAIClient(config.servers, model=config.target, config=config.client)
    return partial(by_threads, answer=client, num_threads=client.num_threads), {}


def by_engine(config: "RegenerateConfig") -> tuple["Answers", dict[str, Any]]:
    """Answers of the target in this process, and what identifies it."""
    from ...data_pipelines.answers.asking import in_batches, joining
    from ...data_pipelines.answers.regenerate import AskedSource, source_samplings
    from ...data_pipelines.sources import read_sources
    from ...heads.loading import default_device
    from ...heads.registry import load_head
    from ...heads.target import Target
    from ...heads.targets.dtype import default_dtype

    engine = config.engine
    device = engine.device or default_device()
    dtype = default_dtype(config.target, device) if engine.dtype == "auto" else engine.dtype
    target = Target.load(config.target, dtype=dtype, device=device, revision=engine.revision)
    head = None if engine.head is None else load_head(engine.head, target)
    answer = EngineAnswers(target, head, batch_size=engine.batch_size)
    samplings = source_samplings(read_sources(config.sources, AskedSource), config.sampling)
    if all(sampling.temperature == 0 for sampling in samplings.values()):
        return partial(joining, answers=answer.joining, batch_size=engine.batch_size), identity_of(target)
    return partial(in_batches, answer=answer, batch_size=engine.batch_size), identity_of(target)


def identity_of(target: "Target") -> dict[str, Any]:
    """What a target's answers depend on, as settings of a run: its weights and config, and how chats are written."""
    from ...heads.loading import config_hash
    from ...heads.reasoning import template_hash, tokenizer_hash

    return {
        "target_fingerprint": target.fingerprint,
        "target_config_hash": config_hash(target.config),
        "tokenizer_hash": tokenizer_hash(target.tokenizer),
        "template_hash": template_hash(target.tokenizer),
        "eos_token_ids": sorted(target.eos_token_ids),
    }


class EngineAnswers:
    """A target that answers requests; with a head, which drafts for it.

    Called with a batch, one stream of random numbers serves it, seeded by all its requests: the same batch gets the
    same answers. Greedy answers need no batch of their own: see `joining`.
    """

    def __init__(self, target: "Target", head: "DraftHead | None" = None, *, batch_size: int = 32):
        """Raises BadInput if the target's tokenizer has no chat template."""
        from ...configs.errors import BadInput
        from ...heads.chat.written_ids import tokenizer_fingerprint
        from ...heads.reasoning import think_markers

        self.target, self.head, self.tokenizer, self.batch_size = target, head, target.tokenizer, batch_size
        if not self.tokenizer.chat_template:
            raise BadInput(f"tokenizer of {target.name}: no chat template to ask with")
        self.markers, self.fingerprint = think_markers(self.tokenizer), tokenizer_fingerprint(self.tokenizer)

    def __call__(self, requests: "list[ChatRequest]") -> "list[Answer | Failure]":
        """Answers in the requests' order; a prompt that the template or the context does not take is a Failure."""
        import torch

        from ...data_pipelines.answers.conversations import Failure
        from ...eval.generate import generate
        from ...eval.replay import default_steps

        sampling = requests[0].sampling  # equal within a batch
        prompts = [self.prompt(request) for request in requests]
        fitting = [prompt for prompt in prompts if not isinstance(prompt, Failure)]
        seeds = ",".join(str(request.seed) for request in requests)
        seed = int.from_bytes(hashlib.sha256(seeds.encode()).digest()[:7])
        texts: list[list[int]] = []
        if fitting:
            texts = generate(
                self.target,
                self.head,
                fitting,
                max_new_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                steps=default_steps(self.target.device, num_tokens=sampling.max_tokens),
                generator=torch.Generator(self.target.device).manual_seed(seed),
            ).token_ids
        answered, pairs = iter(texts), zip(prompts, requests, strict=True)
        return [
            prompt if isinstance(prompt, Failure) else self.answer(prompt, next(answered), request)
            for prompt, request in pairs
        ]

    def joining(self, waiting: "deque[tuple[str, ChatRequest]]") -> "Iterator[tuple[str, Answer | Failure]]":
        """Yields greedy answers as they finish; requests have equal sampling, and more may be appended meanwhile."""
        from ...data_pipelines.answers.conversations import Failure
        from ...eval.continuous import Asked, answer_continuously

        asked: deque[Asked] = deque()
        taken: dict[str, tuple[list[int], ChatRequest]] = {}
        limit = waiting[0][1].sampling.max_tokens

        def take() -> "Iterator[tuple[str, Failure]]":
            while waiting:
                key, request = waiting.popleft()
                prompt = self.prompt(request)
                if isinstance(prompt, Failure):
                    yield key, prompt
                else:
                    taken[key] = prompt, request
                    asked.append(Asked(key, prompt))

        yield from take()
        rows, head = self.batch_size, self.head
        for key, tokens in answer_continuously(self.target, asked, batch_size=rows, max_new_tokens=limit, drafter=head):
            prompt, request = taken[key]
            yield key, self.answer(prompt, tokens, request)
            yield from take()  # the next turn of this conversation

    def prompt(self, request: "ChatRequest") -> "list[int] | Failure":
        """Token ids up to where the assistant answers."""
        from ...data_pipelines.answers.conversations import Failure
        from ...heads.chat.rows import UnusableRow

        try:
            ids = self.template(request).prompt(request.messages, "")
        except UnusableRow as error:
            return Failure(error.reason)
        room, wanted, size = self.target.num_positions, request.sampling.max_tokens, self.target.vocab_size
        if len(ids) + wanted > room:
            return Failure(f"{len(ids)} prompt tokens + {wanted} new ones (max_tokens) exceed the context of {room}")
        if max(ids) >= size:
            return Failure(f"the tokenizer gives the id {max(ids)}, outside the target's table of {size}")
        return ids

    def template(self, request: "ChatRequest") -> "ChatTemplate":
        """The chat template with what the request tells it."""
        from ...heads.chat.prompts import ChatTemplate

        return ChatTemplate(self.tokenizer, request.tools, request.told)

    def answer(self, prompt: list[int], tokens: list[int], request: "ChatRequest | None" = None) -> "Answer":
        """The text of an answer and its ids; reasoning stays in the text, where the answer itself opens it.

        Tool calls become structured where the chat template writes them as the target did, see `with_tool_calls`.

        Args: request: None: tool calls stay text.
        """
        from ...data_pipelines.answers.conversations import Answer
        from ...data_pipelines.answers.tool_calls import with_tool_calls
        from ...heads.chat.answers import answer_message, answer_text
        from ...heads.chat.written_ids import AnswerIds

        text = answer_text(tokens, self.tokenizer, self.target.eos_token_ids)
        message = answer_message(text, self.markers)
        has_ended = bool(tokens) and tokens[-1] in self.target.eos_token_ids
        reason = "stop" if has_ended else "length"
        if has_ended and request is not None and "reasoning_content" not in message:
            called = with_tool_calls(text, partial(self.rendered, request))
            message, reason = (message, reason) if called is None else (called, "tool_calls")
        ids = AnswerIds(prompt, tokens, self.fingerprint)
        told = {} if request is None else self.template(request).recorded
        return Answer(message, reason, len(prompt), len(tokens), ids, told)

    def rendered(self, request: "ChatRequest", answer: "list[Message]") -> str:
        """The chat with an answer, as the chat template writes it; without one, up to where it begins."""
        return self.template(request).render_text([*request.messages, *answer], generation_prompt=not answer)


class Bar(Progress):
    """A progress bar on stderr: answered, failed, tokens per second."""

    def __init__(self) -> None:
        super().__init__(
            TextColumn("target answers"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]} failed  {task.fields[speed]:,.0f} tokens/s"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.add_task("", total=None, failed=0, speed=0.0)

    def show(self, run: "RunProgress") -> None:
        [task] = self.tasks
        self.update(
            task.id,
            total=run.num_all,
            completed=run.num_answered,
            failed=run.num_failed,
            speed=run.num_tokens / task.elapsed if task.elapsed else 0.0,
        )
