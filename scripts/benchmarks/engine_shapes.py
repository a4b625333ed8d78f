"""What the engine's benchmark runs: targets of given shapes with random weights, and how much is measured on each."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ...heads.target import Target

CONTEXT_ROOM = 2048  # positions behind the longest context


@dataclass(frozen=True)
class Shape:
    """A Llama target's sizes, and the work.

    contexts: tokens before the timed rounds; the first is the usual one. batch_sizes: at the usual context.
    long_batch_sizes: at the others. verified: tokens per forward. num_passes: over each timed cell. num_prompts: of the
    usual context, each continued by num_new tokens, where speedups are measured; num_repeats: passes over those.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    dtype: str
    contexts: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    long_batch_sizes: tuple[int, ...]
    verified: tuple[int, ...]
    num_passes: int
    num_new: int
    num_prompts: int
    num_repeats: int

    @property
    def context(self) -> int:
        """The usual one."""
        return self.contexts[0]


LARGE: dict[str, Any] = {
    "vocab_size": 128256,
    "dtype": "bfloat16",
    "contexts": (512, 2048, 4096, 8192, 16384),
    "batch_sizes": (1, 2, 4, 8, 16, 32, 64),
    "long_batch_sizes": (1, 8),
    "verified": (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64),
    "num_passes": 4,
    "num_new": 128,
    "num_prompts": 4,
    "num_repeats": 2,
}
SHAPES = {
    "toy": Shape(
        32, 64, 4, 4, 2, vocab_size=128, dtype="float32", contexts=(16, 48), batch_sizes=(1, 3),
        long_batch_sizes=(1, 2), verified=(1, 2, 64), num_passes=2, num_new=24, num_prompts=2, num_repeats=1,
    ),
    "1b": Shape(2048, 8192, 16, 32, 8, **LARGE),
    "8b": Shape(4096, 14336, 32, 32, 8, **LARGE),
}  # fmt: skip
LOUDNESS = 5000.0  # of a token's embedding, over what it is initialised to


def random_target(shape: Shape, device: torch.device) -> Target:
    """A Llama of that shape with random weights, made on the device, whose greedy text counts: x, x + 1, x + 2, ...

    Each token's embedding outweighs what all layers add to it, and the output layer looks for the one before. So the
    choice of a token is never close, and rounding, which differs with the number of tokens in a forward, changes no
    text. Between plain random weights it soon would, and drafts that are to be right would be wrong from there on.
    """
    sizes = {key: value for key, value in asdict(shape).items() if key in LlamaConfig().to_dict() and key != "dtype"}
    config = LlamaConfig(
        **sizes,
        head_dim=shape.hidden_size // shape.num_attention_heads,
        max_position_embeddings=max(shape.contexts) + CONTEXT_ROOM,
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    kept = torch.get_default_dtype()
    with torch.device(device), torch.no_grad():
        torch.set_default_dtype(getattr(torch, shape.dtype))
        try:
            model: Any = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(kept)
        model.lm_head.weight.copy_(model.model.embed_tokens.weight.roll(1, 0))
        model.model.embed_tokens.weight.mul_(LOUDNESS)
    model.generation_config.eos_token_id = None
    return Target(model, name=f"random Llama, hidden {shape.hidden_size}", fingerprint="random")


def random_prompts(shape: Shape, *, count: int, length: int) -> list[list[int]]:
    """Prompts of tokens drawn alike."""
    source = torch.Generator().manual_seed(1)
    return torch.randint(0, shape.vocab_size, (count, length), generator=source).tolist()
