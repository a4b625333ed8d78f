"""The structs that the kernels share with Python: fields in the order of kernels.cpp, which says what they hold."""

import ctypes

from torch import Tensor

from .layer_weights import LayerWeights

ADDRESS, NUMBER = ctypes.c_void_p, ctypes.c_int64


def address_of(tensor: Tensor | None) -> int | None:
    """Where a tensor's values lie; None: null."""
    return None if tensor is None else tensor.data_ptr()


def of_type(kind: type, names: str) -> list[tuple[str, type]]:
    """Fields of one type in a row."""
    return [(name, kind) for name in names.split()]


class Layer(ctypes.Structure):
    """Where the weights of a layer lie, and what else sets it apart."""

    _fields_ = [
        *((name, ADDRESS) for name in (*LayerWeights._fields, "kept")),
        *of_type(NUMBER, "window rope mlp num_experts num_chosen"),
        ("scale", ctypes.c_float),
    ]


class Norm(ctypes.Structure):
    """How a norm computes."""

    _fields_ = [("eps", ctypes.c_float), *of_type(ctypes.c_bool, "centred adds_one rounds")]


class Ring(ctypes.Structure):
    """Where a cache keeps positions."""

    _fields_ = of_type(NUMBER, "sink size window")


class Forward(ctypes.Structure):
    """One forward over B rows of Q tokens each."""

    _fields_ = [
        *of_type(NUMBER, "hidden num_heads num_kv_heads head_dim read_size"),
        *of_type(NUMBER, "num_rows num_queries extent"),
        *of_type(NUMBER, "layer_stride value_stride row_stride head_stride num_threads"),
        ("cache", ADDRESS),
        *of_type(ADDRESS * 2, "cos sin"),
        *of_type(ADDRESS, "positions slots last mask read final_norm output best logits"),
        *of_type(NUMBER, "num_outputs num_groups rotary_size activation"),
        *of_type(ctypes.c_float, "soft_cap residual_scale"),
        ("norm", Norm),
        *of_type(ctypes.c_bool, "by_pairs norms_all_heads is_parallel shares_add_up"),
        ("ring", Ring),
    ]


class Chain(ctypes.Structure):
    """How a head of one layer goes on from its own output."""

    _fields_ = [
        *of_type(ADDRESS, "embedding embedding_norm hidden_norm output_norm output to_target"),
        *of_type(NUMBER, "num_outputs num_tokens"),
    ]


STRUCTS: tuple[type[ctypes.Structure], ...] = Layer, Forward, Chain  # in the order of the kernels' `struct_sizes`


def check_sizes(library: ctypes.CDLL) -> None:
    """Checks that the kernels were compiled with structs of these sizes: otherwise they would read other fields."""
    sizes = (NUMBER * len(STRUCTS))()
    library.struct_sizes(sizes)
    for struct, size in zip(STRUCTS, sizes, strict=True):
        assert ctypes.sizeof(struct) == size, f"{struct.__name__}: {ctypes.sizeof(struct)} bytes, kernels.cpp: {size}"
