"""A GGUF file is a target: dequantised once into a cached folder, named by its digest; what is none is refused."""

import math
import re
import time
from concurrent.futures import ThreadPoolExecutor

import gguf_files
import numpy as np
import pytest
import torch
from headstart.base.errors import BadInput
from headstart.targets.loading import found_path
from headstart.targets.target import Target
from headstart.targets.weights import gguf as gguf_module
from headstart.targets.weights.gguf import gguf_folder
from transformers import AutoTokenizer


def llama():
    """The keys and tensors of a random Llama with a byte-level tokenizer."""
    pytest.importorskip("gguf")
    keys, tensors = gguf_files.draft_model()
    tokens = [*(f"<|{i}|>" for i in range(4)), *(chr(0x61 + i) for i in range(26)), "ab"]
    tokens += [chr(0x100 + i) for i in range(gguf_files.V - len(tokens))]
    keys |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["a b"]}
    keys |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    keys["tokenizer.chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return keys, tensors


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """It, in 8 bits."""
    return gguf_files.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", *llama(), is_quantised=True)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "targets"


def test_a_gguf_file_loads_as_a_target_in_bf16(gguf_file, cache):
    gguf = pytest.importorskip("gguf")
    target = Target.load(gguf_file)
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (2, 32, 61)
    assert target.dtype == torch.bfloat16 and target.tokenizer.chat_template
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(gguf_file).tensors}
    true = stored["blk.1.ffn_up.weight"]
    values = torch.from_numpy(gguf.quants.dequantize(true.data, true.tensor_type)).to(torch.bfloat16)
    assert torch.equal(target.base.get_parameter("layers.1.mlp.up_proj.weight"), values)


def test_special_tokens_are_those_that_the_file_names(gguf_file, cache, monkeypatch):
    """Whatever transformers makes of them: 5.17 takes the first token for the end of a text."""
    load = AutoTokenizer.from_pretrained

    def mistaken(*given, **how):
        tokenizer = load(*given, **how)
        tokenizer.eos_token = tokenizer.bos_token
        return tokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", mistaken)
    folder = gguf_folder(gguf_file)
    monkeypatch.undo()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_it_is_dequantised_once_and_another_file_of_that_name_too(gguf_file, cache, tmp_path):
    first = found_path(gguf_file)
    written = (cache / first).stat().st_mtime_ns
    assert found_path(gguf_file) == first and (cache / first).stat().st_mtime_ns == written
    assert [path.name for path in cache.iterdir()] == [first.rpartition("/")[2]], "nothing is left beside it"
    other = tmp_path / gguf_file.name
    other.write_bytes(gguf_file.read_bytes() + b"\0")
    assert found_path(other) != first


def test_of_two_at_once_one_dequantises_and_the_other_takes_that(gguf_file, cache, monkeypatch):
    begun, work = [], gguf_module.dequantise

    def slow(path, folder):
        begun.append(folder)
        time.sleep(0.3)
        work(path, folder)

    monkeypatch.setattr(gguf_module, "dequantise", slow)
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(gguf_folder, [gguf_file, gguf_file]))
    assert folders[0] == folders[1] and len(begun) == 1


@pytest.mark.parametrize("left_out", ["blk.1.", "blk.0.ffn_up.weight", "output_norm.weight"])
def test_a_file_without_a_tensor_of_the_model_is_refused(left_out, cache, tmp_path):
    """Of several parts the first has the whole model's keys; transformers fills up with random numbers."""
    keys, tensors = llama()
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(left_out)}
    file = gguf_files.write(tmp_path / "part.gguf", keys, tensors)
    with pytest.raises(BadInput, match=r"part\.gguf: no tensor for \['model\..*llama-gguf-split --merge"):
        gguf_folder(file)
    assert not any(cache.glob("*"))


def rotary_factors(factor, *, theta=5e5, length=8192.0):
    """As llama.cpp's converter writes them for Llama 3.1 and later."""
    waves = [2 * math.pi * theta ** (i / gguf_files.H) for i in range(0, gguf_files.H, 2)]
    between = [(length / wave - 1) / 3 for wave in waves]
    return float32s(*(1 / ((1 - share) / factor + share) if 0 < share < 1 else 1 for share in between[:3]), factor)


def float32s(*values):
    return np.array(values, np.float32)


def test_a_llama_3_file_keeps_its_rotary_factors(cache, tmp_path):
    keys, tensors = llama()
    keys |= {"llama.rope.freq_base": 5e5, "llama.rope.scaling.type": "none"}
    factors = rotary_factors(32.0)
    assert np.allclose(factors[[0, 1, 3]], [1, 1, 32]) and 2 < factors[2] < 4
    file = gguf_files.write(tmp_path / "llama3.gguf", keys, tensors | {"rope_freqs.weight": factors})
    plain = 5e5 ** -(torch.arange(0, gguf_files.H, 2) / gguf_files.H)
    assert torch.allclose(Target.load(file).base.rotary_emb.inv_freq, plain / torch.tensor(factors), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type: transformers leaves it out"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.type: transformers leaves it out"),
        ({"rope_factors_long.weight": gguf_files.weights(4)}, "rope_factors_long.weight: transformers leaves it out"),
        ({"rope_freqs.weight": float32s(1, 1, 2, 32)}, "rope_freqs.weight: unknown rotary factors"),
        ({"rope_freqs.weight": float32s(1, 1, 32)}, "rope_freqs.weight: unknown rotary factors"),
    ],
)
def test_rotary_factors_that_transformers_leaves_out_are_refused(given, refusal, cache, tmp_path):
    keys, tensors = llama()
    keys |= {"llama.rope.freq_base": 5e5} | {key: value for key, value in given.items() if isinstance(value, str)}
    tensors |= {name: value for name, value in given.items() if not isinstance(value, str)}
    with pytest.raises(BadInput, match=rf"scaled\.gguf: {re.escape(refusal)}"):
        gguf_folder(gguf_files.write(tmp_path / "scaled.gguf", keys, tensors))
    assert not any(cache.glob("*"))


def test_what_is_no_gguf_is_refused_in_one_line(tmp_path, cache):
    text = tmp_path / "notes.gguf"
    text.write_text("no model")
    with pytest.raises(BadInput, match=r"notes\.gguf: not a GGUF file"):
        found_path(text)
    with pytest.raises(BadInput, match=r"missing\.gguf: no such file"):
        found_path(tmp_path / "missing.gguf")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(BadInput, match=r"cut\.gguf: "):
        found_path(tmp_path / "cut.gguf")
    assert not cache.exists() or not any(cache.iterdir()), "nothing half-written"
