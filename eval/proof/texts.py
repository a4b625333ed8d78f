"""Proofs that texts which differ from the baseline's are the target's own: against the model, and by a replay.

A choice is the argmax or, at temperature > 0, what the noise of that row and position chooses; see `sampling`.

Against the model: in a whole forward of its own code (`own_forward`), every token of the text must be its choice, or as
good as its choice but for rounding. No fault of the engine that makes a text wrong passes this, whatever baseline and
speculation share: masks, positions, caches, states.

By a replay: decoded once more without drafts, in forwards of the shapes in which the text was verified, it is the same.
That is asked too because the first proof is blind where rounding decides. In bf16 that is often: of SmolLM2-135M's
tokens one in five has a second choice that is as good, and an accept rule that takes those would go unnoticed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...targets.images.pictures import pictures_of
from ..decoding.engine import Engine
from ..decoding.loop import Generation, Round, right_padded
from ..decoding.sampling import noise_keys
from ..decoding.stopping import Stop
from .lossless import Unproved
from .own_forward import first_not_own
from .own_sampling import NoiseOfText


def first_unproved(
    engine: Engine,
    prompts: list[list[int]],
    run: Generation,
    baseline: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop: Stop,
) -> Unproved:
    """For each row, the index of the first token of the text without both proofs; None: the text is the target's own.

    Args: as for `first_not_replayed`. engine: its generator is where it was before the run. baseline: the texts without
        drafts; an empty one is not asked to be the model's.
    """
    replayed = first_not_replayed(engine, prompts, run, max_new_tokens=max_new_tokens, stop=stop)  # sets the seed
    own = [
        None
        if new == plain
        else first_not_own(engine.target, prompt, new, baseline=plain, noise=noise_of(engine, prompts, row, len(new)))
        for row, (prompt, new, plain) in enumerate(zip(prompts, run.token_ids, baseline, strict=True))
    ]
    pairs = zip(own, replayed, strict=True)
    return [min((index for index in pair if index is not None), default=None) for pair in pairs]


def noise_of(engine: Engine, prompts: list[list[int]], row: int, num_new: int) -> NoiseOfText | None:
    """What sampled a row's new tokens; None: they are greedy."""
    if engine.sampling.temperature == 0:
        return None
    starts = torch.tensor([len(prompt) for prompt in prompts], device=engine.target.device)
    positions = starts[:, None] + torch.arange(num_new, device=starts.device)
    return NoiseOfText(engine.sampling, noise_keys(engine.seed, positions)[row])


@torch.no_grad()
def first_not_replayed(
    engine: Engine, prompts: list[list[int]], run: Generation, *, max_new_tokens: int, stop: Stop
) -> Unproved:
    """For each row, the index of the first token of the text that this decoding does not choose; None: it writes the
    speculative text exactly.

    Floating-point sums depend on the order of summation, and thus on the shape of a forward: a correct text may differ
    from the baseline's, whose forwards read one token. So here the shapes are made equal. The prompts are read as
    before. Then every forward has the batch, width, positions, cache slots, extent and (for a tree) mask of the round
    in which its token was verified, and yields one token, the choice at the place where the verification had it; tokens
    that no forward has yielded yet are replaced by filler. So each token is chosen from its own prefix, by a forward
    that has read neither drafts nor later tokens, and keys and values come from these forwards: no accept rule, drafter
    or speculative cache is involved. If every choice is the text's token, then by induction decoding in forwards of
    these shapes writes this text, which is the proof. If not, rounding does not explain the difference. The contents
    of rejected drafts are not reproduced; they matter only if a row's arithmetic depends on the contents of other rows,
    as the batch of an expert does in a mixture of experts.

    Args:
        engine: with the settings of the run and the same drafter, of which only the shapes are used.
        run: the speculative texts; its rounds tell where each verification started and what it accepted.
    """
    texts = run.token_ids
    unproved: Unproved = [None if is_whole(new, max_new_tokens, stop) else len(new) for new in texts]
    tokens, num_valid = right_padded(prompts, engine.target.device)
    _, first = engine.prefill(tokens, num_valid, pictures=[pictures_of(prompt) for prompt in prompts])
    emitted = list(run.rounds[0].num_emitted)
    confirm(unproved, texts, [0] * len(texts), [[token] for token in first[:, 0].tolist()])
    whole = [[*prompt, *new] for prompt, new in zip(prompts, texts, strict=True)]
    for round_ in run.rounds[1:]:
        starts = [len(prompt) + num - 1 for prompt, num in zip(prompts, emitted, strict=True)]  # last token, not read
        engine.begin_round(max(starts) + 1)
        confirm(unproved, texts, emitted, chosen_in_round(engine, whole, starts, round_))
        emitted = [before + num for before, num in zip(emitted, round_.num_emitted, strict=True)]
    return unproved


def is_whole(new: Sequence[int], max_new_tokens: int, stop: Stop) -> bool:
    """Whether a text ends where decoding ends it: at its first end token or stop string, or at full length."""
    end = stop.first([], new)
    return end == len(new) or (end is None and len(new) == max_new_tokens)


def confirm(unproved: Unproved, texts: Sequence[Sequence[int]], starts: Sequence[int], chosen: list[list[int]]) -> None:
    """Record in `unproved` the first token from `starts` on that was not chosen, unless an earlier one is known."""
    for row, (new, start, tokens) in enumerate(zip(texts, starts, chosen, strict=True)):
        pairs = enumerate(zip(new[start : start + len(tokens)], tokens, strict=True), start)
        wrong = next((index for index, (token, own) in pairs if token != own), None)
        known = unproved[row]
        if wrong is not None and (known is None or wrong < known):
            unproved[row] = wrong


def chosen_in_round(engine: Engine, whole: list[list[int]], starts: list[int], round_: Round) -> list[list[int]]:
    """The target's choices for the tokens that a round emitted, each from a separate forward.

    Args: whole: prompts and texts. starts: the position of each row's last token before the round.
    """
    device, depth = engine.target.device, max(round_.num_emitted)
    start = torch.tensor(starts, device=device)
    last = torch.tensor([[row[at]] for row, at in zip(whole, starts, strict=True)], device=device)  # [B, 1]
    nodes = last.repeat(1, engine.widths.of(round_.num_offered))  # filler
    parents = None if engine.is_chain else torch.full_like(nodes, -1)
    paths = [list(range(num)) for num in round_.num_accepted] if engine.is_chain else round_.paths
    chosen: list[list[int]] = [[] for _ in whole]
    for step in range(depth):
        active = [row for row, num in enumerate(round_.num_emitted) if step < num]
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
    """Move the accepted nodes of trees right after the last committed tokens, as verification does."""
    padded = [path + [0] * (engine.depth - len(path)) for path in paths]  # no query sees slots beyond a path
    behind = start[:, None] + 1  # [B, 1] slot of node 0
    engine.cache.move(behind + torch.tensor(padded, device=start.device), behind + engine.offsets[: engine.depth])
