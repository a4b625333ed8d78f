"""The frozen target model: hidden states of chosen layers, embedding, output logits, caches."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ..base.errors import BadInput
from .caches.cache import SlotCache, placed
from .check import check_target, has_values
from .cpu.build import instruction_set, multiplies_bf16
from .cpu.decoder import CpuDecoder, most_kernel_tokens
from .cpu.joined_decoder import JoinedDecoder
from .cpu.packing import pack_linears
from .cpu.products import wide_products
from .frozen_model import FrozenModel
from .images.image_rows import read_image_row
from .layers.documents import Documents
from .layers.own_masks import MaskOf
from .layers.target_output import TargetOutput
from .loading import Checkpoint, TargetConfig, found_path, load_model, read_model_config, restore_other_modalities
from .weights.served_adapter import AdapterInfo, ServedAdapter, ServedWeights, is_checkpoint

MOST_DECODED = 256  # positions whose logits the decoder computes


class Target(FrozenModel):
    """What heads read of a frozen causal language model: states of its layers, embeddings, logits.

    Layer indices are those of HF `hidden_states`: i in 0..num_layers-1 is the residual stream that enters layer i.
    Index num_layers is refused: Hugging Face puts the post-norm state there and vLLM the pre-norm one, so the
    post-norm state has its own name, `post_norm`.
    """

    is_sharded = False  # over processes, which must all call `forward` equally often
    prompt_chunk = 2048  # prompt tokens per forward, since a mask over a whole prompt is quadratic in its length
    is_adapted = False  # whether it computes with a head's own adapters, see adapters.TargetAdapter
    num_packed = 0  # linear layers, and experts, that our kernels multiply inside the model's own code
    _best: Tensor | None = None  # [B, T] of the last forward, if the decoder computed it there
    _decoder: CpuDecoder | JoinedDecoder | None = None  # made on first use, if the layers are of a known kind
    _has_decoder: bool | None = None  # not determined yet

    @classmethod
    def of(
        cls,
        model: Any,
        *,
        name: str,
        fingerprint: str,
        source: TargetConfig | None = None,
        adapter: ServedWeights | None = None,
    ) -> Self:
        """The target of a model in memory, checked against the model's own code. Arguments as in `FrozenModel`.

        Raises: BadInput if the model's outputs cannot be reproduced from its parts.
        """
        target = cls(model, name=name, fingerprint=fingerprint, source=source, adapter=adapter)
        if target.is_spread or has_values(target.output_layer.weight):  # which may be offloaded
            target._has_decoder = False  # the check is of the model's own layers
            with wide_products():
                check_target(target)
            target._has_decoder = None
        return target

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: str = "auto",
        device: str | torch.device | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        device_map: str | dict[str, str | int] | None = None,
        adapter: str | Path | None = None,
    ) -> Self:
        """Load a target from a local folder, GGUF file or hub id, perhaps with an adapter; arguments as in
        `TargetConfig`. A folder with a checkpoint of the target takes an adapter's place: heads know it as the target.

        Raises: BadInput as `load_model`, `ServedAdapter` and `of`, and if the checkpoint is of another model."""
        config = TargetConfig(
            path=found_path(path),
            dtype=dtype,
            device_map=device_map,
            adapter=None if adapter is None else str(adapter),
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        if adapter is not None and is_checkpoint(adapter):
            return cls._at_checkpoint(config, found_path(adapter), device)
        served = None if adapter is None else ServedAdapter.read(adapter)
        model, fingerprint = load_model(config, device=device)
        if served is not None:
            served.check_base(config.path, fingerprint, num_layers=model.config.get_text_config().num_hidden_layers)
            served.merge(model)
        return cls.of(model, name=config.path, fingerprint=fingerprint, source=config, adapter=served)

    @classmethod
    def _at_checkpoint(cls, config: TargetConfig, folder: str, device: str | torch.device | None) -> Self:
        """The target with the weights of a checkpoint, in the dtype that it has without."""
        before = read_model_config(config)
        stored = before.get_text_config().dtype if config.dtype == "auto" else None
        dtype = str(stored).removeprefix("torch.") if stored else config.dtype
        model, own = load_model(replace(config, path=folder, dtype=dtype, revision=None), device=device)
        check_same_sizes(folder, model.config.get_text_config(), before.get_text_config())
        served = ServedWeights(AdapterInfo(path=folder, fingerprint=own, base=config.path))
        fingerprint = Checkpoint.of(config, before).fingerprint()
        return cls.of(model, name=config.path, fingerprint=fingerprint, source=config, adapter=served)

    @property
    def decoder(self) -> CpuDecoder | JoinedDecoder | None:
        """A faster implementation of the layers for decoding: kernels for bf16 on a CPU, joined weights on a GPU. None
        if the layers are of an unknown kind, adapted, or on several devices."""
        if self.is_adapted or torch.compiler.is_compiling():
            return None
        if self._has_decoder is None:  # determined once, as it inspects every layer
            self._has_decoder = False  # for the forwards that do so
            self._decoder = self._found_decoder()
            self._has_decoder = self._decoder is not None
        return self._decoder

    @property
    def kernels(self) -> str | None:
        """The instruction set of our kernels that decode it on a CPU, and what they compute; None: torch alone does."""
        if isinstance(self.decoder, CpuDecoder):
            return f"{instruction_set()}, all layers"
        return f"{instruction_set()}, products only" if self.num_packed else None

    def _found_decoder(self) -> CpuDecoder | JoinedDecoder | None:
        """The decoder that knows the layers. Where none does, our kernels compute their products on a CPU all the
        same."""
        if self.may_use(CpuDecoder) and (decoder := CpuDecoder.of(self)) is not None:
            return decoder
        if self.final_norm is not None and self.may_use(JoinedDecoder):
            weight = self.output_layer.weight
            return JoinedDecoder(self.base, self.layers, self.final_norm, self.config, weight)
        self.num_packed = pack_linears(self.model, most_tokens=most_kernel_tokens())
        return None

    def may_use(self, kind: type[CpuDecoder] | type[JoinedDecoder]) -> bool:
        """Whether such a decoder reproduces the layers."""
        is_other = self.is_spread or self.final_norm is None
        is_limited = self.chunk is not None or self.has_states or bool(self.own_masks)
        if is_other or is_limited or (self._window is not None and kind is not CpuDecoder):
            return False
        return kind.takes(self.layers, self.config, self.output_layer.weight)

    def forward(
        self,
        input_ids: Tensor,
        *,
        feature_layers: tuple[int, ...] = (),
        cache: SlotCache | None = None,
        positions: Tensor | None = None,
        extent: int = 0,
        seen: Tensor | None = None,
        is_newest: bool = False,
        is_round: bool = False,
        chooses: bool = False,
        documents: Documents | None = None,
    ) -> TargetOutput:
        """Run the layers over tokens and return the states that heads read. Never computes logits.

        The weights are frozen: gradients are recorded only if a head trains adapters on the target, see adapters.py.

        Args:
            input_ids: [B, T]; without a cache, rows start at position 0 and may be right-padded with any token.
            feature_layers: HF `hidden_states` indices below num_layers.
            cache, positions [B, T], extent: as in `SlotCache.seek`, for decoding.
            seen: [B, T, T - 1] bool, for a drafted tree: the first token is the last committed one, the others are
                nodes, written in order to the slots after it; True at the nodes that each token attends to.
            is_newest: a single token in slot extent - 1: it sees the whole cache, so no mask is needed.
            is_round: whether many forwards of this shape will follow, so that compiling pays; False for prompts.
            chooses: whether `best` of all positions will be needed.
            documents: without a cache, for rows of several texts, or of drafts behind one.
        """
        if not self._entering.chosen.issuperset(feature_layers):
            self.check_layers(feature_layers)
            self._entering.choose(set(feature_layers))
        if cache is None:
            # right padding needs no mask: a causal model's earlier positions never see it
            post_norm = self._read_rows(input_ids, documents)
        else:
            assert positions is not None
            slots = positions
            if seen is not None:
                slots = positions[:, :1] + torch.arange(positions.shape[1], device=positions.device)
            is_exact = is_newest and positions.device.type == "cpu" and not self._needs_mask  # shapes may vary there
            cache.seek(slots, extent=extent, is_exact=is_exact)
            has_places = seen is not None and bool(self.own_masks)
            post_norm = self.read_slots(
                input_ids,
                positions,
                cache,
                None if is_exact else partial(cache.mask, positions, dtype=self.dtype, seen=seen),
                is_chain=seen is None and cache.shift is None,
                places=cache.places(positions[:, 0], positions[:, 1:]) if has_places else None,
                is_round=is_round,
                chooses=chooses,
            )
        return self._output(post_norm.to(input_ids.device), feature_layers, self._best if chooses else None)

    def load_vision(self) -> None:
        """Load the parts that read images, if they are not there yet."""
        if not self.has_vision:
            whole, _ = load_model(self.source, device="cpu", is_whole=True)
            restore_other_modalities(self.model, whole, self.device)
            self.has_vision = True

    def forward_with_pictures(
        self,
        input_ids: Tensor,
        pictures: Sequence[str],
        *,
        feature_layers: tuple[int, ...] = (),
        cache: SlotCache | None = None,
    ) -> TargetOutput:
        """`forward` of one row [1, T] whose image tokens are of these pictures, in order.

        Args: cache: of one row, which is filled from its start. Raises: BadInput if the target reads no pictures.
        """
        self._entering.choose(set(feature_layers))
        post_norm, shift = read_image_row(self, input_ids, pictures, cache)
        return replace(self._output(post_norm, feature_layers), shift=shift)

    def _output(self, post_norm: Tensor, feature_layers: tuple[int, ...], best: Tensor | None = None) -> TargetOutput:
        """The states of the last forward. Only for a target on several devices something is copied."""
        chosen = [self._entering.states[i].to(post_norm.device) for i in feature_layers]
        features = torch.stack(chosen, 2) if chosen else post_norm.new_empty(*post_norm.shape[:2], 0, self.hidden_size)
        return TargetOutput(features, post_norm, best)

    def read_texts(
        self, input_ids: Tensor, *, feature_layers: tuple[int, ...] = (), pictures: Sequence[Sequence[str]] = ()
    ) -> TargetOutput:
        """`forward` of [B, T] without a cache; text by text with the decoder where that is faster: bf16 on a CPU.

        Args: pictures: of each row; empty: none has any. Rows with some are read one by one.
        """
        if any(pictures):
            rows = zip(input_ids.split(1), pictures, strict=True)
            alone = [
                self.forward_with_pictures(row, shown, feature_layers=feature_layers)
                if shown
                else self.read_texts(row, feature_layers=feature_layers)
                for row, shown in rows
            ]
            return TargetOutput.padded(alone, input_ids.shape[1])
        decoder, length = self.decoder, input_ids.shape[1]
        if not isinstance(decoder, CpuDecoder) or length > decoder.most_tokens:
            return self.forward(input_ids, feature_layers=feature_layers)
        cache, where = self.new_cache(length), {"positions": torch.arange(length)[None], "extent": length}
        texts = input_ids.split(1)
        parts = [self.forward(text, feature_layers=feature_layers, cache=cache, **where) for text in texts]
        return TargetOutput(*(torch.cat([getattr(part, name) for part in parts]) for name in ("features", "post_norm")))

    def read_slots(
        self,
        input_ids: Tensor,
        positions: Tensor,
        cache: SlotCache,
        mask: MaskOf | None,
        *,
        is_chain: bool = False,
        places: Tensor | None = None,
        is_round: bool = False,
        chooses: bool = False,
    ) -> Tensor:
        """Read tokens [B, T] into the slots that `cache.seek` set; returns the post-norm states [B, T, D].

        Args:
            positions: [B, T]. mask: None: the tokens see the whole cache. is_round, chooses: as in `forward`.
            is_chain: whether the mask is causal: each token sees the slots up to its own. places: of a tree, as
                `SlotCache.places` gives them.
        """
        positions = placed(positions, cache.shift)
        if cache.extent > self.num_positions:  # drafts there are never accepted, but embeddings need an index
            positions = positions.clamp(max=self.num_positions - 1)
        if (decoder := self.decoder) is not None and input_ids.numel() <= decoder.most_tokens:
            mask = None if is_chain and decoder.knows_chains else mask
            tokens, seen = self.input_embedding(input_ids), None if mask is None else mask()
            if isinstance(decoder, CpuDecoder):
                output = decoder.read(tokens, positions, cache, seen, wanted=self._entering.chosen, chooses=chooses)
            else:
                output = decoder.read(tokens, positions, cache, seen, wanted=self._entering.chosen, is_round=is_round)
            post_norm, self._entering.states, self._best = output
            return post_norm
        self._best = None
        # a model with a cache of its own kind would refuse ours, which its layers read all the same
        given = {self._cache_argument: cache, "position_ids": positions, "use_cache": self.own_cache is None}
        read = partial(self.base, input_ids=input_ids, **given)
        if mask is None or not self.own_masks:
            return read(attention_mask=None if mask is None else self.by_attention_type(mask)).last_hidden_state
        cache.num_before = cache.extent - input_ids.shape[1]
        with self.own_masks.replaced(mask, places):
            return read().last_hidden_state

    def embed(self, input_ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, D], the target's own (frozen) input embedding."""
        return self.input_embedding(input_ids).to(input_ids.device)

    def logits(self, post_norm: Tensor) -> Tensor:
        """[..., D] -> [..., V] fp32 logits, as the model itself computes them."""
        return self._computed_logits(post_norm).float()

    def best(self, post_norm: Tensor, num_tokens: int | None = None) -> Tensor:
        """[..., D] -> [...] the argmax of `logits`, or of those of the first tokens; the lowest id if several tie."""
        decoder = self._decoder_for(post_norm)
        if isinstance(decoder, CpuDecoder) and decoder.chooses:
            return decoder.best(post_norm.to(self.dtype), num_tokens or self.vocab_size)
        return self._computed_logits(post_norm)[..., :num_tokens].argmax(-1)

    def _decoder_for(self, post_norm: Tensor) -> CpuDecoder | JoinedDecoder | None:
        """The decoder, if it should compute the logits of these positions: few, or by the only products in bf16 of this
        CPU; and without gradients."""
        is_few = post_norm.dim() == 3 and post_norm.shape[0] * post_norm.shape[1] <= MOST_DECODED
        is_faster = is_few or (isinstance(self._decoder, CpuDecoder) and not multiplies_bf16())
        return self._decoder if is_faster and not (torch.is_grad_enabled() or torch.compiler.is_compiling()) else None

    def _computed_logits(self, post_norm: Tensor) -> Tensor:
        """[..., V] `logits` before the cast to fp32."""
        decoder = self._decoder_for(post_norm)
        if decoder is None:
            logits = self.output_values(post_norm).to(post_norm.device)
        else:
            logits = decoder.logits(post_norm.to(self.dtype))
        return self.as_logits(logits)

    def _read_rows(self, input_ids: Tensor, documents: Documents | None) -> Tensor:
        """[B, T] -> [B, T, D] post-norm states, without a cache."""
        read = partial(self.base, input_ids=input_ids, use_cache=False)
        if documents is None:
            return read().last_hidden_state
        mask, given = self._kept_apart(documents), {"position_ids": documents.positions}
        if self.own_masks:  # a model that biases slots takes positions, if any, for a mask of its own
            with self.own_masks.replaced(mask, documents.positions):
                return read(**({} if self.own_masks.is_biased else given)).last_hidden_state
        return read(attention_mask=self.by_attention_type(mask), **given).last_hidden_state

    def _kept_apart(self, documents: Documents) -> MaskOf:
        """The mask that keeps several texts in a row from seeing each other.

        Raises: BadInput if the target has layers that a mask cannot separate."""
        apart = {"full_attention", "sliding_attention"}
        kinds = set(self.layer_types) - apart or ({"a recurrent layer"} if self.has_states else set())
        kinds = kinds or (set() if self.packs else {"its attention"})
        if kinds:
            why = "reads a row as one text, so it cannot learn to draft in parallel: set head.parallel=false"
            raise BadInput(f"target {self.name}: {', '.join(sorted(kinds))} {why}")
        return partial(documents.mask, dtype=self.dtype)


def check_same_sizes(folder: str | Path, found: Any, wanted: Any) -> None:
    """Raises BadInput if the config of a checkpoint is that of another model than the target."""
    for key in ("model_type", "num_hidden_layers", "hidden_size", "vocab_size"):
        if getattr(found, key, None) != getattr(wanted, key, None):
            sizes = f"{key} {getattr(found, key, None)}, the target has {getattr(wanted, key, None)}"
            raise BadInput(f"checkpoint {Path(folder, 'config.json')}: {sizes}")
