"""Greedy decoding once more, one token per forward, in forwards of the very shapes in which a text was verified."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..engine import Engine
from ..generate import Generation, Round, Stop, right_padded
from .lossless import Unproved


@torch.no_grad()
def first_unproved(
    engine: Engine, prompts: list[list[int]], run: Generation, *, max_new_tokens: int, stop: Stop
) -> Unproved:
    """Of each row the first token that this decoding does not choose, by its index in the text; None: it writes the
    speculative text itself.

    Sums are rounded by the order in which they are taken, and that depends on the shape of a forward: so a text may
    differ from the baseline's, whose forwards read one token, though nothing is wrong. Here both sides have equal
    shapes. The prompts are read as before; then every forward has the batch, width, positions, cache slots, extent and
    (of a tree) mask of the round in which its token was verified, and gives one token, the argmax at the place where
    the verification had it. What no forward has given yet is filler. So each token is chosen behind its own prefix, by
    a forward that has read neither drafts nor anything that follows, and keys and values are those of these forwards:
    no accept rule, no drafter and nothing of the speculative cache takes part. If each choice is the text's token,
    then by induction greedy decoding in forwards of these shapes writes this text: that is the proof. If not, it does
    not, and rounding by shape is no excuse. Not equal are the contents of rejected drafts: they matter where a row's
    arithmetic depends on other rows' contents, as the size of an expert's batch does in a mixture of experts.

    Args:
        engine: greedy, of the settings of the run, with the same drafter, of which only its shapes are used.
        run: what speculation wrote; its rounds say where each verification began, and what it accepted.
    """
    texts = run.token_ids
    found: Unproved = [None if is_whole(new, max_new_tokens, stop) else len(new) for new in texts]
    tokens, num_valid = right_padded(prompts, engine.target.device)
    _, first = engine.prefill(tokens, num_valid)
    emitted = list(run.rounds[0].num_emitted)
    confirm(found, texts, [0] * len(texts), [[token] for token in first[:, 0].tolist()])
    whole = [[*prompt, *new] for prompt, new in zip(prompts, texts, strict=True)]
    for done in run.rounds[1:]:
        starts = [len(prompt) + num - 1 for prompt, num in zip(prompts, emitted, strict=True)]  # last token, not read
        engine.begin_round(max(starts) + 1)
        confirm(found, texts, emitted, chosen_in_round(engine, whole, starts, done))
        emitted = [before + num for before, num in zip(emitted, done.num_emitted, strict=True)]
    return found


def is_whole(new: Sequence[int], max_new_tokens: int, stop: Stop) -> bool:
    """Whether a text ends where greedy decoding ends it: at its first end token or stop string, or at full length."""
    end = stop.first([], new)
    return end == len(new) or (end is None and len(new) == max_new_tokens)


def confirm(found: Unproved, texts: Sequence[Sequence[int]], starts: Sequence[int], chosen: list[list[int]]) -> None:
    """Note in `found` the first token from `starts` on that was not chosen, unless an earlier one is known."""
    for row, (new, start, tokens) in enumerate(zip(texts, starts, chosen, strict=True)):
        pairs = enumerate(zip(new[start : start + len(tokens)], tokens, strict=True), start)
        wrong = next((index for index, (token, own) in pairs if token != own), None)
        known = found[row]
        if wrong is not None and (known is None or wrong < known):
            found[row] = wrong


def chosen_in_round(engine: Engine, whole: list[list[int]], starts: list[int], done: Round) -> list[list[int]]:
    """The target's choices for the tokens that a round emitted, each by a forward of its own.

    Args: whole: prompts and texts. starts: the position of each row's last token before the round.
    """
    device, depth = engine.target.device, max(done.num_emitted)
    start = torch.tensor(starts, device=device)
    last = torch.tensor([[row[at]] for row, at in zip(whole, starts, strict=True)], device=device)  # [B, 1]
    nodes = last.repeat(1, engine.widths.of(done.num_offered))  # filler
    parents = None if engine.tree is None else torch.full_like(nodes, -1)
    paths = done.paths if engine.tree is not None else [list(range(num)) for num in done.num_accepted]
    chosen: list[list[int]] = [[] for _ in whole]
    for step in range(depth):
        active = [row for row, num in enumerate(done.num_emitted) if step < num]
        for row in active if step else []:
            node = paths[row][step - 1]
            nodes[row, node] = whole[row][starts[row] + step]
            if parents is not None:
                parents[row, node] = -1 if step == 1 else paths[row][step - 2]
        choices = engine.choose_behind(last, nodes, parents, start).tolist()  # [B, S + 1]
        for row in active:
            chosen[row].append(choices[row][paths[row][step - 1] + 1 if step else 0])
    if parents is not None:
        keep_paths(engine, paths, start)
    return chosen


def keep_paths(engine: Engine, paths: list[list[int]], start: Tensor) -> None:
    """Move the accepted nodes of trees up behind the last committed tokens, as verification does."""
    padded = [path + [0] * (engine.depth - len(path)) for path in paths]  # what lies behind a path is read by no query
    behind = start[:, None] + 1  # [B, 1] slot of node 0
    engine.cache.move(behind + torch.tensor(padded, device=start.device), behind + engine.offsets[: engine.depth])
