"""Prints what inductor would launch on an H200 for a joined layer of 8B shape; needs no GPU, and nothing is run.

    python tests/targets/cpu/gpu_kernels.py --queries 1 --slots 512

Run in a process of its own, as torch keeps the GPU that is not there. Dynamo, which takes none of its tensors, is left
out.
"""

import argparse
import re
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from headstart.targets.cpu.joined_decoder import LayerWeights, Shared, Sizes, decoder_layer
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

# torch brings it for Linux alone
from triton import runtime  # pyright: ignore[reportMissingImports]
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]

SIZES = Sizes(num_heads=32, num_kv_heads=8, head_dim=128, eps=1e-5)
WIDTH, MLP_WIDTH = 4096, 14336
H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
)
LAUNCH = re.compile(r"^ +(?:\w+ = )?((?:extern_kernels|torch\.ops\.aten|triton_[a-z]{3}_)[\w.]*)\(", re.MULTILINE)


class Generated(BaseException):  # which inductor lets through
    """Raised with the code, before Triton compiles it."""


def stop(code: str) -> None:
    raise Generated(code)


def as_on_an_h200() -> ExitStack:
    """A context in which inductor generates code for one."""
    context, driver = ExitStack(), SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    for owner, name, value in (
        (runtime.driver, "_active", driver),
        (CudaInterface, "is_available", lambda: True),
        (CudaInterface, "is_bf16_supported", lambda including_emulation=False: True),
        (CudaInterface, "get_device_properties", lambda device=None: H200),
        (torch.cuda, "get_device_properties", lambda device=None: H200),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "_lazy_init", lambda: None),
        (torch._C, "_cuda_getDevice", lambda: 0),
        (torch.compiler, "is_compiling", lambda: True),
        (GraphLowering, "save_output_code", stop),
    ):
        context.enter_context(patch.object(owner, name, value))
    context.enter_context(config.patch(shape_padding=False, force_disable_caches=True))  # padding is timed
    context.enter_context(FakeTensorMode())
    return context


def code_of(num_queries: int, num_slots: int) -> str:
    """The code of a layer for one row that reads half of the cache's slots."""
    heads, num_kv, head_dim, _ = SIZES

    def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
        return torch.empty(shape, dtype=dtype, device="cuda:0")

    qkv, output = made((heads + 2 * num_kv) * head_dim, WIDTH), made(WIDTH, heads * head_dim)
    mlp = made(2 * MLP_WIDTH, WIDTH), made(WIDTH, MLP_WIDTH)
    weights = [made(WIDTH), qkv, output, made(WIDTH), *mlp]
    caches = [made(1, num_kv, 2 * num_slots, head_dim)[:, :, :num_slots] for _ in range(2)]
    places = [made(*shape, dtype=torch.long) for shape in ((1, 1, 1), (num_kv, 1), (1, 1, num_queries))]
    rotary, mask = (
        [made(1, 1, num_queries, head_dim) for _ in range(2)],
        made(1, 1, heads // num_kv * num_queries, num_slots),
    )
    stream = [made(1, num_queries, WIDTH) for _ in range(2)]

    def layer(x: Any, normed: Any, norm: Any, qkv: Any, output: Any, mlp_norm: Any, *rest: Any) -> Any:
        gate_up, down, keys, values, *shared = rest
        weights = LayerWeights(norm, qkv, None, None, None, output, mlp_norm, gate_up, down)
        return decoder_layer(x, normed, weights, norm, keys, values, Shared(*shared), SIZES)

    arguments = [*stream, *weights, *caches, *rotary, *places, mask]
    try:
        with torch.no_grad():
            compile_fx(make_fx(layer)(*arguments), arguments)
    except Generated as generated:
        return str(generated)
    raise AssertionError("inductor generated no code")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--slots", type=int, default=512)
    args = parser.parse_args()
    with as_on_an_h200():
        print(*LAUNCH.findall(code_of(args.queries, args.slots)), sep="\n")
