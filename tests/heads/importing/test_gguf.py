"""A GGUF file is a target: dequantised once into a cached folder, named by its digest; what is none is refused."""

import gguf_files
import pytest
import torch
from headstart.configs.errors import BadInput
from headstart.heads.importing.gguf import gguf_folder
from headstart.heads.loading import found_path
from headstart.heads.target import Target
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """A random Llama in 8 bits, with a byte-level tokenizer."""
    pytest.importorskip("gguf")
    keys, tensors = gguf_files.draft_model()
    tokens = [*(f"<|{i}|>" for i in range(4)), *(chr(0x61 + i) for i in range(26)), "ab"]
    tokens += [chr(0x100 + i) for i in range(gguf_files.V - len(tokens))]
    keys |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["a b"]}
    keys |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    keys["tokenizer.chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return gguf_files.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", keys, tensors, is_quantised=True)


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


def test_it_is_dequantised_once(gguf_file, cache):
    first = found_path(gguf_file)
    written = (cache / first).stat().st_mtime_ns
    assert found_path(gguf_file) == first and (cache / first).stat().st_mtime_ns == written
    assert [path.name for path in cache.iterdir()] == [first.rpartition("/")[2]], "nothing is left beside it"


def test_another_file_of_the_same_name_gets_another_folder(gguf_file, cache, tmp_path):
    other = tmp_path / gguf_file.name
    other.write_bytes(gguf_file.read_bytes() + b"\0")
    assert found_path(other) != found_path(gguf_file)


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
