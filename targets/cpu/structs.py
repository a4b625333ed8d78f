"""The structs that the kernels share with Python: fields in the order of kernels.cpp, which says what they hold."""

import ctypes

from .layer_weights import LayerWeights

ADDRESS, NUMBER = ctypes.c_void_p, ctypes.c_int64


class Layer(ctypes.Structure):
    """Where the weights of a layer lie, and what else sets it apart."""

    _fields_ = [
        *((name, ADDRESS) for name in (*LayerWeights._fields, "kept")),
        ("window", NUMBER),
        ("rope", NUMBER),
        ("scale", ctypes.c_float),
    ]


class Norm(ctypes.Structure):
    """How a norm computes."""

    _fields_ = [
        ("eps", ctypes.c_float),
        ("centred", ctypes.c_bool),
        ("adds_one", ctypes.c_bool),
        ("rounds", ctypes.c_bool),
    ]


class Ring(ctypes.Structure):
    """Where a cache keeps positions."""

    _fields_ = [("sink", NUMBER), ("size", NUMBER), ("window", NUMBER)]


class Forward(ctypes.Structure):
    """One forward over B rows of Q tokens each."""

    _fields_ = [
        ("hidden", NUMBER),
        ("num_heads", NUMBER),
        ("num_kv_heads", NUMBER),
        ("head_dim", NUMBER),
        ("mlp", NUMBER),
        ("read_size", NUMBER),
        ("num_rows", NUMBER),
        ("num_queries", NUMBER),
        ("extent", NUMBER),
        ("layer_stride", NUMBER),
        ("value_stride", NUMBER),
        ("row_stride", NUMBER),
        ("head_stride", NUMBER),
        ("num_threads", NUMBER),
        ("cache", ADDRESS),
        ("cos", ADDRESS * 2),
        ("sin", ADDRESS * 2),
        ("positions", ADDRESS),
        ("slots", ADDRESS),
        ("last", ADDRESS),
        ("mask", ADDRESS),
        ("read", ADDRESS),
        ("final_norm", ADDRESS),
        ("output", ADDRESS),
        ("best", ADDRESS),
        ("logits", ADDRESS),
        ("num_outputs", NUMBER),
        ("num_groups", NUMBER),
        ("rotary_size", NUMBER),
        ("activation", NUMBER),
        ("soft_cap", ctypes.c_float),
        ("residual_scale", ctypes.c_float),
        ("norm", Norm),
        ("by_pairs", ctypes.c_bool),
        ("norms_all_heads", ctypes.c_bool),
        ("is_parallel", ctypes.c_bool),
        ("ring", Ring),
    ]


class Chain(ctypes.Structure):
    """How a head of one layer goes on from its own output."""

    _fields_ = [
        ("embedding", ADDRESS),
        ("embedding_norm", ADDRESS),
        ("hidden_norm", ADDRESS),
        ("output_norm", ADDRESS),
        ("output", ADDRESS),
        ("to_target", ADDRESS),
        ("num_outputs", NUMBER),
        ("num_tokens", NUMBER),
    ]


STRUCTS: tuple[type[ctypes.Structure], ...] = Layer, Forward, Chain  # in the order of the kernels' `struct_sizes`


def check_sizes(library: ctypes.CDLL) -> None:
    """Checks that the kernels were compiled with structs of these sizes: otherwise they would read other fields."""
    sizes = (NUMBER * len(STRUCTS))()
    library.struct_sizes(sizes)
    for struct, size in zip(STRUCTS, sizes, strict=True):
        assert ctypes.sizeof(struct) == size, f"{struct.__name__}: {ctypes.sizeof(struct)} bytes, kernels.cpp: {size}"
