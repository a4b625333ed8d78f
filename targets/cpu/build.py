"""Which instruction set this processor's kernels are compiled for, and their compilation, once per machine."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

import torch

from ...base.errors import BadInput
from ...base.files import cache_root, replacing
from .structs import check_sizes

SOURCES = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h"))
# -ffp-contract=off: only multiply-adds that the source asks for, so that no number depends on what a compiler joins
FLAGS = "-O3 -std=c++17 -fPIC -ffp-contract=off".split()
AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma".split()
SETS = {  # by the names that HEADSTART_CPU knows, the fastest first
    "avx512bf16": [*AVX512, "-mavx512bf16"],
    "avx512": AVX512,
    "avx2": ["-mavx2", "-mfma"],
    "neonbf16": ["-march=armv8.2-a+bf16"],
    "neon": [],
}
BF16_SETS = ("avx512bf16", "neonbf16")  # those with instructions that multiply bf16
VARIABLE = "HEADSTART_CPU"
# one whose OpenMP is torch's own: the threads of two libraries would block each other
COMPILERS = {"Linux": "g++", "Darwin": "clang++"}
OPENMP = {"Linux": ["-fopenmp"], "Darwin": ["-Xclang", "-fopenmp"]}


@functools.cache  # asked by each product; on ARM it reads a file, or starts a process
def supported_sets() -> tuple[str, ...]:
    """The instruction sets that this processor has, the fastest first."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return ("neonbf16", "neon") if _has_arm_bf16() else ("neon",)
    has = {
        "avx512bf16": torch.cpu._is_avx512_bf16_supported(),
        "avx512": torch.cpu._is_avx512_supported(),
        "avx2": torch.cpu._is_avx2_supported(),
    }
    return tuple(name for name, is_there in has.items() if is_there)


def _has_arm_bf16() -> bool:
    if platform.system() == "Darwin":
        asked = subprocess.run(["sysctl", "-n", "hw.optional.arm.FEAT_BF16"], capture_output=True, text=True)
        return asked.stdout.strip() == "1"
    about = Path("/proc/cpuinfo")
    return about.is_file() and " bf16" in about.read_text()


def instruction_set() -> str | None:
    """The set whose kernels are used: the fastest, or the one that HEADSTART_CPU names; None: none.

    Raises: BadInput if HEADSTART_CPU names no set of this processor.
    """
    sets, wanted = supported_sets(), os.environ.get(VARIABLE)
    if wanted == "none":
        return None
    if wanted and wanted not in sets:
        raise BadInput(f"{VARIABLE}={wanted}: expected none or what this processor has, {', '.join(sets) or 'nothing'}")
    return wanted or next(iter(sets), None)


def multiplies_bf16() -> bool:
    """Whether torch multiplies bf16 by instructions of this processor, instead of emulating them; as the set that
    HEADSTART_CPU names would have it."""
    wanted = os.environ.get(VARIABLE)
    if wanted and wanted != "none":
        has_instructions = instruction_set() in BF16_SETS
    else:
        fastest = next(iter(supported_sets()), None)
        has_instructions = torch.cpu._is_amx_tile_supported() or fastest in BF16_SETS
    return has_instructions and torch.backends.mkldnn.is_available()


def kernels() -> ctypes.CDLL | None:
    """The kernels for `instruction_set()`, built on first use (seconds). None if there is none or, with a warning, if
    the build fails."""
    name = instruction_set()
    return None if name is None else _loaded(name)


@functools.cache
def _loaded(name: str) -> ctypes.CDLL | None:
    try:
        return declared(ctypes.CDLL(str(built(name))))
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        line = next((line for line in (said or "").splitlines() if line.strip()), "no reason given")
        warnings.warn(f"decoding on this CPU without kernels of its own, several times slower: {line}", stacklevel=3)
        return None


def built(name: str) -> Path:
    """Path of the library for an instruction set, compiled if it is not in the cache.

    Raises: OSError, CalledProcessError.
    """
    system = platform.system()
    flags = [*FLAGS, *SETS[name], *OPENMP.get(system, [])]
    digest = hashlib.sha256(" ".join(flags).encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    with suppress(OSError):  # on Linux: a library that a newer system linked does not load
        digest.update(f"{platform.libc_ver()} {platform.freedesktop_os_release().get('VERSION_ID')}".encode())
    path = cache_root() / "kernels" / f"{name}-{digest.hexdigest()[:16]}.so"
    if path.is_file():
        return path
    if system not in COMPILERS:
        raise OSError(f"they are not built on {system}")
    if shutil.which(COMPILERS[system]) is None:
        package = "Debian's package g++" if system == "Linux" else "xcode-select --install"
        raise OSError(f"{COMPILERS[system]} is not on PATH ({package} has it)")
    print("compiling kernels for this processor, once, in less than a minute", file=sys.stderr, flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, replacing(path) as library:
        source = next(path for path in SOURCES if path.suffix == ".cpp")
        objects = str(Path(folder) / "kernels.o")
        # not linked with an OpenMP library: torch has loaded its own
        linking = ["-shared"] if system == "Linux" else ["-shared", "-undefined", "dynamic_lookup"]
        for arguments in ([*flags, "-c", str(source), "-o", objects], [*linking, objects, "-o", str(library)]):
            subprocess.run([COMPILERS[system], *arguments], check=True, capture_output=True, text=True)
    return path


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the argument types of its functions declared, and the sizes of its structs checked."""
    address, number = ctypes.c_void_p, ctypes.c_int64
    product = [address, number, number, address, number]
    arguments = {  # as kernels.cpp declares them
        "decode": [address, number, address, address],
        "write": [address, number, address, address],
        "draft": [address] * 7,
        "multiply": [*product, address, number],
        "multiply_experts": [address, address, number, number, address, number, address, number],
        "multiply_argmax": [*product, address, address, number],
        "argmax": [address, number, number, address],
        "choose": [*[address] * 7, *[number] * 4, address, address],
        "normalise_rows": [address, address, address, number, number, ctypes.c_float],
        "widen": [ctypes.c_bool],
        "struct_sizes": [address],
    }
    library.widen.restype = ctypes.c_bool
    for name, types in arguments.items():
        getattr(library, name).argtypes = types
    check_sizes(library)
    return library
