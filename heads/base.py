"""The contract of a head: what it reads from the target, how it is trained, how it drafts.

Shape legend, used everywhere: B rows, T positions, K draft depth, S chain starts per row, D hidden size, V target
vocabulary, Vd draft vocabulary, L captured layers, N attention heads, H head dimension, Q positions of one forward.

One definition of position and label serves training and decoding. A draft chain starts at position t, where the target
has read x_0..x_t and has itself produced x_{t+1}. The draft at depth k (0-based) predicts x_{t+2+k}. So a round that
follows n committed tokens starts at t = n - 2, and the first round of an answer starts at the last prompt position.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from operator import call
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ..base.errors import BadInput
from ..targets.cpu.packing import pack_linears
from ..targets.layers.target_output import TargetOutput
from ..targets.target import Target
from .drafting.drafter import Drafter
from .drafting.trees import (
    Draws,
    Expands,
    Proposal,
    SampledChain,
    Tree,
    draft_chain,
    draft_dynamic,
)
from .loss.calibration import ConfidenceLine
from .loss.chains import ChainStarts, LossOutput, chain_starts, mean_of
from .loss.chunked import Drafts, chunk_size
from .loss.functions import DraftVocabulary, LossSpec, check_mix, depth_weights_of, reads_all_logits
from .loss.restricted import RestrictedLogits
from .nn.batch import DraftBatch
from .nn.kept import is_kept, recomputed
from .start.closed_form import evenly_spread, first_rows, losses_by_factor, num_fitted, quieter


@dataclass(kw_only=True)
class HeadConfig:
    """The keys of all families; each adds its own."""

    type: str
    feature_layers: list[int] | None = None  # HF `hidden_states` indices that are read; None: the family's default
    num_depths: int = 4  # how many tokens ahead the head is trained to draft
    depth_weights: str = "geometric"  # weight of the loss at depth k, see `depth_weights_of`
    depth_decay: float = 0.8
    loss: dict[str, float] = field(default_factory=lambda: {"soft_ce": 1.0})  # weight of each loss, by name in `LOSSES`
    draft_vocab_size: int | None = None  # draft only this many tokens, the data's most frequent ones; None: all

    def __post_init__(self) -> None:
        self.check_least(1, "num_depths")
        depth_weights_of(self.depth_weights, decay=self.depth_decay, num_depths=self.num_depths)
        check_mix(self.loss, key="loss")

    def check_least(self, least: int, *names: str) -> None:
        """Raises BadInput if one of these values is set and below `least`, which is 0 or 1."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise BadInput(f"{name} {value}: expected {'at least 1' if least else '0 or more'}")

    @property
    def reads_layers(self) -> bool:
        """Whether the head reads weights of the target's layers, or runs them, also where states were extracted."""
        return False

    @property
    def is_fitted(self) -> bool:
        """Whether a fresh head is fitted to the first rows of training, of which it then takes a least number."""
        return False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def layers_on(self, target: Target, usual: Sequence[int]) -> list[int]:
        """The features that are read: those that are set, else the family's usual ones, see `Target.nearest_passed`."""
        return target.nearest_passed(usual) if self.feature_layers is None else self.feature_layers

    def resolved(self, target: Target) -> "HeadConfig":
        """This config with every default that depends on the target filled in, as saved with the head."""
        return self


class DraftHead(nn.Module, Drafter, Expands):
    """A trained drafter. A family subclasses this in one file; examples/own_family.py is one outside the package.

    The target is not a submodule: its parameters are in no optimizer, gradient or checkpoint of the head.
    """

    config_class: ClassVar[type[HeadConfig]] = HeadConfig
    title: ClassVar[str] = ""  # what people call the family; empty: its name in `head.type`
    drafts_trees = True
    estimates = True
    reads_post_norm: bool  # whether it drafts from the target's `post_norm`; losses read that for every head
    reads_context: bool = True  # whether a chain reads the target's states at all positions up to its start
    has_one_output: bool = False  # whether `draft_logits` ignores the depth, so that all depths can be scored at once

    def __init__(self, config: HeadConfig, target: Target, draft_token_ids: Tensor | None = None):
        """draft_token_ids: [Vd] ascending target ids. Raises BadInput if Vd is not config.draft_vocab_size."""
        super().__init__()
        self.config = config
        self.feature_layers = tuple(config.feature_layers or ())
        self.reads_post_norm = not self.feature_layers
        object.__setattr__(self, "target", target)  # not a submodule
        self.target: Target
        self.vocabulary: DraftVocabulary | None = None
        if config.draft_vocab_size is not None:
            if draft_token_ids is None or len(draft_token_ids) != config.draft_vocab_size:
                raise BadInput(f"head.draft_vocab_size {config.draft_vocab_size}: needs as many draft token ids")
            self.vocabulary = DraftVocabulary.of(draft_token_ids.to(target.device), target.vocab_size)

    @property
    def num_depths(self) -> int:
        return self.config.num_depths

    @property
    def is_noisy(self) -> bool:
        """Whether it draws noise in training, with which it drafts otherwise than in decoding."""
        return False

    @property
    def num_drafted(self) -> int:
        """Vd, the number of tokens that it can draft."""
        return self.target.vocab_size if self.vocabulary is None else len(self.vocabulary.to_target)

    @property
    def method(self) -> str:
        """The name that serving engines have for this kind of head; the family's unless it has several kinds."""
        return self.config.type

    def ascending_layers(self) -> list[int]:
        """The feature layers, which serving engines sort. Raises BadInput if there are none or they do not ascend."""
        layers = list(self.feature_layers)
        if not layers or layers != sorted(set(layers)):
            raise BadInput(f"head.feature_layers: {layers}: must ascend without repeats, as engines read")
        return layers

    def serving_config(self) -> dict[str, Any]:
        """The keys of config.json that serving engines read."""
        raise NotImplementedError

    def pack(self) -> None:
        """From now on use the bf16 CPU kernels for the layers that they support, see `pack_linears`."""
        pack_linears(self)

    # training

    @torch.no_grad()
    def begin_training(self, batches: Iterable[DraftBatch], *, fits: bool = True) -> str | None:
        """Initialise a fresh head from the first rows of training: `fit` it, then, if its loss on other rows is above
        that of a uniform guess, scale its logits down (see start/closed_form.py). Returns what `fit` does.

        Args: fits: False: the rows are known to be too few for `fit`."""
        rows, judged = first_rows(batches, num_fitted(self.target.hidden_size))
        self.measure(rows)
        line = self.fit(rows) if fits else None
        losses = []
        with torch.random.fork_rng():  # drafting may draw chains or noise
            torch.manual_seed(0)
            starts = self.training_starts(judged.loss_mask)
            for depth, hidden in enumerate(self.unroll(judged, starts)):
                some = evenly_spread(starts.valid[..., depth])  # [B, S] bool
                probs = self.target_probs(starts.take(judged.output.post_norm, offset=depth + 1)[some])
                drafted = self.loss_spec(depth).draft_logits(hidden[some])
                losses.append(losses_by_factor(drafted.float(), probs))
        parts = [torch.stack(losses)] * len(losses) if self.has_one_output else [loss[None] for loss in losses]
        self.scale_outputs([quieter(part, self.num_drafted) for part in parts])
        return line

    def measure(self, batches: Iterable[DraftBatch]) -> None:
        """Note of the first rows what `matrix_scales` needs; families that need nothing read none."""

    def fit(self, batches: Sequence[DraftBatch]) -> str | None:
        """Set linear maps in closed form, in families that have any. Returns a line for the user if there were too few
        rows for what the config asks for."""

    def scale_outputs(self, factors: Sequence[float]) -> None:
        """Multiply the draft logits of a fresh head by [K] factors, one per depth; all equal with has_one_output."""

    def target_probs(self, post_norm: Tensor) -> Tensor:
        """[n, D] -> [n, Vd] the target's probabilities of the tokens that can be drafted."""
        probs = self.target.logits(post_norm).softmax(-1)
        return probs if self.vocabulary is None else probs[:, self.vocabulary.to_target]

    def learning_rate_scales(self) -> dict[str, float]:
        """Factors on the learning rate, by prefix of the parameters' names; 1 for all others."""
        return {}

    def matrix_scales(self) -> dict[str, Tensor]:
        """By a matrix's name factors, broadcast to it [out, in], that bring its inputs to one size and its outputs to
        one weight in the logits: for Muon, see optim.py."""
        return {}

    def vocabulary_matrices(self) -> list[Tensor]:
        """Those with a row a token, which Muon leaves to AdamW: embeddings, `lm_head` and what a family adds."""
        modules = [m for name, m in self.named_modules() if isinstance(m, nn.Embedding) or name == "lm_head"]
        return [cast(Tensor, module.weight) for module in modules]

    def kept_bytes(self, num_chains: int, *, itemsize: int, num_depths: int) -> int:
        """Roughly the bytes of activations that `unroll` keeps or, by `runner`, computes again; 0: it keeps all."""
        return 0

    def runner(self, starts: ChainStarts, *, like: Tensor, depth: int | None = None) -> Callable[..., Any]:
        """run(function, *args): calls it and keeps its activations for backward, or has backward compute them again, as
        those of these chains up to a depth fit the device. like: an activation. depth: None: the last."""
        num_depths = starts.num_depths if depth is None else depth + 1
        size = self.kept_bytes(starts.positions.numel(), itemsize=like.element_size(), num_depths=num_depths)
        return call if is_kept(size, like.device) else recomputed

    def unroll(self, batch: DraftBatch, starts: ChainStarts) -> Iterator[Tensor]:
        """Teacher-forced drafting: for each depth of `starts`, [B, S, D] what `draft_logits` reads of its chains."""
        raise NotImplementedError

    def draft_logits(self, hidden: Tensor, depth: int) -> Tensor:
        """[..., D] -> [..., Vd] draft logits at a depth."""
        raise NotImplementedError

    def predicted_state(self, hidden: Tensor, depth: int) -> Tensor:
        """[..., D] -> [..., D] the head's estimate of the target's `post_norm`: what its output layer reads."""
        return hidden

    def taught_confidence(self, batch: DraftBatch, starts: ChainStarts) -> Tensor | None:
        """[B, S, K] logits of the confidence head on teacher-forced chains; None: the head has none."""
        return None

    def calibrated(self, tensors: dict[str, Tensor], line: ConfidenceLine) -> dict[str, Tensor]:
        """The tensors to save, so that the confidence head's logits lie on that line."""
        return tensors

    def forward(self, batch: DraftBatch, denominators: Tensor | None = None) -> LossOutput:
        """The loss; named forward so that distributed wrappers see it."""
        return self.loss(batch, denominators)

    def read_target(self, input_ids: Tensor, pictures: Sequence[Sequence[str]] = ()) -> TargetOutput:
        """What this head reads of the target on whole rows [B, T]. Args: pictures: as in `Target.read_texts`."""
        return self.target.read_texts(input_ids, feature_layers=self.feature_layers, pictures=pictures)

    def training_starts(self, loss_mask: Tensor) -> ChainStarts:
        """The chains that a step trains on, of rows with loss_mask [B, T]: all that decoding could run, unless the
        family samples some with torch's global generator. The training loop seeds that generator by (seed, step, rank)
        and takes the step's denominators from the result."""
        return chain_starts(loss_mask, self.num_depths)

    def loss(
        self, batch: DraftBatch, denominators: Tensor | None = None, *, num_depths: int | None = None
    ) -> LossOutput:
        """sum_k w_k * (weighted mean over supervised chains of the loss at depth k), w_k from config.depth_weights.

        Args:
            denominators: [K] `ChainStarts.counts` over all ranks and accumulated batches; None: of this batch.
            num_depths: K, at most max_draft_tokens; None: the number that the head is trained for.
        """
        starts, config = batch.starts or chain_starts(batch.loss_mask, num_depths or self.num_depths), self.config
        depths, counts = range(starts.num_depths), starts.counts(batch.weights)  # [K]
        by_depth = depth_weights_of(config.depth_weights, decay=config.depth_decay, num_depths=len(depths))
        coefficients = mean_of(counts.new_tensor(by_depth), counts if denominators is None else denominators)
        size = self.positions_per_chunk(len(depths))
        plan = starts.plan(batch.input_ids.shape[1], size=size)  # synchronises, so it comes before kernels are queued
        hidden = [states.flatten(0, 1) for states in self.unroll(batch, starts)]  # [B * S, D] each
        torch.clear_autocast_cache()  # frees low-precision copies of weights that are not read again
        drafts = Drafts(
            hidden=hidden,
            specs=[self.loss_spec(depth) for depth in depths],
            coefficients=coefficients,
            teacher_hidden=batch.output.post_norm.detach().flatten(0, 1),
            labels=batch.input_ids.roll(-1, 1).flatten(),
            weights=None if batch.weights is None else batch.weights.roll(-1, 1).flatten(),
            plan=plan,
            parameters=[parameter for parameter in self.parameters() if parameter.requires_grad],
            has_one_output=self.has_one_output,
        )
        labels = torch.stack([starts.take(batch.input_ids, offset=depth + 2) for depth in depths])  # [K, B, S]
        loss = drafts.score()
        guesses = drafts.guesses.unflatten(1, starts.positions.shape)  # [K, B, S]
        hits = (guesses == labels).permute(1, 2, 0) & starts.valid  # [B, S, K]
        return LossOutput(loss, drafts.sums, counts, starts, hits)

    def positions_per_chunk(self, num_depths: int) -> int:
        """How many positions are scored at a time."""
        reads_all = any(reads_all_logits(self.loss_spec(depth).mix) for depth in range(num_depths))
        of_target = self.target.vocab_size if reads_all else self.num_drafted
        num_at_once = num_depths if self.has_one_output else 1
        return chunk_size(of_target + num_at_once * self.num_drafted, self.target.device)

    @cached_property
    def restricted_logits(self) -> RestrictedLogits:
        """The target's logits of the tokens that can be drafted."""
        return RestrictedLogits(self.target, self.vocabulary)

    def loss_spec(self, depth: int) -> LossSpec:
        """The loss at a depth."""
        return LossSpec(
            mix=self.config.loss,
            draft_logits=lambda hidden: self.draft_logits(hidden, depth),
            predicted_state=lambda hidden: self.predicted_state(hidden, depth),
            target_logits=self.target.logits,
            restricted_logits=self.restricted_logits,
            vocabulary=self.vocabulary,
        )

    @torch.no_grad()
    def teacher_forced_logits(self, batch: DraftBatch, *, num_depths: int | None = None) -> tuple[ChainStarts, Tensor]:
        """The chains and their fp32 draft logits [B, S, K, Vd], held all at once; num_depths as in `loss`."""
        starts = chain_starts(batch.loss_mask, num_depths or self.num_depths)
        logits = [self.draft_logits(h, depth).float() for depth, h in enumerate(self.unroll(batch, starts))]
        return starts, torch.stack(logits, 2)

    # drafting: with `begin` and `commit` of `Drafter`, `first_logits` and `expand` of `Expands`

    @torch.no_grad()
    def propose(self, state: Any, *, num_draft_tokens: int) -> Proposal:
        return draft_chain(self, state, num_draft_tokens=num_draft_tokens)

    @torch.no_grad()
    def propose_tree(self, state: Any, tree: Tree, *, draws: Draws | None = None) -> Proposal:
        """Draft a tree, or a chain that is sampled with `draws`. Raises BadInput if it is too deep."""
        if tree.depth > (self.max_draft_tokens or tree.depth):
            raise BadInput(f"a tree of depth {tree.depth}: this head drafts {self.max_draft_tokens} tokens ahead")
        if isinstance(tree, SampledChain):
            return draft_chain(self, state, num_draft_tokens=tree.depth, draws=draws)
        return draft_dynamic(self, state, tree)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self.vocabulary is None else self.vocabulary.to_target[draft_ids]
