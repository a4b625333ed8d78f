"""The check of a `Target` at load: its parts, read by our forward, give what the model's own code gives.

What differs ends in one line before anything is trained or measured: states and logits of whole texts make the target
unusable, those of texts behind a cache make it one that can be trained on but not decoded. The text of the check is
longer than every window, chunk and choice of keys of the model; then only layers of each kind are run.
"""

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers.modeling_outputs import MoeModelOutputWithPast

from ..base.errors import BadInput, first_line
from .caches.state_cache import StateCache
from .cpu.products import wide_products
from .layers.documents import Documents
from .layers.output_use import check_logits, is_close
from .layers.target_output import TargetOutput
from .layers.temperature import scaled_from
from .loading import use_attention
from .prefill import read_prompts

SHORT = 12  # tokens of the check if nothing in the model depends on the length
BEHIND = 4  # tokens that are read behind the others, as a round
LENGTHS = ("index_topk", "attention_chunk_size", "local_attention")  # config keys of such lengths, beside windows
BLOCKS = ("index_topk_blocks", "index_block_size")  # whose product is such a length


def has_values(weight: Tensor) -> bool:
    """Whether there is something to compare; not of shapes without weights."""
    return weight.device.type != "meta" and not isinstance(weight, FakeTensor)


@torch.no_grad()
def check_target(target: Any) -> None:
    """Compare a target with its model; sets what was found: `logit_scale`, `logit_cap`, `caps_wide`,
    `packs`, `undecodable`, `decodes_trees`, `continues_prompts`, `state_bytes`. Raises BadInput if states or logits of
    whole texts differ, or change with what follows."""
    ids = check_text(target)
    is_long = ids.shape[1] > 4 * SHORT
    with only_layers_of_each_kind(target, is_long=is_long), scaled_from(target, BEHIND):
        theirs = own_forward(target, ids, num_logits=SHORT if is_long else 0)
        check_whole_text(target, ids, theirs)
        states = theirs.hidden_states[-1]  # [1, T, D]
        target.packs = target.packs and packs(target, ids, states)
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
    """Set `logit_scale` and `caps_wide` of a target without its layers: the model's own code behind them runs on random
    states, which the final norm has scaled. Raises BadInput, or what that code raises."""
    ids = check_text(target)[:, : 4 * SHORT]
    states = torch.randn(*ids.shape, target.hidden_size, generator=torch.Generator().manual_seed(0))
    states = states.to(target.device, target.dtype)
    states = states if target.final_norm is None else target.final_norm(states)  # [1, T, D]
    given = MoeModelOutputWithPast(last_hidden_state=states, hidden_states=(states,))  # has the fields of other kinds
    target.base.forward = lambda *args, **kwargs: given
    try:
        theirs = own_forward(target, ids, num_logits=0)
    finally:
        del target.base.forward  # the class has the usual one
    check_logits(target, states, theirs.logits.float())


def own_forward(target: Any, ids: Tensor, *, num_logits: int) -> Any:
    """What the model's own code gives for a text [1, T], hidden states included. Raises BadInput if it fails.

    Args: num_logits: of the last positions, if the model can leave out the others; 0: all.
    """
    takes_part = "logits_to_keep" in inspect.signature(target.model.forward).parameters
    # by their places: of a slice of positions torch copies the whole weight, seconds for a large vocabulary on a CPU
    places = torch.arange(ids.shape[1], device=ids.device)[-num_logits:]
    part = {"logits_to_keep": places} if takes_part and num_logits else {}
    try:
        with own_attention(target):
            output = target.model(input_ids=ids, output_hidden_states=True, use_cache=False, **part)
    except Exception as error:  # the code of an unknown model may raise anything
        what = f"{type(target.model).__name__} cannot read a text of tokens alone ({first_line(error)})"
        raise BadInput(f"target {target.name}: {what}") from error
    # some pass on wider states than their weights are: they are as exact as these
    output.hidden_states = tuple(state.to(target.dtype) for state in output.hidden_states)
    return output


def check_text(target: Any) -> Tensor:
    """[1, T] tokens: more than any length on which the model's states may depend, within its context."""
    most = target.num_positions
    num = min(max([0, *(length for length in lengths(target.config).values() if length < most)]) + SHORT, most)
    numbers = torch.arange(num, device=target.device)
    return ((7 * numbers * numbers + 3 * numbers + 11) % target.vocab_size)[None]


def lengths(config: Any) -> dict[str, int]:
    """The numbers of tokens in the config of a text model beyond which attention changes, by their keys."""
    given: dict[str, Any] = config.to_dict()
    found = {key: given[key] for key in given if key in LENGTHS or ("window" in key and "layers" not in key)}
    found[" * ".join(BLOCKS)] = math.prod(getattr(config, key, None) or 0 for key in BLOCKS)
    return {key: value for key, value in found.items() if type(value) is int and value}


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
    kinds = target.layer_types or [""]
    num = max(kinds.index(kind) for kind in kinds) + 1
    if not is_long or num >= target.num_layers:
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
    check_finite(target, theirs.hidden_states[-1])
    layers = target.passed_layers[:2]
    ours = target.forward(ids, feature_layers=layers)
    check_causal(target, ids, ours.post_norm)
    if layers and ours.features.shape[3:] != (target.hidden_size,):
        shape = tuple(ours.features.shape[3:])
        raise BadInput(f"{where}: its layers pass on states of shape {shape}, not ({target.hidden_size},)")
    own = theirs.hidden_states  # those that enter each layer, and last that behind the norm
    entering = ours.features.unbind(2)
    is_later = len(layers) > 1 and not is_alike(own[0], entering[0]) and is_alike(own[0], entering[1])
    first = int(is_later)  # Mamba's and RWKV's states are those that leave each layer
    pairs = {
        f"the state that enters layer {layers[i]}": (own[i - first], ours.features[:, :, i])
        for i in range(first, len(layers))
    }
    pairs["the state behind its final norm"] = own[-1], ours.post_norm
    for name, (wanted, got) in pairs.items():
        if not is_alike(wanted, got):
            raise BadInput(f"{where}: {name} is computed in an unknown way")
    check_logits(target, ours.post_norm[:, -SHORT:], theirs.logits[:, -SHORT:].float())


def check_finite(target: Any, states: Tensor) -> None:
    """Raises BadInput if the model's states [1, T, D] are not finite, naming the weight that is to blame, if one is."""
    if not bool(states.isfinite().all()):
        weights = [(name, weight) for name, weight in target.model.named_parameters() if has_values(weight)]
        broken = next((name for name, weight in weights if not bool(weight.isfinite().all())), None)
        why = f"its weight {broken} has" if broken else f"computed in {str(target.dtype)[6:]} its states have"
        raise BadInput(f"target {target.name}: {why} values that are not finite")


def check_causal(target: Any, ids: Tensor, states: Tensor) -> None:
    """Raises BadInput if our states [1, T, D] on a text [1, T] are not those of its beginning alone, so that no head
    can learn from them to draft what follows."""
    num = ids.shape[1] - BEHIND
    if not is_close(states[:, :num], target.forward(ids[:, :num]).post_norm):
        what = f"{type(target.model).__name__}: the states of a text change with what follows it"
        raise BadInput(f"target {target.name}: {what}, so no head can learn from them")


def is_alike(wanted: Tensor, got: Tensor) -> bool:
    return wanted.shape == got.shape and is_close(wanted, got)


def packs(target: Any, ids: Tensor, states: Tensor) -> bool:
    """Whether a text [1, T] has the model's states [1, T, D] in a row behind another text too."""
    both = torch.cat([ids[:, :BEHIND], ids], 1)
    index = torch.arange(both.shape[1], device=ids.device)[None]
    is_second = (index >= BEHIND).long()
    documents = Documents(is_second, index - BEHIND * is_second)
    try:
        return is_close(states, target.forward(both, documents=documents).post_norm[:, BEHIND:])
    except Exception:  # of layers that no mask keeps apart, and the code of an unknown model may raise anything
        return False


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
    own, ends = states[0], prompts[:, None] - 1  # [T, D], [2, 1]
    pairs = {"a prompt": (own[ends], output.post_norm[rows, ends])}
    round_, half = prompts[:, None] + torch.arange(BEHIND, device=ids.device), BEHIND // 2  # [2, Q]
    wrong = (torch.arange(BEHIND, device=ids.device) >= half).long()  # drafts that are not the text
    tokens = (ids[0][round_] + wrong) % target.vocab_size
    output = target.forward(tokens, cache=cache, positions=round_, extent=num)
    pairs["a round"] = own[round_[:, :half]], output.post_norm[:, :half]
    behind = round_[:, half:]
    output = target.forward(ids[0][behind], cache=cache, positions=behind, extent=num)
    pairs["a round behind rejected drafts"] = own[behind], output.post_norm
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
