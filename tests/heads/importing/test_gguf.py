"""A GGUF file is a target: dequantised once into a cached folder, named by its digest; what is none is refused."""

import numpy as np
import pytest
import torch
from headstart.configs.errors import BadInput
from headstart.heads.importing.gguf import gguf_folder
from headstart.heads.loading import found_path
from headstart.heads.target import Target
from transformers import AutoTokenizer

SIZES = {"layers": 2, "hidden": 64, "heads": 4, "kv": 2, "mlp": 96, "vocab": 260}


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """A random Llama in 8 bits, with a byte-level tokenizer."""
    gguf = pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    s, rng = SIZES, np.random.default_rng(0)
    writer.add_block_count(s["layers"])
    writer.add_context_length(128)
    writer.add_embedding_length(s["hidden"])
    writer.add_feed_forward_length(s["mlp"])
    writer.add_head_count(s["heads"])
    writer.add_head_count_kv(s["kv"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(s["vocab"])
    writer.add_tokenizer_model("gpt2")
    tokens = [*(f"<|{i}|>" for i in range(4)), *(chr(0x61 + i) for i in range(26)), "ab"]
    tokens += [chr(0x100 + i) for i in range(s["vocab"] - len(tokens))]
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")

    def matrix(name, rows, columns):
        values = rng.normal(0, 0.1, (rows, columns)).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    head = s["hidden"] // s["heads"]
    matrix("token_embd.weight", s["vocab"], s["hidden"])
    for i in range(s["layers"]):
        for name, rows, columns in (
            ("attn_q", s["hidden"], s["hidden"]),
            ("attn_k", s["kv"] * head, s["hidden"]),
            ("attn_v", s["kv"] * head, s["hidden"]),
            ("attn_output", s["hidden"], s["hidden"]),
            ("ffn_gate", s["mlp"], s["hidden"]),
            ("ffn_up", s["mlp"], s["hidden"]),
            ("ffn_down", s["hidden"], s["mlp"]),
        ):
            matrix(f"blk.{i}.{name}.weight", rows, columns)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(s["hidden"], np.float32))
    writer.add_tensor("output_norm.weight", np.ones(s["hidden"], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "targets"


def test_a_gguf_file_loads_as_a_target_in_bf16(gguf_file, cache):
    gguf = pytest.importorskip("gguf")
    target = Target.load(gguf_file)
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (2, 64, 260)
    assert target.dtype == torch.bfloat16 and target.tokenizer.chat_template
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(gguf_file).tensors}
    true = stored["blk.1.ffn_down.weight"]
    values = torch.from_numpy(gguf.quants.dequantize(true.data, true.tensor_type)).to(torch.bfloat16)
    assert torch.equal(target.base.get_parameter("layers.1.mlp.down_proj.weight"), values)


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
