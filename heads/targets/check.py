"""The check of a `Target` at load: its parts, read by our forward, give what the model's own code gives.

What differs ends in one line before anything is trained or measured: states and logits of whole texts make the target
unusable, those of texts behind a cache make it one that can be trained on but not decoded. The text of the check is
longer than every window, chunk and choice of keys of the model; then only layers of each kind are run.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers.modeling_outputs import MoeModelOutputWithPast

from ...configs.errors import BadInput, first_line
from ..decoders.cpu.products import wide_products
from ..decoders.state_cache import StateCache
from ..loading import use_attention
from ..nn.target_output import TargetOutput
from .output_use import check_logits, found_before_output, is_close, last_input
from .prompts import read_prompts

SHORT = 12  # tokens of the check if nothing in the model depends on the length
BEHIND = 4  # tokens that are read behind the others, as a round
LENGTHS = ("index_topk", "sliding_window", "attention_chunk_size", "window_size")  # config keys of such lengths


def has_values(weight: Tensor) -> bool:
    """Whether there is something to compare; not of shapes without weights."""
    return weight.device.type != "meta" and not isinstance(weight, FakeTensor)


@torch.no_grad()
def check_target(target: Any) -> None:
    """Compare a target with its model; sets what was found: `before_output`, `logit_scale`, `caps_wide`,
    `undecodable`, `decodes_trees`, `continues_prompts`, `state_bytes`. Raises BadInput if states or logits of whole
    texts differ."""
    for ids in check_texts(target):
        check_on_text(target, ids)


def check_on_text(target: Any, ids: Tensor) -> None:
    """`check_target` on a text [1, T]."""
    is_long = ids.shape[1] > 4 * SHORT
    with only_layers_of_each_kind(target, is_long=is_long):
        with last_input(target.output_layer) as read:
            theirs = own_forward(target, ids, num_logits=SHORT if is_long else 0)
        target.before_output = found_before_output(target, theirs.hidden_states[-1], read)
        check_whole_text(target, ids, theirs)
        states = theirs.hidden_states[-1]  # [1, T, D]
        if target.undecodable is None:
            differs = difference_behind_cache(target, ids, states)
            if differs is not None and target.has_states:
                target.continues_prompts = False
                differs = difference_behind_cache(target, ids, states)
            target.undecodable = differs
        if target.undecodable is None and target.decodes_trees:
            target.decodes_trees = reads_tree(target, ids, states)


@torch.no_grad()
def find_output_use(target: Any) -> None:
    """Set `before_output`, `logit_scale` and `caps_wide` of a target without its layers: the model's own code behind
    them runs on random states, which the final norm has scaled. Raises BadInput, or what that code raises."""
    ids = check_texts(target)[0][:, : 4 * SHORT]
    states = torch.randn(*ids.shape, target.hidden_size, generator=torch.Generator().manual_seed(0))
    states = states.to(target.device, target.dtype)
    states = states if target.final_norm is None else target.final_norm(states)  # [1, T, D]
    given = MoeModelOutputWithPast(last_hidden_state=states, hidden_states=(states,))  # has the fields of other kinds
    target.base.forward = lambda *args, **kwargs: given
    try:
        with last_input(target.output_layer) as read:
            theirs = own_forward(target, ids, num_logits=0)
    finally:
        del target.base.forward  # the class has the usual one
    target.before_output = found_before_output(target, states, read)
    check_logits(target, states, theirs.logits.float())


def own_forward(target: Any, ids: Tensor, *, num_logits: int) -> Any:
    """What the model's own code gives for a text [1, T], hidden states included. Raises BadInput if it fails.

    Args: num_logits: of the last positions, if the model can leave out the others; 0: all.
    """
    takes_part = "logits_to_keep" in inspect.signature(target.model.forward).parameters
    part = {"logits_to_keep": num_logits} if takes_part else {}
    try:
        with own_attention(target):
            output = target.model(input_ids=ids, output_hidden_states=True, use_cache=False, **part)
    except Exception as error:  # the code of an unknown model may raise anything
        what = f"{type(target.model).__name__} cannot read a text of tokens alone ({first_line(error)})"
        raise BadInput(f"target {target.name}: {what}") from error
    # some pass on wider states than their weights are: they are as exact as these
    output.hidden_states = tuple(state.to(target.dtype) for state in output.hidden_states)
    return output


def check_texts(target: Any) -> list[Tensor]:
    """[1, T] tokens each: more than any length on which the model's states may depend; two texts, a short and a long
    one, where rotary frequencies change with the length."""
    config, change = target.config.to_dict(), target.max_positions
    given = [config[key] for key in LENGTHS if isinstance(config.get(key), int)]

    def above(*least: int, most: int) -> int:
        return min(max([*least, *(length for length in given if length < most)]) + SHORT, most)

    sizes = [above(0, most=change)]
    if change < target.num_positions and target.row_rotary is not None:
        sizes.append(above(change, most=target.num_positions))
    numbers = [torch.arange(num, device=target.device) for num in sizes]
    return [((7 * one * one + 3 * one + 11) % target.vocab_size)[None] for one in numbers]


@contextmanager
def own_attention(target: Any) -> Iterator[None]:
    """The model's own implementation of attention instead of ours, and torch's products."""
    ours: str = target.config._attn_implementation
    if ours != target.own_attention:
        use_attention(target.model, target.own_attention)
    try:
        with wide_products():
            yield
    finally:
        if ours != target.own_attention:
            use_attention(target.model, ours)


@contextmanager
def only_layers_of_each_kind(target: Any, *, is_long: bool) -> Iterator[None]:
    """For a long text: run only the first layers, up to the last kind of layer that occurs."""
    kinds = target.layer_types or target.own_masks.windows
    num = max(kinds.index(kind) for kind in kinds) + 1
    if not is_long or num >= target.num_layers or target.is_repeated:
        yield
        return
    name = next(name for name, part in target.base.named_children() if part is target.layers)
    setattr(target.base, name, nn.ModuleList(target.layers[: max(num, 2)]))
    try:
        yield
    finally:
        setattr(target.base, name, target.layers)


def check_whole_text(target: Any, ids: Tensor, theirs: Any) -> None:
    """Compare features, post-norm states and logits of a whole text. Raises BadInput, naming what differs."""
    where = f"target {target.name}: {type(target.model).__name__}"
    layers = tuple(range(target.num_layers if target.is_repeated else min(2, target.num_layers)))
    ours = target.forward(ids, feature_layers=layers)
    if layers and ours.features.shape[3:] != (target.hidden_size,):
        shape = tuple(ours.features.shape[3:])
        raise BadInput(f"{where}: its layers pass on states of shape {shape}, not ({target.hidden_size},)")
    own = theirs.hidden_states  # those that enter each layer, and last that behind the norm
    entering = [ours.features[:, :, i] for i in layers[:2]]
    is_later = len(layers) > 1 and not is_alike(own[0], entering[0]) and is_alike(own[0], entering[1])
    first = int(is_later)  # Mamba's and RWKV's states are those that leave each layer
    pairs = {f"the state that enters layer {i}": (own[i - first], ours.features[:, :, i]) for i in layers[first:]}
    pairs["the state behind its final norm"] = own[-1], ours.post_norm
    for name, (wanted, got) in pairs.items():
        if not is_alike(wanted, got):
            raise BadInput(f"{where}: {name} is computed in an unknown way")
    check_logits(target, ours.post_norm[:, -SHORT:], theirs.logits[:, -SHORT:].float())


def is_alike(wanted: Tensor, got: Tensor) -> bool:
    return wanted.shape == got.shape and is_close(wanted, got)


def difference_behind_cache(target: Any, ids: Tensor, states: Tensor) -> str | None:
    """Why the target cannot be decoded, if the model's `states` [1, T, D] on the text are not ours behind a cache."""
    try:
        for name, (wanted, got) in read_behind_cache(target, ids, states).items():
            if not is_close(wanted, got):
                return f"{name} has another state than in the model's own forward"
    except BadInput:
        raise
    except Exception as error:  # the code of an unknown model may raise anything
        return f"its layers cannot read behind this project's cache ({first_line(error)})"
    return None


def read_behind_cache(target: Any, ids: Tensor, states: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """By what was read: the model's states and ours.

    Two rows of unequal length are read as prompts, in chunks, then as a round with wrong drafts in its second half,
    and as another that takes these back; and one row with a newest token that sees the whole cache.
    """
    num, room = ids.shape[1], ids.shape[1] + BEHIND + 1
    lengths = torch.tensor([num, num - SHORT // 4], device=ids.device)
    prompts, rows = lengths - BEHIND, torch.arange(2, device=ids.device)[:, None]
    cache = target.new_cache(room, num_rows=2, width=BEHIND)
    with in_chunks(target, num - BEHIND):
        output = read_prompts(target, ids[:, : num - BEHIND].expand(2, -1), prompts, cache)
    pairs = {"a prompt": (pick(states, prompts[:, None] - 1), output.post_norm[rows, prompts[:, None] - 1])}
    round_, half = prompts[:, None] + torch.arange(BEHIND, device=ids.device), BEHIND // 2  # [2, Q]
    wrong = (torch.arange(BEHIND, device=ids.device) >= half).long()  # drafts that are not the text
    tokens = (ids[0][round_] + wrong) % target.vocab_size
    output = target.forward(tokens, cache=cache, positions=round_, extent=num)
    pairs["a round"] = pick(states, round_[:, :half]), output.post_norm[:, :half]
    behind = round_[:, half:]
    output = target.forward(ids[0][behind], cache=cache, positions=behind, extent=num)
    pairs["a round behind rejected drafts"] = pick(states, behind), output.post_norm
    alone, last = target.new_cache(room), torch.tensor([[num - 1]], device=ids.device)
    read_prompts(target, ids[:, :-1], lengths[:1] - 1, alone)
    output = target.forward(ids[:, -1:], cache=alone, positions=last, extent=num, is_newest=True)
    target.state_bytes = alone.state_bytes if isinstance(alone, StateCache) else 0
    return {**pairs, "the newest token": (states[:, -1:], output.post_norm)}


@contextmanager
def in_chunks(target: Any, num_tokens: int) -> Iterator[None]:
    target.prompt_chunk = num_tokens // 3 + 1
    try:
        yield
    finally:
        del target.prompt_chunk  # the class has the usual one


def pick(states: Tensor, positions: Tensor) -> Tensor:
    """[B, Q, D] the states [1, T, D] at positions [B, Q]."""
    return states[0][positions]


def reads_tree(target: Any, ids: Tensor, states: Tensor) -> bool:
    """Whether a small tree behind a cache has the model's states: the root, two children, and one behind the first."""
    root = ids.shape[1] - 3
    cache = target.new_cache(ids.shape[1] + BEHIND + 1)
    read_prompts(target, ids[:, :root], torch.tensor([root], device=ids.device), cache)
    other = (ids[:, root + 1] + 1) % target.vocab_size
    tokens = torch.stack([ids[:, root], ids[:, root + 1], other, ids[:, root + 2]], 1)  # [1, 4]
    positions = torch.tensor([[root, root + 1, root + 1, root + 2]], device=ids.device)
    seen = torch.tensor([[[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 0, 1]]], device=ids.device).bool()
    try:
        read: TargetOutput = target.forward(tokens, cache=cache, positions=positions, extent=root + 5, seen=seen)
    except Exception:  # as above
        return False
    return is_close(states[:, root:], read.post_norm[:, [0, 1, 3]])
