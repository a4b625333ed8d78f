"""Each way in which an exported head can be damaged is found and named; engines serve most of them without a word."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from damaging import at_first, drop, key, put, rewritten
from headstart.base.errors import BadInput
from headstart.engines.check import check_folder
from json_places import changed, places_in
from safetensors.torch import load_file, save_file

MEDUSA, EAGLE3 = {"num_depths": 2}, {"draft_vocab_size": 24}
BLOCK = {"num_depths": 3, "markov_rank": 8}
KINDS = {
    "eagle": ("eagle", "vllm", {}),
    "eagle3": ("eagle3", "vllm", EAGLE3),
    "deep": ("eagle3", "vllm", {**EAGLE3, "num_layers": 2}),
    "fp8": ("eagle3", "vllm", {**EAGLE3, "dtype": "fp8"}),
    "speculators": ("eagle3", "speculators", EAGLE3),
    "medusa": ("medusa", "vllm", MEDUSA),
    "published": ("medusa", "", MEDUSA),  # our own folders have its names
    "cut eagle": ("eagle", "vllm", EAGLE3),
    "draft_lm": ("draft_lm", "hf", {}),
    "block": ("block", "vllm", BLOCK),
    "block in speculators": ("block", "speculators", BLOCK),
}


@pytest.fixture
def exported(sound):
    """exported("eagle3"): a sound folder, made once."""
    return lambda kind: sound(*KINDS[kind][:2], **KINDS[kind][2])


@pytest.fixture
def copied(copied):
    """copied("eagle3"): a copy of the sound folder."""
    return lambda kind: copied(*KINDS[kind][:2], **KINDS[kind][2])


@pytest.fixture
def damaged(copied):
    """damaged("eagle3", fault): a copy of the sound folder with a fault in it."""
    return lambda kind, fault: rewritten(copied(kind), fault)


def shifted_ids(config, tensors):
    ids = [i + 1 for i in config["eagle_aux_hidden_state_layer_ids"]]
    config["eagle_aux_hidden_state_layer_ids"] = ids
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [i - 1 for i in ids]


IDS, NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config.eagle_aux_hidden_state_layer_ids"
O_PROJ, Q_PROJ = "midlayer.self_attn.o_proj.weight", "midlayer.self_attn.q_proj.weight"
FAULTS = {
    "missing tensor": ("eagle3", drop(O_PROJ), rf"tensor {O_PROJ}: missing, expected \[32, 32\]"),
    "no bias for SGLang": ("eagle", drop("fc.bias"), "tensor fc.bias: missing"),
    "two norms that differ": ("deep", put("layers.1.hidden_norm.weight", lambda x: x * 2), "SGLang reads the first"),
    "transposed": ("eagle3", put(Q_PROJ, lambda x: x.T), r"expected \[32, 64\], found \[64, 32\]: transposed"),
    "wrong width": ("eagle3", put("fc.weight", lambda x: x[:, :64]), r"fc.weight: expected \[32, 96\], found"),
    "extra tensor": ("eagle3", put("rotary.inv_freq", lambda _: torch.ones(4)), "the layout has no such tensor"),
    "own embedding": ("eagle3", put("embed_tokens.weight", lambda _: torch.ones(61, 32)), "SGLang puts the target's"),
    "own output layer": ("eagle", put("lm_head.weight", lambda _: torch.ones(61, 32)), "output layer is the target's"),
    "input norm": ("eagle", put("layers.0.input_layernorm.weight", lambda _: torch.ones(32)), "does not normalise"),
    "trained bias": ("eagle", put("fc.bias", lambda x: x + 1), "fc.bias: not zero: vLLM leaves it out"),
    "NaN": ("eagle3", put(O_PROJ, at_first(float("nan"))), "1 of 1024 values are NaN"),
    "infinite": ("medusa", put("lm_heads.0.weight", at_first(float("inf"))), "1 of 1952 values are infinite"),
    "mixed dtypes": ("eagle3", put("fc.weight", lambda x: x.bfloat16()), "several dtypes: bfloat16, float32"),
    "quantised": ("eagle3", put("fc.weight", lambda x: x.char()), "fc.weight: of dtype I8, expected floating point"),
    "another dtype than said": ("eagle3", key("torch_dtype", "bfloat16"), "torch_dtype: bfloat16, but the weights are"),
    "ids in place of offsets": ("eagle3", put("d2t", lambda x: x + torch.arange(24)), "0..60; it holds offsets"),
    "negative target": ("eagle3", put("d2t", lambda x: x - 9), "draft token 0 is target token -6, outside"),
    "map does not ascend": ("eagle3", put("d2t", lambda x: x.flip(0)), "target tokens do not ascend"),
    "map of floats": ("eagle3", put("d2t", lambda x: x.float()), "tensor d2t: of dtype F32, expected I64"),
    "short map": ("eagle3", put("d2t", lambda x: x[:23]), r"tensor d2t: expected \[24\], found \[23\]"),
    "mask is not the map's": ("eagle3", put("t2d", at_first(True)), "t2d: marks 25 tokens, and not those 24"),
    "mask of numbers": ("eagle3", put("t2d", lambda x: x.long()), "tensor t2d: of dtype I64, expected BOOL"),
    "ids of one convention": ("eagle3", key(NESTED, [1, 2, 3]), r"\[1, 2, 3\], expected \[0, 1, 2\]: SGLang counts"),
    "ids off by one, both": ("eagle3", shifted_ids, r"\[2, 3, 4\], but the head was trained on \[1, 2, 3\]"),
    "ids out of order": ("eagle3", key(IDS, [3, 2, 1]), "do not ascend; vLLM sorts them"),
    "nested ids only": ("eagle3", key(IDS, ...), "expected layer numbers at the top, where vLLM reads them"),
    "fewer ids than features": ("eagle3", key("num_aux_hidden_states", 2), "2 for 3 ids; vLLM sizes fc by it"),
    "features not used": ("eagle3", key("eagle_config.use_aux_hidden_state", ...), "SGLang reads no features"),
    "no draft vocabulary": ("eagle3", key("draft_vocab_size", ...), "draft_vocab_size: missing; SGLang needs the key"),
    "too large a vocabulary": ("eagle3", key("draft_vocab_size", 99), "99, expected 1 to vocab_size 61"),
    "null where a number is": ("eagle3", key("target_hidden_size", None), "must be 32 or not there"),
    "residual not said": ("speculators", key("norm_before_residual", ...), "norm_before_residual: must be there"),
    "norms said once": ("speculators", key("transformer_layer_config.norm_output", ...), "vLLM starts from that"),
    "no target": ("speculators", key("speculators_config.verifier", {}), "vLLM finds the target by it"),
    "a kind of model": ("speculators", key("model_type", "speculator_model"), "vLLM asks transformers for such"),
    "another algorithm": ("speculators", key("speculators_model_type", "mtp"), "expected 'eagle3', found 'mtp'"),
    "one architecture": ("eagle", key("architectures", ["LlamaForCausalLMEagle"]), "with LlamaForCausalLM behind it"),
    "another architecture": ("eagle3", key("architectures", ["LlamaForCausalLM"]), "the only name that every engine"),
    "another kind": ("eagle3", key("model_type", "qwen3"), "both engines have the draft as a Llama"),
    "bias of the attention": ("eagle", key("bias", True), "bias: vLLM takes it for a bias of the attention"),
    "attention bias": ("eagle3", key("attention_bias", True), "attention_bias: expected False, found True"),
    "no epsilon": ("eagle3", key("rms_norm_eps", ...), "rms_norm_eps: missing"),
    "two rotations": ("eagle3", key("rope_theta", 1e6), "1000000.0, but rope_parameters.rope_theta 500.0"),
    "scaling of one": ("eagle3", key("rope_scaling", {"rope_type": "yarn"}), "of type yarn, but rope_parameters of"),
    "mrope": ("eagle3", key("rope_parameters.mrope_section", [1, 1]), "mrope_section: a plain layer has no such"),
    "no size": ("eagle3", key("hidden_size", None), "hidden_size: expected a count, found None"),
    "more layers than there are": ("eagle3", key("num_hidden_layers", 2), "layers.1.mlp.up_proj.weight: missing"),
    "more heads than there are": ("medusa", key("num_heads", 3), "tensor blocks.2.layers.0.weight: missing"),
    "fewer heads than there are": ("medusa", key("num_heads", 1), "tensor blocks.1.layers.0.weight: must not be there"),
    "biases dropped": ("medusa", key("medusa_fc_bias", ...), "vLLM drops the blocks' biases without it"),
    "counts that differ": ("published", key("medusa_num_heads", 3), "medusa_num_heads: 3, but num_heads 2"),
    "truncated vocabulary": ("medusa", key("truncated_vocab_size", 30), "heads draft all 61 tokens"),
    "code of the folder": ("draft_lm", key("auto_map", {"AutoModel": "x.Y"}), "asks engines to run code of the folder"),
    "another model": ("draft_lm", key("architectures", ["Qwen2ForCausalLM"]), "expected .'LlamaForCausalLM'."),
    "unknown model": ("draft_lm", key("model_type", "llamas"), "transformers makes no model of it"),
    "said to be quantised": ("draft_lm", key("quantization_config", {"quant_method": "fp8"}), "weights are not quant"),
    "no scale": ("fp8", drop(f"{O_PROJ}_scale"), rf"tensor {O_PROJ}_scale: missing, expected \[32, 1\]"),
    "one matrix not in FP8": ("fp8", put(O_PROJ, lambda x: x.bfloat16()), "of dtype BF16, expected F8_E4M3"),
    "FP8 that is not said": ("fp8", key("quantization_config", ...), "of dtype F8_E4M3, expected floating point"),
    "FP8 of an output layer": ("fp8", key("quantization_config.ignore", []), "quantization_config.ignore: expected"),
}


# Faults of the files


def cut_off(name, size):
    """The first bytes of a file; below 0, all but the last."""

    def fault(folder):
        (folder / name).write_bytes((folder / name).read_bytes()[:size])

    return fault


def pickled(name):
    return lambda folder: torch.save({}, folder / name)


def second_file(folder):
    save_file({"base_model.lora_A.weight": torch.ones(2, 2)}, folder / "adapter_model.safetensors")


def index_of(file_of):
    """An index with the file of each tensor."""

    def fault(folder):
        files = {name: file_of(name) for name in load_file(folder / "model.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))

    return fault


def without(pattern):
    def fault(folder):
        for path in folder.glob(pattern):
            path.unlink()

    return fault


FIRST = "model-00001-of-00002.safetensors"
FAULTS_OF_FILES = {
    "no tokenizer": ("draft_lm", without("tokenizer*"), "tokenizer.json: missing"),
    "truncated file": ("eagle3", cut_off("model.safetensors", -100), "model.safetensors: not a whole safetensors file"),
    "pickle in place of safetensors": ("eagle3", pickled("model.safetensors"), "a pickle under that name"),
    "pickle beside": ("eagle3", pickled("pytorch_model.bin"), "pytorch_model.bin: a pickle, which can run code"),
    "no weights": ("eagle3", without("model.safetensors"), "no safetensors file in it"),
    "half a config": ("eagle3", cut_off("config.json", 200), "config.json: not JSON"),
    "another file that engines read": ("medusa", second_file, "base_model.lora_A.weight: must not be there"),
    "numbers for files": ("eagle3", index_of(lambda name: 3), "no index of tensors: weight_map[.].+ is no file name"),
    "missing shard": (
        "eagle3",
        index_of(lambda name: FIRST if "fc" in name else "model.safetensors"),
        f"names {FIRST}, which is not there",
    ),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_sound_folder_has_no_problem(copied, kind):
    assert check_folder(copied(kind)).problems == []


@pytest.mark.parametrize(("kind", "fault", "reason"), FAULTS.values(), ids=list(FAULTS))
def test_a_fault_is_found(damaged, kind, fault, reason):
    found_in(damaged(kind, fault), reason)


@pytest.mark.parametrize(("kind", "fault", "reason"), FAULTS_OF_FILES.values(), ids=list(FAULTS_OF_FILES))
def test_a_fault_of_the_files_is_found(copied, kind, fault, reason):
    folder = copied(kind)
    fault(folder)
    found_in(folder, reason)


def found_in(folder, reason):
    problems = check_folder(folder).problems
    assert any(re.search(reason, line) for line in problems), problems
    assert all("\n" not in line for line in problems)


@pytest.mark.parametrize(("to", "reasons"), [("", []), ("vllm", []), ("sglang", ["SGLang has no such layer"])])
def test_a_layer_that_sglang_has_not_is_a_fault_for_sglang_alone(damaged, to, reasons):
    problems = check_folder(damaged("eagle3", key("norm_before_residual", True)), to=to).problems
    assert [line.rpartition(": ")[2] for line in problems] == reasons


@pytest.mark.slow
def test_every_tensor_is_missed(exported, tmp_path):
    """Whichever is taken out of whichever layout."""
    for kind in KINDS:
        for name in load_file(exported(kind) / "model.safetensors"):
            folder = Path(shutil.copytree(exported(kind), tmp_path / "without"))
            rewritten(folder, drop(name))
            assert any(f"tensor {name}: missing" in line for line in check_folder(folder).problems), (kind, name)
            shutil.rmtree(folder)


def test_a_word_in_the_path_is_a_fault(copied, tmp_path):
    out = copied("medusa").rename(tmp_path / "medusa-for-EAGLE3")
    assert check_folder(out).problems == ["the path has `eagle3` in it: vLLM takes the head for another method"]


def test_what_is_no_head_is_refused(tmp_path, saved_target):
    with pytest.raises(BadInput, match="nowhere: no such folder"):
        check_folder(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="no config.json in it"):
        check_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "t5", "architectures": ["T5EncoderModel"]}')
    with pytest.raises(BadInput, match="neither its config nor its tensors are those of a head"):
        check_folder(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_a_value_of_any_other_type_is_a_problem_and_no_crash(kind, exported):
    path = exported(kind) / "config.json"
    text = path.read_text()
    sound = json.loads(text)
    try:
        for place in places_in(sound):
            for other in ("sixteen", ["x"], {"x": 1}, 2.5, 5):
                path.write_text(json.dumps(changed(sound, place, other)))
                try:
                    problems = check_folder(path.parent).problems
                except BadInput as error:
                    problems = [str(error)]
                assert all(problem and "\n" not in problem for problem in problems), (place, other)
    finally:
        path.write_text(text)


def test_a_nested_value_of_another_type_is_named(damaged):
    folder = damaged("speculators", key("speculators_config", 5))
    assert check_folder(folder).problems == ["config.json: speculators_config: expected an object, found 5"]
