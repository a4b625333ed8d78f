"""What inductor makes of a joined layer for a GPU, seen in the code that it generates for a CPU, or for an H200."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from headstart.targets.caches import split_attention
from headstart.targets.cpu import joined_decoder
from headstart.targets.cpu.joined_decoder import LayerWeights, Shared, Sizes, compiled_layer

pytestmark = pytest.mark.slow

SIZES = Sizes(num_heads=4, num_kv_heads=2, head_dim=16, eps=1e-5)
NUM_SLOTS = 1024


class Generated(BaseException):  # which inductor lets through
    """Raised with the code, before a C++ compiler takes seconds for it."""


def code_of(num_rows: int, num_queries: int, *, is_masked: bool) -> str:
    """The code of a layer of 32 channels that reads half of the cache's slots."""
    heads, num_kv, head_dim = SIZES.num_heads, SIZES.num_kv_heads, SIZES.head_dim
    qkv, output = torch.zeros((heads + 2 * num_kv) * head_dim, 32), torch.zeros(32, heads * head_dim)
    norm, mlp = torch.ones(32), (torch.zeros(96, 32), torch.zeros(32, 48))
    weights = LayerWeights(norm, qkv, None, None, None, output, norm, *mlp)
    keys, values = torch.zeros(2, num_rows, num_kv, 2 * NUM_SLOTS, head_dim)[..., :NUM_SLOTS, :]
    cos = torch.zeros(num_rows, 1, num_queries, head_dim)
    rows, slots = torch.arange(num_rows)[:, None, None], torch.arange(num_queries).expand(num_rows, 1, -1)
    mask = torch.zeros(num_rows, 1, heads // num_kv * num_queries, NUM_SLOTS) if is_masked else None
    shared = Shared(cos, cos, rows, torch.arange(num_kv)[:, None], slots, mask)
    x = torch.zeros(num_rows, num_queries, 32)
    with torch.no_grad(), pytest.raises(Generated) as caught:
        compiled_layer(x, x, weights, norm, keys, values, shared, SIZES)
    return str(caught.value)


@pytest.fixture(autouse=True)
def stops_before_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(code: str) -> None:
        raise Generated(code)

    monkeypatch.setattr("torch._inductor.graph.GraphLowering.save_output_code", staticmethod(stop))


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_compiled_layer_copies_no_cache(in_parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if in_parts:
        monkeypatch.setattr(joined_decoder, "masked_attention", split_attention.attention_in_parts)
    shapes = re.findall(r"= empty_strided_cpu\(\(([\d, ]+)\)", code_of(2, 6, is_masked=True))
    buffers = [math.prod(map(int, shape.split(", "))) for shape in shapes]
    assert buffers and max(buffers) < 2 * SIZES.num_kv_heads * NUM_SLOTS * SIZES.head_dim


def test_each_shape_has_code_of_its_own() -> None:
    """And not the second one code for any size, which is slower."""
    for num_queries in (6, 4):
        code = code_of(1, num_queries, is_masked=False)
        assert f"(1, {num_queries}, 32)" in code and not re.search(r"\bs\d+\b", code), "no size is a symbol"


@pytest.mark.parametrize("num_queries", [1, 6])
def test_a_layer_of_8b_shape_launches_at_most_eleven_kernels(num_queries: int) -> None:
    """What adds to the residual stream normalises it for the next product too, and attention's parts are put together
    in one pass. docs/results/gpu.md says what each kernel does."""
    pytest.importorskip("triton")
    asked = [sys.executable, Path(__file__).with_name("gpu_kernels.py"), f"--queries={num_queries}"]
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH") if key in os.environ}
    done = subprocess.run(asked, env={**kept, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    launched = done.stdout.split()
    assert launched.count("extern_kernels.mm") == 4 and len(launched) <= 11
