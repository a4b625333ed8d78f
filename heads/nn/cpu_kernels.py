"""Matrix products in bf16 on CPUs with bf16 instructions, by our own kernels (cpu_kernels.cpp), built once per machine.

Unlike oneDNN's they read weights at memory bandwidth also for few rows, and a row's result does not depend on the other
rows.
"""

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...configs.files import cache_root, replacing

SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
FLAGS = "-O3 -std=c++17 -fPIC -fopenmp -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mfma".split()
BLOCK = 32  # outputs that are computed together, as in cpu_kernels.cpp
TILE = 8  # tokens likewise: fewer take hardly less time, as the weights are read all the same
COMPILERS = ("g++", "clang++")


def multiplies_bf16() -> bool:
    """Whether this processor has bf16 instructions (AVX512-BF16, AMX) and torch uses them."""
    has_instructions = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(has_instructions and torch.backends.mkldnn.is_available())


@functools.cache
def kernels() -> ctypes.CDLL | None:
    """The kernels, built on first use (seconds). None if the processor lacks AVX512-BF16 or, with a warning, if the
    build fails."""
    if not torch.cpu._is_avx512_bf16_supported():
        return None
    try:
        return declared(ctypes.CDLL(str(built())))
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        line = next((line for line in (said or "").splitlines() if line.strip()), "no reason given")
        warnings.warn(f"decoding in bf16 without its own kernels, and several times slower: {line}", stacklevel=2)
        return None


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the argument types of its functions declared."""
    address, number = ctypes.c_void_p, ctypes.c_int64
    product = [address, number, number, address, number, address, number]
    arguments = {
        "decode": [address, number, address, address],
        "write": [address, number, address, address],
        "draft": [address] * 7,
        "multiply": product,
        "multiply_argmax": product,
        "argmax": [address, number, number, address],
        "normalise_rows": [address, address, address, number, number, ctypes.c_float],
        "widen": [ctypes.c_bool],
    }
    library.widen.restype = ctypes.c_bool
    for name, types in arguments.items():
        getattr(library, name).argtypes = types
    return library


def built() -> Path:
    """Path of the library, compiled if it is not in the cache. Raises: OSError, CalledProcessError."""
    source = SOURCE.read_bytes()
    path = cache_root() / "kernels" / f"{hashlib.sha256(source + ' '.join(FLAGS).encode()).hexdigest()[:16]}.so"
    if path.is_file():
        return path
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise OSError(f"none of {', '.join(COMPILERS)} is on PATH")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, replacing(path) as library:
        objects = str(Path(folder) / "kernels.o")
        # not linked with an OpenMP library: torch has loaded its own, and the threads of two would block each other
        for line in ([*FLAGS, "-c", str(SOURCE), "-o", objects], ["-shared", objects, "-o", str(library)]):
            subprocess.run([compiler, *line], check=True, capture_output=True, text=True)
    return path


def blocked(weight: Tensor) -> Tensor:
    """A weight [N, K], K even, in the kernels' layout [ceil(N / 32), K / 2, 32, 2], padded with zeros."""
    num, size = weight.shape
    whole = F.pad(weight.detach(), (0, 0, 0, -num % BLOCK))
    return whole.view(-1, BLOCK, size // 2, 2).transpose(1, 2).contiguous()


def multiply(x: Tensor, weight: Tensor, num_outputs: int) -> Tensor:
    """[..., K] -> [..., N] products with a blocked weight. Needs `kernels()`."""
    library, x = kernels(), x.contiguous()
    assert library is not None
    y, size = x.new_empty(*x.shape[:-1], num_outputs), x.shape[-1]
    product = x.data_ptr(), x.numel() // size, size, weight.data_ptr(), num_outputs
    library.multiply(*product, y.data_ptr(), torch.get_num_threads())
    return y


def multiply_argmax(x: Tensor, weight: Tensor, num_outputs: int) -> Tensor:
    """[..., K] -> [...] the argmax of `multiply`, the first index if several tie."""
    library, x = kernels(), x.contiguous()
    assert library is not None
    found, size = torch.empty(x.shape[:-1], dtype=torch.long), x.shape[-1]
    product = x.data_ptr(), found.numel(), size, weight.data_ptr(), num_outputs
    library.multiply_argmax(*product, found.data_ptr(), torch.get_num_threads())
    return found


def normalised(x: Tensor, gain: Tensor, eps: float) -> Tensor | None:
    """x / rms(x) * gain over the last dimension; None if the kernels do not support it."""
    library = usable_kernels(x)
    if library is None or gain.dtype != x.dtype:
        return None
    x = x.contiguous()
    y, size = torch.empty_like(x), x.shape[-1]
    library.normalise_rows(x.data_ptr(), gain.data_ptr(), y.data_ptr(), x.numel() // size, size, eps)
    return y


def best(logits: Tensor) -> Tensor:
    """[..., V] -> [...] the argmax, the first index if several tie."""
    library = usable_kernels(logits)
    if library is None:
        return logits.argmax(-1)
    logits, size = logits.contiguous(), logits.shape[-1]
    found = torch.empty(logits.shape[:-1], dtype=torch.long)
    library.argmax(logits.data_ptr(), found.numel(), size, found.data_ptr())
    return found


def usable_kernels(x: Tensor) -> ctypes.CDLL | None:
    """The kernels if they support x (bf16 on a CPU) and neither gradients nor compilation are active; else None."""
    return None if torch.is_grad_enabled() else kernels_for(x)


def kernels_for(x: Tensor) -> ctypes.CDLL | None:
    """`usable_kernels` for an operation whose weights need no gradients, so that only x may need them."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or x.requires_grad or torch.compiler.is_compiling():
        return None
    return kernels()


def pack_linears(module: nn.Module, *, without: Iterable[nn.Module] = ()) -> None:
    """Make a module's bf16 linear layers on a CPU use these kernels where no gradients are needed.

    The kernels read a copy of the weights, so these must not change afterwards. Other layers are unchanged.

    Args: without: submodules to leave unchanged.
    """
    others = {inner for part in without for inner in part.modules()}
    inside = (each for each in module.modules() if type(each) is nn.Linear and each not in others)
    linears = [each for each in inside if is_multiplied(each.weight) and "forward" not in vars(each)]
    if linears and kernels() is not None:
        for linear in linears:
            linear.forward = _packed_forward(linear)  # pyright: ignore[reportAttributeAccessIssue]


def is_multiplied(weight: Tensor) -> bool:
    """Whether the kernels support a weight [N, K]."""
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.shape[1] % 2 == 0


def _packed_forward(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    weight, plain, num = blocked(linear.weight), linear.forward, linear.out_features

    def forward(x: Tensor) -> Tensor:
        if (usable_kernels if linear.weight.requires_grad else kernels_for)(x) is None:
            return plain(x)
        out = multiply(x, weight, num)
        return out if linear.bias is None else out + linear.bias

    return forward
