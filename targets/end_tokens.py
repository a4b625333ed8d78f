"""Which tokens end an answer: all that generation config, model config, tokenizer or chat template say end one."""

from collections.abc import Mapping
from typing import Any

from jinja2.exceptions import TemplateError

MARK = "\U000f0000"  # a private-use character, which no template has in it


def said_ends(generation_eos: Any, config_eos: Any, tokenizer: Any) -> dict[str, frozenset[int]]:
    """The end tokens by who says so; those that say nothing are left out. The target's end tokens are the union.

    Args: generation_eos, config_eos: `eos_token_id` of generation_config.json and config.json: a token, a list, or
        None. tokenizer: None: there is none.
    """
    said = {"generation_config.json": as_ids(generation_eos), "config.json": as_ids(config_eos)}
    if tokenizer is not None:
        said["the tokenizer"] = as_ids(tokenizer.eos_token_id)
        closing = closing_run(tokenizer)
        known = frozenset[int]().union(*said.values()) & set(closing)
        said["the chat template"] = known or frozenset(closing[-1:])  # of several tokens, the last one ends the turn
    return {source: ids for source, ids in said.items() if ids}


def as_ids(eos: Any) -> frozenset[int]:
    """A config's `eos_token_id` as a set."""
    return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)


def closing_run(tokenizer: Any) -> list[int]:
    """The special or added tokens that the chat template writes directly after the last assistant's text; none if there
    is no template or it closes the turn with plain text."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    chat = [{"role": "user", "content": "0"}, {"role": "assistant", "content": MARK}]
    try:
        rendered = str(tokenizer.apply_chat_template(chat, tokenize=False))
    except (TemplateError, TypeError, ValueError):
        return []
    behind = rendered.rpartition(MARK)[2].strip() if MARK in rendered else ""
    ids = list(tokenizer(behind, add_special_tokens=False)["input_ids"]) if behind else []
    added = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder} - {tokenizer.bos_token_id}
    return ids[: next((i for i, token in enumerate(ids) if token not in added), len(ids))]


def contradiction(said: Mapping[str, frozenset[int]], name: str) -> str | None:
    """One line with both values where generation_config.json, or without it config.json, lacks an end token that others
    name: engines that read that file alone run on. None: they agree."""
    if not said:
        return None
    first, declared = next(iter(said.items()))
    others = [f"{source} {sorted(ids)}" for source, ids in said.items() if not ids <= declared]
    if not others:
        return None
    return (
        f"target {name}: {first} ends answers with {sorted(declared)}, but {', '.join(others)}: all of these end them "
        "here; an engine that reads only that file runs on"
    )
