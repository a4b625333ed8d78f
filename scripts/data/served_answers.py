"""Answers of the target by servers, for `headstart data regenerate` with `engine.name`: those that run, or one that
is started for it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from ...base.terminal import PlainConsole
from ...data_pipelines.answers.as_ids import AsIds
from ...data_pipelines.answers.client import OpenAIClient
from ...data_pipelines.answers.conversations import Exchange
from ...data_pipelines.answers.dispatch import Outcome, by_threads
from ...data_pipelines.answers.ids_client import IdsClient
from ...data_pipelines.answers.regenerate import Answerer, RegenerateConfig, check_prompts
from ...engines.servers.address import Address, first_answer
from ...targets.loading import TargetConfig
from ...targets.weights.served_adapter import lora_of
from ...train.inputs.target import without_layers
from .engine_answers import clip_length, identity_of


def by_messages(config: RegenerateConfig) -> tuple[Answerer, dict[str, Any]]:
    """Answers of any OpenAI-compatible servers; nothing is known of their weights."""
    client = OpenAIClient(addresses(config), model=config.target, config=config.client)
    return partial(by_threads, answer=client, num_threads=client.num_threads), {}


def by_ids(config: RegenerateConfig, running: ExitStack) -> tuple[Answerer, dict[str, Any]]:
    """Answers of the engine's server, and what identifies the target, of which the layers are not loaded.

    Args: running: ends the server. Raises: BadInput, before one is started, on rows, output folder and target.
    """
    check_prompts(config)
    console = PlainConsole(stderr=True)
    source = TargetConfig(path=config.target, revision=config.engine.revision, adapter=config.engine.adapter)
    target = without_layers(source, console, key="engine.name")
    clip_length(config, target)
    adapter = lora_of(target.adapter)

    def answers(conversations: Iterable[Exchange], *, is_done: Callable[[str], bool]) -> Iterator[Outcome]:
        places = addresses(config)
        if not places:  # now, as there is something to ask
            more = ["--revision", config.engine.revision] if config.engine.revision else []
            own = config.engine.process(config.target, arguments=more, adapter=adapter)
            console.print(own.line, soft_wrap=True, markup=False, highlight=False)
            places = [Address(running.enter_context(own).url)]
        name = "" if adapter is None else adapter.name
        model = first_answer(places, lambda place: place.serving(name, target=config.target)).model
        client = IdsClient(places, model=model, config=config.client, as_ids=AsIds(target))
        yield from by_threads(conversations, answer=client, num_threads=client.num_threads, is_done=is_done)

    return answers, identity_of(target)


def addresses(config: RegenerateConfig) -> list[Address]:
    """The running servers. Raises BadInput on another form of URL."""
    return [Address.of(url, where="engine.server") for url in config.engine.servers]
