"""Which instruction set the kernels are for, and the dtype that follows; sets that this machine lacks are emulated."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.targets.cpu import build
from headstart.targets.dtype import default_dtype
from headstart.targets.target import Target
from kinds import KINDS

PROGRAM = Path(__file__).with_name("kernels_test.cpp")
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
has_avx2 = pytest.mark.skipif("avx2" not in build.supported_sets(), reason="another processor")


def test_an_unknown_set_or_one_of_other_processors_is_refused_in_one_line(monkeypatch):
    other = "neon" if "avx2" in build.supported_sets() else "avx2"
    for name in ("avx9", other):
        monkeypatch.setenv(build.VARIABLE, name)
        with pytest.raises(BadInput, match=f"HEADSTART_CPU={name}: expected none or what this processor has, "):
            build.instruction_set()


def test_kernels_are_built_for_each_system_that_shares_a_cache(monkeypatch, tmp_path):
    """Those that a newer one linked would not load on an older."""

    def built_on(libc, **release):
        def read():
            if not release:
                raise OSError("no such file")
            return release

        monkeypatch.setattr(build.platform, "libc_ver", lambda: ("glibc", libc))
        monkeypatch.setattr(build.platform, "freedesktop_os_release", read)
        return build.built("avx2")

    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    monkeypatch.setattr(build.shutil, "which", lambda name: name)
    monkeypatch.setattr(build.subprocess, "run", lambda arguments, **_: Path(arguments[-1]).touch())
    paths = [
        built_on("2.36", VERSION_ID="12"),
        built_on("2.41", VERSION_ID="13"),
        built_on("2.41"),
        built_on("2.41", ID="x"),
    ]
    assert len(set(paths)) == len(paths) and built_on("2.36", VERSION_ID="12") == paths[0]


def test_without_kernels_the_models_own_layers_decode(monkeypatch, tiny_model):
    monkeypatch.setenv(build.VARIABLE, "none")
    target = Target.of(tiny_model("llama").to(torch.bfloat16), name="plain", fingerprint="")
    assert build.kernels() is None and target.decoder is None


@pytest.fixture(scope="module")
def stored(tiny_model, tmp_path_factory):
    """Targets stored in 16 bits: one that the kernels decode, two whose products they compute, one of which is mostly
    experts, and one with linear layers of its own kind; and the first stored in fp32."""
    folder = tmp_path_factory.mktemp("stored")
    for name, model, dtype in (
        ("known", tiny_model("llama"), "bfloat16"),
        ("products", tiny_model("gpt_neox"), "float16"),
        ("experts", tiny_model("qwen3_moe"), "bfloat16"),
        ("other", KINDS["falcon"].model(), "bfloat16"),
        ("wide", tiny_model("llama"), "float32"),
    ):
        model.to(getattr(torch, dtype)).save_pretrained(folder / name)
    return folder


@has_avx2
@pytest.mark.parametrize(
    ("name", "on_avx2", "with_bf16"),
    [
        ("known", "bfloat16", "bfloat16"),
        ("products", "bfloat16", "bfloat16"),
        ("experts", "bfloat16", "bfloat16"),
        ("other", "float32", "bfloat16"),
        ("wide", "float32", "float32"),
    ],
)
def test_bf16_is_the_default_where_something_multiplies_it(stored, monkeypatch, name, on_avx2, with_bf16):
    monkeypatch.setenv(build.VARIABLE, "avx2")
    assert not build.multiplies_bf16()
    assert default_dtype(stored / name, "cpu") == on_avx2
    assert default_dtype(stored / name, "cuda") == "auto", "as stored"
    if "avx512bf16" in build.supported_sets():
        monkeypatch.setenv(build.VARIABLE, "avx512bf16")
        assert default_dtype(stored / name, "cpu") == with_bf16


@has_avx2
def test_without_a_compiler_bf16_is_no_default(stored, monkeypatch):
    monkeypatch.setenv(build.VARIABLE, "avx2")
    monkeypatch.setattr("headstart.targets.dtype.kernels", lambda: None)
    assert default_dtype(stored / "known", "cpu") == "float32"


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which(CROSS) and shutil.which("qemu-aarch64")), reason=f"no {CROSS}, or no qemu-aarch64"
)
@pytest.mark.parametrize("name", ["neon", "neonbf16"])
def test_on_arm_the_kernels_compute_what_plain_cpp_does(name, tmp_path):
    """To a bf16 step, and bit for bit whatever the tokens beside; under an emulator."""
    flags = [*build.FLAGS, *build.SETS[name], "-static"]
    subprocess.run([CROSS, *flags, str(PROGRAM), "-o", str(tmp_path / "program")], check=True)
    ran = subprocess.run([EMULATOR, "-cpu", "max", str(tmp_path / "program")], capture_output=True, text=True)
    assert ran.returncode == 0 and " 0 wrong" in ran.stdout, ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", build.supported_sets())
def test_here_the_kernels_compute_what_plain_cpp_does(name, tmp_path):
    """The same program, so that what the emulator is asked is asked of this machine too."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no compiler")
    subprocess.run(
        [compiler, *build.FLAGS, *build.SETS[name], str(PROGRAM), "-o", str(tmp_path / "program")], check=True
    )
    ran = subprocess.run([str(tmp_path / "program")], capture_output=True, text=True)
    assert ran.returncode == 0 and " 0 wrong" in ran.stdout, ran.stdout
