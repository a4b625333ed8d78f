"""Parts of a Llama layer, and the Llama config of a head's layers."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from ...base.errors import BadInput, first_line
from ...targets.cpu.products import rms_normalised
from ...targets.layers.rotary import rotate

# keys of a Llama config in which a head's layers may differ from the target's
ARCHITECTURE = tuple(
    "intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps rope_parameters".split()
)
# keys of it that serving engines read
SERVED = "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps".split()
SERVED += "max_position_embeddings hidden_act rope_parameters bos_token_id eos_token_id".split()


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in fp32 (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, *, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if (out := rms_normalised(x, self.weight, self.eps)) is not None:
            return out
        if x.device.type != "cpu" and x.dtype == self.weight.dtype:  # one kernel, which widens by itself
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        weight = self.weight.float()
        if x.device.type == "cpu" and torch.is_grad_enabled():
            out = cast(Tensor, Normalise.apply(x.float(), weight, self.eps))
            return out.to(x.dtype)
        return F.rms_norm(x.float(), x.shape[-1:], weight, self.eps).to(x.dtype)


class Normalise(torch.autograd.Function):
    """x / rms(x) * weight in fp32 for training on a CPU, where torch has no fused kernel and autograd would need twice
    the passes over x and keep intermediate results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, inverse = ctx.saved_tensors
        size = x.shape[-1]
        flat_grad, flat, inverse = grad.reshape(-1, size), x.reshape(-1, size), inverse.view(-1, 1)
        for_x, for_weight = None, None
        with torch.autocast("cpu", enabled=False):  # the loss computes gradients inside its autocast context
            product = flat_grad * flat  # [n, D]
            if ctx.needs_input_grad[1]:
                for_weight = (inverse.T @ product)[0]
            if ctx.needs_input_grad[0]:
                along = (product @ weight)[:, None] * inverse.pow(3) / size  # [n, 1] the part of the gradient along x
                for_x = torch.mul(flat_grad, weight, out=product).mul_(inverse).addcmul_(flat, along, value=-1)
        return None if for_x is None else for_x.view_as(x), for_weight, None


class Attention(nn.Module):
    """The projections of grouped-query attention; the caller computes the attention itself."""

    def __init__(self, config: LlamaConfig, *, in_size: int | None = None, has_head_norms: bool = False):
        """Args: in_size: input channels of queries, keys and values; None: the hidden size. has_head_norms: normalise
        each head's queries and keys, as in Qwen3."""
        super().__init__()
        sizes: Any = config  # transformers leaves some of them optional
        self.num_heads, self.num_kv_heads = sizes.num_attention_heads, sizes.num_key_value_heads
        self.head_dim: int = sizes.head_dim
        in_size = config.hidden_size if in_size is None else in_size
        self.q_proj = nn.Linear(in_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(in_size, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(in_size, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, sizes.hidden_size, bias=False)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        if has_head_norms:
            self.q_norm, self.k_norm = (RMSNorm(self.head_dim, eps=sizes.rms_norm_eps) for _ in range(2))

    def queries(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """[B, Q, in] -> [B, N, Q, H]."""
        return rotate(self.q_norm(self._split(self.q_proj(x), self.num_heads)), rotary)

    def keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[B, Q, in] -> two of [B, Nkv, Q, H]."""
        keys = rotate(self.k_norm(self._split(self.k_proj(x), self.num_kv_heads)), rotary)
        return keys, self._split(self.v_proj(x), self.num_kv_heads)

    def _split(self, x: Tensor, num: int) -> Tensor:
        return x.view(*x.shape[:2], num, self.head_dim).transpose(1, 2)  # [B, num, Q, H]


# names that families have for the same thing
MLP_SIZES = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
CONTEXTS = ("max_position_embeddings", "model_max_length", "max_seq_len", "seq_length")
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon")
LLAMA_ROPES = ("default", "linear", "yarn", "llama3")  # that are the same for texts of all lengths
HEAD_DIM = 64  # channels
PARTIAL = "partial_rotary_factor"


def llama_config(target_config: Any, architecture: dict[str, Any] | None = None) -> LlamaConfig:
    """A one-layer Llama config with the target's sizes, norm epsilon, context and rotary parameters.

    If the target has rotary parameters for each attention type, those of full attention are used; keys that engines
    would misread on a plain layer (mrope, partial rotation) are left out. If it has no attention, heads of HEAD_DIM
    channels fill its hidden size.

    Args: architecture: overrides, with keys of ARCHITECTURE.
    Raises: BadInput on another key, on values that transformers refuses, and on rotations by which a position would
        not turn the same in training, decoding and an engine.
    """
    unknown = sorted(set(architecture or {}) - set(ARCHITECTURE))
    if unknown:
        raise BadInput(f"head.architecture.{unknown[0]}: expected keys of {', '.join(ARCHITECTURE)}")
    given: dict[str, Any] = target_config.to_dict()  # sizes that differ by layer cannot be read from the config itself
    size, heads = target_config.hidden_size, getattr(target_config, "num_attention_heads", None)
    head_dim = given.get("head_dim")
    if not heads:
        head_dim = min(HEAD_DIM, size)  # the one given, if any, is of a state space
        heads = size // head_dim
    ours = LlamaConfig(
        hidden_size=size,
        intermediate_size=first_of(given, MLP_SIZES) or active_width(given) or 4 * size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=given.get("num_key_value_heads") or heads,
        head_dim=head_dim or size // heads,
        vocab_size=target_config.vocab_size,
        max_position_embeddings=first_of(given, CONTEXTS) or 2048,
        rms_norm_eps=first_of(given, EPSILONS) or 1e-6,
        rope_parameters=plain_rope(given.get("rope_parameters")),
        tie_word_embeddings=False,
        bos_token_id=getattr(target_config, "bos_token_id", None),
        eos_token_id=getattr(target_config, "eos_token_id", None),
    )
    if not architecture:
        return ours
    check_rope(architecture.get("rope_parameters") or {}, where="head.architecture.rope_parameters")
    try:
        return LlamaConfig(**(ours.to_dict() | architecture))
    except Exception as error:  # transformers validates configs with exceptions of several kinds
        raise BadInput(f"head.architecture: {first_line(error)}") from error


def first_of(given: dict[str, Any], names: tuple[str, ...]) -> Any:
    """The first of these keys' values that a config has."""
    return next((given[name] for name in names if given.get(name)), None)


def active_width(given: dict[str, Any]) -> int:
    """Channels of the experts that a token passes in a mixture of experts, shared ones included; 0 if unknown."""
    num_experts, shared = given.get("num_experts_per_tok") or 1, given.get("shared_expert_intermediate_size") or 0
    return num_experts * (given.get("moe_intermediate_size") or 0) + shared


def plain_rope(given: dict[str, Any] | None) -> dict[str, Any]:
    """Rotary parameters for a Llama layer, from a target's: for all its layers, or by kind of layer.

    Frequencies that depend on the length of a text (dynamic, longrope) are left out: engines choose them by other
    rules, and a head that is trained on short texts would draft long ones by frequencies that it has never seen.
    """
    rope = given or {"rope_type": "default", "rope_theta": 10000.0}
    by_kind = [one for one in rope.values() if isinstance(one, dict)]
    rope = dict(rope.get("full_attention") or (by_kind[0] if by_kind else rope))
    if rope.get("rope_type") not in LLAMA_ROPES:  # as Gemma 4's proportional ones too
        rope = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}
    return {key: value for key, value in rope.items() if key not in ("mrope_section", "mrope_interleaved", PARTIAL)}


def check_rope(rope: dict[str, Any], *, where: str) -> None:
    """Raises BadInput on rotary parameters that are not for a plain layer: those that `plain_rope` leaves out."""
    kind, share = rope.get("rope_type", "default"), rope.get(PARTIAL)
    if kind not in LLAMA_ROPES:
        why = "a head's own layers rotate a position alike in texts of all lengths, by"
        raise BadInput(f"{where}: rope_type {kind}: {why} {', '.join(LLAMA_ROPES)}")
    if share not in (None, 1):
        raise BadInput(f"{where}: {PARTIAL} {share}: a head's own layers rotate all channels")


def serving_keys(config: LlamaConfig, *, num_layers: int) -> dict[str, Any]:
    """The keys of a draft's config.json that describe its Llama layers."""
    llama = config.to_dict()
    rope = llama["rope_parameters"]
    return {
        **{key: llama[key] for key in SERVED},
        **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings"), False),
        "num_hidden_layers": num_layers,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
    }


def window_keys(window: int | None, *, num_layers: int) -> dict[str, Any]:
    """The keys of a draft's config.json by which all its layers have a sliding window, if any, of so many tokens."""
    if window is None:
        return {}
    kinds = {"layer_types": ["sliding_attention"] * num_layers, "max_window_layers": 0}
    return {"sliding_window": window, "use_sliding_window": True, **kinds}
