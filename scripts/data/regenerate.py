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
        from ...heads.reasoning import think_markers, think_tokens

        self.target, self.head, self.tokenizer, self.batch_size = target, head, target.tokenizer, batch_size
        if not self.tokenizer.chat_template:
            raise BadInput(f"tokenizer of {target.name}: no chat template to ask with")
        self.markers = think_markers(self.tokenizer)
        kept = set(think_tokens(self.tokenizer) or ())
        self.left_out = (set(self.tokenizer.all_special_ids) | target.eos_token_ids) - kept

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
        answered = iter(texts)
        return [prompt if isinstance(prompt, Failure) else self.answer(prompt, next(answered)) for prompt in prompts]

    def joining(self, waiting: "deque[tuple[str, ChatRequest]]") -> "Iterator[tuple[str, Answer | Failure]]":
        """Yields greedy answers as they finish; requests have equal sampling, and more may be appended meanwhile."""
        from ...data_pipelines.answers.conversations import Failure
        from ...eval.continuous import Asked, answer_continuously

        asked: deque[Asked] = deque()
        prompts: dict[str, list[int]] = {}
        limit = waiting[0][1].sampling.max_tokens

        def take() -> "Iterator[tuple[str, Failure]]":
            while waiting:
                key, request = waiting.popleft()
                prompt = self.prompt(request)
                if isinstance(prompt, Failure):
                    yield key, prompt
                else:
                    prompts[key] = prompt
                    asked.append(Asked(key, prompt))

        yield from take()
        rows, head = self.batch_size, self.head
        for key, tokens in answer_continuously(self.target, asked, batch_size=rows, max_new_tokens=limit, drafter=head):
            yield key, self.answer(prompts[key], tokens)
            yield from take()  # the next turn of this conversation

    def prompt(self, request: "ChatRequest") -> "list[int] | Failure":
        """Token ids up to where the assistant answers."""
        from jinja2.exceptions import TemplateError

        from ...configs.errors import first_line
        from ...data_pipelines.answers.conversations import Failure

        thinking = request.sampling.thinking
        variables = {} if thinking is None else {"enable_thinking": thinking}
        try:
            encoded = self.tokenizer.apply_chat_template(
                request.messages, tools=request.tools, add_generation_prompt=True, return_dict=True, **variables
            )
            ids = list(encoded["input_ids"])
        except (TemplateError, TypeError, ValueError) as error:
            return Failure(f"the chat template refuses the messages: {first_line(error)}")
        room, wanted = self.target.num_positions, request.sampling.max_tokens
        if len(ids) + wanted > room:
            return Failure(f"{len(ids)} prompt tokens + {wanted} new ones (max_tokens) exceed the context of {room}")
        return ids

    def answer(self, prompt: list[int], tokens: list[int]) -> "Answer":
        """The text of an answer; its reasoning stays in it, where the answer itself opens it."""
        from ...data_pipelines.answers.conversations import Answer

        text = self.text(tokens)
        message = {"role": "assistant", "content": text}
        if self.markers and self.markers[1] in text and self.markers[0] not in text:  # opened by the prompt
            trace, _, content = text.partition(self.markers[1])
            message |= {"content": content.lstrip("\n"), "reasoning_content": trace.strip("\n")}
        has_ended = bool(tokens) and tokens[-1] in self.target.eos_token_ids
        return Answer(message, "stop" if has_ended else "length", len(prompt), len(tokens))

    def text(self, tokens: list[int]) -> str:
        """As servers give it: without special tokens, but with those that open and close a trace."""
        kept = [token for token in tokens if token not in self.left_out]
        return self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)


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
