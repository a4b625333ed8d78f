"""The tensors of a head, each said once: its names and its shape.

A family lists its `Part`s. What a folder must hold, and how writers and readers rename, follows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Part:
    """A tensor that a head has."""

    name: str  # in safetensors
    shape: str  # its sizes by name, such as "inner hidden"; see `shapes_of`
    other: str = ""  # its name in vLLM, where that is another one
    when: str = ""  # what the head must have for it; empty: every head has the tensor


PROJECTIONS = (
    ("self_attn.q_proj", "wide read"),
    ("self_attn.k_proj", "narrow read"),
    ("self_attn.v_proj", "narrow read"),
    ("self_attn.o_proj", "hidden wide"),
    ("mlp.gate_proj", "inner hidden"),
    ("mlp.up_proj", "inner hidden"),
    ("mlp.down_proj", "hidden inner"),
)
INPUT_NORM, OUTPUT_NORM = ("input_layernorm", "hidden"), ("post_attention_layernorm", "hidden")
NORM, LM_HEAD = Part("norm.weight", "hidden"), Part("lm_head.weight", "drafted hidden")
MAPS = (Part("d2t", "drafted", when="cut"), Part("t2d", "vocab", when="cut"))  # of a cut draft vocabulary


def llama_layer(place: str, *norms: tuple[str, str], read: str = "hidden") -> list[Part]:
    """The tensors of a Llama layer without biases.

    Args: place: what its names start with. norms: as `PROJECTIONS`. read: the size that its attention reads.
    """
    return [Part(f"{place}.{name}.weight", shape.replace("read", read)) for name, shape in (*PROJECTIONS, *norms)]


def shapes_of(
    parts: Iterable[Part], sizes: Mapping[str, int], having: Mapping[str, object], *, other: bool = False
) -> Shapes:
    """The shapes, [rows, columns], of the parts that a head has.

    Args: sizes: the numbers behind the names in `Part.shape`. having: which conditions of `Part.when` hold. other:
        give the parts that have another name, by that.
    """
    named = ((part.other if other else part.name, part) for part in parts if not part.when or having.get(part.when))
    return {
        name: tuple(int(size) if size.isdigit() else sizes[size] for size in part.shape.split())
        for name, part in named
        if name
    }
