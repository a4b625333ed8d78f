"""What heads read of a target is what Hugging Face computes, in every family, cached or not, however it is stored."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.targets import loading
from headstart.targets.dtype import with_default_dtype
from headstart.targets.loading import TargetConfig, read_model_config, torch_dtype
from headstart.targets.skeleton import load_skeleton
from headstart.targets.target import Target
from headstart.targets.weights import stored
from headstart.targets.weights.stored import StoredTensor, fingerprint_of_stored, indexed_tensors, stored_tensors
from safetensors.torch import load_file, save_file
from transformers import MptConfig, MptForCausalLM

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}


def random_ids(target, *, num_rows=2, length=20, seed=0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(3, target.vocab_size, (num_rows, length), generator=source)


def perturb_norms(model) -> None:
    """Norm gains other than their start, so that a norm left out or applied twice shows."""
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=source))


def message(call, *args, **kwargs) -> str:
    with pytest.raises(BadInput) as caught:
        call(*args, **kwargs)
    return str(caught.value)


# What it reads


@pytest.mark.fast_only(family=["cohere2", "gemma3", "gpt_neox", "llama", "qwen3_moe"])
def test_states_and_logits_are_those_of_hugging_face(family, tiny_target):
    target = tiny_target(family)
    perturb_norms(target.model)
    ids = random_ids(target)
    last = {}
    hook = target.layers[-1].register_forward_hook(
        lambda module, args, out: last.update(raw=out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        said = target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    hook.remove()
    layers = tuple(range(target.num_layers))
    ours = target.forward(ids, feature_layers=layers)
    assert ours.features.shape == (*ids.shape, target.num_layers, target.hidden_size)
    for i in layers:
        torch.testing.assert_close(ours.features[:, :, i], said.hidden_states[i], **CLOSE)
    torch.testing.assert_close(ours.post_norm, said.hidden_states[-1], **CLOSE)
    assert (ours.post_norm - last["raw"]).abs().max() > 0.1, "post_norm lies behind the final norm"
    torch.testing.assert_close(target.logits(ours.post_norm), said.logits.float(), **CLOSE)


def test_chosen_layers_come_in_the_order_asked_for(target):
    ids = random_ids(target)
    every = target.forward(ids, feature_layers=(0, 1, 2, 3)).features
    assert torch.equal(target.forward(ids, feature_layers=(3, 1)).features, every[:, :, [3, 1]])
    assert target.forward(ids).features.shape == (*ids.shape, 0, target.hidden_size)


@pytest.mark.parametrize("index", [4, 7, -1])
def test_an_index_beyond_the_layer_inputs_is_refused(index, target):
    """Hugging Face and vLLM mean different states by index num_layers."""
    said = message(target.forward, random_ids(target), feature_layers=(index,))
    assert said.startswith(f"feature layer {index}: tiny-llama has layers 0..3") and "post_norm" in said


@pytest.mark.fast_only(family=["gemma3", "gpt_neox", "llama", "qwen3_moe"])
def test_cached_decoding_equals_a_fresh_forward(family, tiny_target):
    """Rows advance by one to four tokens of the five read; what the others left in the cache is never seen."""
    target, layers, lengths = tiny_target(family), (0, 2, 3), [3, 11, 1, 6]
    texts = random_ids(target, num_rows=len(lengths), length=90, seed=3)
    fresh = target.forward(texts, feature_layers=layers)
    source = torch.Generator().manual_seed(9)
    done, longest = torch.tensor(lengths), max(lengths)
    prompts = texts[:, :longest].clone()
    for i, length in enumerate(lengths):
        prompts[i, length:] = 5  # right padding
    cache = target.new_cache(100)
    positions = torch.arange(longest).expand(len(lengths), -1)
    read = target.forward(prompts, feature_layers=layers, cache=cache, positions=positions, extent=longest)
    for i, length in enumerate(lengths):
        torch.testing.assert_close(read.post_norm[i, :length], fresh.post_norm[i, :length], **CLOSE)
    for turn in range(24):
        num_read = 1 if turn % 3 == 0 else 5
        steps = torch.randint(1, min(num_read, 4) + 1, (len(lengths),), generator=source)
        positions = done[:, None] + torch.arange(num_read)
        tokens = texts.gather(1, positions)
        kept = torch.arange(num_read) < steps[:, None]
        tokens = torch.where(kept, tokens, random_ids(target, num_rows=len(lengths), length=num_read, seed=turn))
        extent = int(done.max()) + num_read
        read = target.forward(tokens, feature_layers=layers, cache=cache, positions=positions, extent=extent)
        for i, step in enumerate(steps.tolist()):
            where = slice(int(done[i]), int(done[i]) + step)
            torch.testing.assert_close(read.post_norm[i, :step], fresh.post_norm[i, where], **CLOSE)
            torch.testing.assert_close(read.features[i, :step], fresh.features[i, where], **CLOSE)
        done = done + steps
        if int(done.max()) + 5 > 90:
            break
    assert int(done.max()) > 40, "far beyond the sliding window of 8"


@pytest.mark.parametrize(
    ("family", "gain"),
    [("llama", lambda w: w), ("qwen3", lambda w: w), ("gemma3", lambda w: 1 + w), ("gpt_neox", torch.ones_like)],
)
def test_the_gain_of_the_final_norm(family, gain, tiny_target):
    """As stored, as 1 + w, and ones where the norm is no RMSNorm."""
    target = tiny_target(family)
    perturb_norms(target.model)
    norm = target.base.final_layer_norm if family == "gpt_neox" else target.base.norm
    torch.testing.assert_close(target.final_norm_scale(), gain(norm.weight.detach()), rtol=1e-4, atol=1e-5)


# How it loads


@pytest.fixture
def saved(tiny_model, tmp_path):
    """saved(family, shards=False, **changes): a model and the folder that holds it."""

    def save(family="llama", *, shards=False, **changes):
        model, folder = tiny_model(family, **changes), tmp_path / f"{family}-{shards}-{len(changes)}"
        model.save_pretrained(folder, max_shard_size="20KB" if shards else "5GB")
        assert (len(list(folder.glob("*.safetensors"))) > 1) == shards
        return model, folder

    return save


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "sharded"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_saved_target_loads_as_it_was(shards, tied, saved):
    model, folder = saved("llama", shards=shards, tie_word_embeddings=tied)
    target = Target.load(folder, device="cpu")
    assert target.name == str(folder) and target.dtype == torch.float32
    assert not any(p.requires_grad for p in target.model.parameters())
    ids = random_ids(target)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
    torch.testing.assert_close(target.logits(target.forward(ids).post_norm), wanted, **CLOSE)
    assert (target.output_layer.weight is target.input_embedding.weight) == tied


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_fingerprint_is_of_the_stored_weights(tied, saved):
    _, whole = saved("llama", tie_word_embeddings=tied)
    _, sharded = saved("llama", shards=True, tie_word_embeddings=tied)
    loaded = [Target.load(whole), Target.load(whole, dtype="float32"), Target.load(whole, dtype="bfloat16")]
    assert [target.dtype for target in loaded] == [torch.float32, torch.float32, torch.bfloat16]
    assert len({target.fingerprint for target in [*loaded, Target.load(sharded)]}) == 1


def test_all_bytes_of_a_target_count(saved):
    """Whatever few values one would look at."""
    _, folder = saved()
    weights, before = load_file(folder / "model.safetensors"), Target.load(folder).fingerprint
    weights["model.embed_tokens.weight"][37, 13] += 0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert Target.load(folder).fingerprint != before


def test_the_bytes_of_a_file_are_read_once_until_it_changes(saved, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(stored, "SETTLED", -1.0)
    _, folder = saved()
    read, digest = [], StoredTensor.digest
    monkeypatch.setattr(StoredTensor, "digest", lambda tensor: read.append(tensor) or digest(tensor))

    def fingerprint():
        return fingerprint_of_stored(stored_tensors(str(folder)))

    first, num = fingerprint(), len(read)
    assert num > 30 and fingerprint() == first and len(read) == num
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert fingerprint() != first and len(read) == 2 * num
    [kept] = (tmp_path / "cache" / "digests").iterdir()
    kept.write_text("damaged")
    assert fingerprint() != first and len(read) == 3 * num


def test_a_folder_that_is_no_model_is_named(tmp_path):
    assert message(Target.load, tmp_path / "gone") == f"target {tmp_path / 'gone'}: no such folder"
    assert message(Target.load, tmp_path) == f"target {tmp_path}: no config.json in it"
    assert message(Target.load, "./gone") == "target gone: no such folder"
    (tmp_path / "rows.jsonl").touch()
    assert message(Target.load, tmp_path / "rows.jsonl") == f"target {tmp_path / 'rows.jsonl'}: a file, not a folder"


@pytest.mark.parametrize("config", ["{", "[]", "{}", '{"model_type": "no_such_family"}'])
def test_a_config_that_is_none_is_one_line(config, tmp_path):
    (tmp_path / "config.json").write_text(config)
    assert message(Target.load, tmp_path).startswith(f"target {tmp_path}: ")


def test_a_missing_tensor_is_named_and_nothing_else_is_said(saved, capsys):
    _, folder = saved()
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()
    said = message(Target.load, folder)
    assert "weights missing in the checkpoint" in said and "model.layers.1.mlp.up_proj.weight" in said
    assert capsys.readouterr() == ("", "")


def test_sizes_that_do_not_fit_and_damaged_or_missing_files_are_one_line(saved):
    (_, folder), (_, parts) = saved(), saved(shards=True)

    def check(folder):
        assert message(Target.load, folder).startswith(f"target {folder}: ")

    config, weights = folder / "config.json", folder / "model.safetensors"
    before, whole = config.read_text(), weights.read_bytes()
    config.write_text(json.dumps({**json.loads(before), "intermediate_size": 40}))
    check(folder)
    config.write_text(before)
    for content in (whole[: len(whole) // 2], whole[:4], b""):
        weights.write_bytes(content)
        check(folder)
    weights.unlink()
    check(folder)
    next(parts.glob("*.safetensors")).unlink()
    check(parts)


def test_an_unknown_dtype_or_device_is_refused(saved):
    _, folder = saved()
    assert message(Target.load, folder, dtype="int8").startswith("dtype 'int8': expected one of auto, float32")
    assert message(Target.load, folder, device="abacus").startswith("device abacus: ")
    assert torch_dtype("bf16") is torch.bfloat16 and torch_dtype("auto") == "auto"


@pytest.mark.parametrize("without", ["llama", "qwen3", "gemma3"])
def test_a_folder_without_tokenizer_says_so_on_first_use(without, saved):
    """Also of those families for which transformers makes an empty one up."""
    _, folder = saved(without)
    target = Target.load(folder)
    assert message(lambda: target.tokenizer) == f"tokenizer of {folder}: no file of one in the folder"


def test_a_name_that_is_no_folder_and_not_on_the_hub_is_said_to_be_neither(tmp_path, monkeypatch):
    """By the first question, without the half minute of retries of the hub's own client."""

    def refuse(self, path, **how):
        raise OSError("not found\nlong advice")

    monkeypatch.setattr(loading.HfApi, "model_info", refuse)
    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", lambda *_, **how: pytest.fail("asked again"))
    monkeypatch.setattr(loading, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    assert message(read_model_config, TargetConfig(path="nobody/gone")) == (
        "target nobody/gone: no such folder, and from the hub: not found"
    )


@pytest.mark.parametrize(
    ("is_there", "is_seen", "visible", "num_lines"),
    [(True, False, None, 1), (True, False, "", 0), (True, True, None, 0), (False, False, None, 0)],
    ids=["unseen", "hidden on purpose", "seen", "none there"],
)
def test_a_gpu_that_torch_does_not_see_is_said_once(
    is_there, is_seen, visible, num_lines, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(loading, "GPU", tmp_path if is_there else tmp_path / "none")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_seen)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    loading.say_unseen_gpu.cache_clear()
    assert [loading.default_device(), loading.default_device()] == ["cuda" if is_seen else "cpu"] * 2
    assert capsys.readouterr().err.count("does not see the GPU of this machine") == num_lines


SAID_OF_GATED = {
    "transformers": "You are trying to access a gated repo.\nMake sure to have access to it at https://huggingface.co/o/n.",
    "the hub's client": "401 Client Error.\n\nCannot access gated repo for url https://huggingface.co/o/n/config.json.",
}


@pytest.mark.parametrize("said", SAID_OF_GATED.values(), ids=SAID_OF_GATED)
def test_of_a_gated_model_it_is_said_how_to_get_it(said, tmp_path, monkeypatch):
    def refuse(*_, **how):
        raise OSError(said)

    monkeypatch.setattr(loading.HfApi, "model_info", lambda *_, **how: None)
    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", refuse)
    monkeypatch.chdir(tmp_path)
    how = "ask for access on its page on huggingface.co, then `hf auth login`, or set HF_TOKEN"
    told = message(read_model_config, TargetConfig(path="o/n"))
    assert told == f"target o/n: no such folder, and from the hub: gated: {how}"


# Spread over devices


def spread_map(*offloaded: str) -> dict[str, str | int]:
    """A device map in which some of the tiny target's modules are read from the disk when they run."""
    layers = [f"model.layers.{i}" for i in range(4)]
    names = (*layers, "model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    return {name: "disk" if name in offloaded else "cpu" for name in names}


@pytest.fixture
def spread(saved_target) -> Target:
    return Target.load(saved_target, device_map=spread_map("model.layers.1", "model.layers.3"))


def test_a_target_spread_over_devices_is_the_same_target(spread, saved_target):
    whole, ids = Target.load(saved_target), torch.tensor([[1, 5, 9, 30, 2]])
    assert spread.is_spread and not whole.is_spread and spread.layers[1].mlp.up_proj.weight.is_meta
    assert spread.fingerprint == whole.fingerprint and spread.device == whole.device
    ours, theirs = (target.forward(ids, feature_layers=(1, 2)) for target in (spread.to("cpu"), whole))
    assert torch.equal(ours.features, theirs.features) and torch.equal(ours.post_norm, theirs.post_norm)
    assert torch.equal(spread.logits(ours.post_norm), whole.logits(theirs.post_norm))
    assert torch.equal(spread.embed(ids), whole.embed(ids))


def test_a_spread_target_stays_as_stored(saved_target):
    told = message(Target.load, saved_target, dtype="bfloat16", device_map="auto")
    assert told == "target.dtype bfloat16: with target.device_map weights stay as stored: leave it at auto"


@pytest.mark.parametrize(
    ("offloaded", "why"),
    [
        (["lm_head"], "its weight model.layers.1.mlp.up_proj.weight has"),
        (["lm_head", "model.layers.1"], "computed in float32 its states have"),
    ],
)
def test_a_target_is_checked_where_its_output_layer_is_offloaded(offloaded, why, saved_target, tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(saved_target, folder)
    assert Target.load(folder, device_map=spread_map(*offloaded)).output_layer.weight.is_meta
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    told = message(Target.load, folder, device_map=spread_map(*offloaded))
    assert told == f"target {folder}: {why} values that are not finite"


# What it never runs


class Planted:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_weights_in_a_pickle_are_refused_unread(saved_target, tmp_path):
    shutil.copytree(saved_target, tmp_path / "target")
    (tmp_path / "target" / "model.safetensors").unlink()
    (tmp_path / "target" / "pytorch_model.bin").write_bytes(pickle.dumps(Planted(tmp_path / "ran")))
    said = "weights in pytorch_model.bin, a pickle, are not read: convert them to safetensors"
    assert message(Target.load, tmp_path / "target") == f"target {tmp_path / 'target'}: {said}"
    assert not (tmp_path / "ran").exists()


def test_code_in_a_models_folder_runs_only_where_it_is_trusted(saved_target, tmp_path, monkeypatch):
    folder = tmp_path / "target"
    shutil.copytree(saved_target, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "planted", "auto_map": {"AutoConfig": "planted.Planted"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "planted.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked instead of refused"))
    refused = message(Target.load, folder)
    assert "comes with code of its own" in refused and "HEADSTART_TRUST_REMOTE_CODE=1" in refused
    assert not (tmp_path / "ran").exists()
    monkeypatch.setenv("HEADSTART_TRUST_REMOTE_CODE", "1")
    message(Target.load, folder)  # there is no class in it
    assert (tmp_path / "ran").exists(), "as the refusal says"


def test_the_tokenizer_is_loaded_as_its_target_was(saved_target, monkeypatch):
    """Of the same revision, and with code of its own only where the target may have some."""
    asked = []

    def load(path, **how):
        asked.append((path, how))

    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", load)
    how = {"revision": "abc", "trust_remote_code": True}
    _ = Target.load(saved_target, **how).tokenizer
    _ = load_skeleton(TargetConfig(path=str(saved_target), **how)).tokenizer
    _ = Target.load(saved_target).tokenizer
    plain = {"revision": None, "trust_remote_code": False}
    assert asked == [(str(saved_target), how), (str(saved_target), how), (str(saved_target), plain)]


def test_the_dtype_is_chosen_of_the_target_that_is_loaded(saved_target, monkeypatch):
    """As the tokenizer: of the same revision, and with code of its own."""
    read, asked = loading.AutoConfig.from_pretrained, []

    def noting(path, **how):
        asked.append(how)
        return read(path, **how)

    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", noting)
    how = {"revision": "abc", "trust_remote_code": True}
    with_default_dtype(TargetConfig(path=str(saved_target), **how), "cpu")
    assert asked and all(given == how for given in asked)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/outside.safetensors", "deep/inside.safetensors", 7])
def test_an_index_names_files_of_its_own_folder_alone(name, tmp_path):
    (tmp_path / "target").mkdir()
    save_file({"secret": torch.ones(2)}, tmp_path / "outside.safetensors")
    index = tmp_path / "target" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"secret": name}}))
    with pytest.raises(BadInput, match=r"model.safetensors.index.json: n"):
        indexed_tensors(tmp_path / "target")


def test_the_context_window_is_known_by_its_other_names():
    config = MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=61, max_seq_len=40)
    assert Target.of(MptForCausalLM(config), name="mpt", fingerprint="").num_positions == 40
