"""The kernels for bf16 on a CPU compute what the model's own layers do, as near to fp32 as those, through caches,
batches and trees; and a token's states do not depend on what is read with it."""

import ctypes
import mmap
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from headstart.targets.caches.cache import SlotCache
from headstart.targets.cpu import build, packing, products, structs
from headstart.targets.cpu.build import kernels
from headstart.targets.cpu.decoder import CpuDecoder
from headstart.targets.cpu.joined_decoder import has_known_layers
from headstart.targets.cpu.packing import multiply_experts, pack_linears
from headstart.targets.cpu.products import best, blocked, multiply
from headstart.targets.target import Target
from kinds import KINDS
from torch import nn

STATISTICS = Path("/proc/self/statm")
needs_kernels = pytest.mark.skipif(kernels() is None, reason="no kernels for this processor, or no compiler")
in_each_way = pytest.mark.usefixtures("way")
# of the kinds of targets those that differ most: norms, ropes, windows, caps, biases, sinks, scales, parallel layers,
# experts
KNOWN = ["qwen2", "gemma2_softcap_low", "olmo2", "cohere2", "granite_swa", "qwen3_moe"]
MORE = "llama llama_bias llama_rope_dynamic llama_rope_yarn mistral ministral qwen2_window qwen3 gemma phi3".split()
MORE += "phi3_longrope phi4mini_partial glm granite granite_rope_bias olmo3 smollm3 cohere exaone4 ernie4_5".split()
MORE += "vaultgemma seed_oss helium cwm gemma3_text glm4 mixtral mixtral_window olmoe".split()
WAYS = [(name, widens) for name in build.supported_sets() for widens in ([False, True] if "bf16" in name else [True])]


@pytest.fixture(params=WAYS, ids=lambda way: f"{way[0]}-{'fp32' if way[1] else 'pairs'}")
def way(request, monkeypatch):
    """Every instruction set of this processor; with bf16 instructions both ways in which they multiply, of which a
    processor's maker decides otherwise."""
    if kernels() is None:
        pytest.skip("no compiler")
    name, widens = request.param
    monkeypatch.setenv(build.VARIABLE, name)
    library = kernels()
    assert library is not None
    before = library.widen(widens)
    yield
    library.widen(before)


@pytest.fixture(scope="module", params=[*KNOWN, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def targets(request):
    """The same weights in fp32, and in bf16 as it decodes on a CPU."""
    wide, narrow = KINDS[request.param].model(), cast(Any, KINDS[request.param].model())
    with torch.no_grad():
        for parameter in wide.parameters():
            parameter.copy_((parameter * 0.5 if parameter.ndim > 1 else parameter).to(torch.bfloat16))
    narrow.load_state_dict(wide.state_dict())
    return Target.of(wide, name="wide", fingerprint=""), Target.of(
        narrow.to(torch.bfloat16), name="narrow", fingerprint=""
    )


def read(target, ids, split, *, layers=(1, 3)):
    """Post-norm states, features and logits of ids [B, T], read in pieces of these lengths through a cache."""
    cache, outputs, start = target.new_cache(64), [], 0
    for width in split:
        positions = torch.arange(start, start + width).expand(len(ids), -1)
        part, start = ids[:, start : start + width], start + width
        outputs.append(target.forward(part, feature_layers=layers, cache=cache, positions=positions, extent=start))
    post_norm = torch.cat([output.post_norm for output in outputs], 1)
    return post_norm, torch.cat([output.features for output in outputs], 1), target.logits(post_norm)


@in_each_way
@torch.no_grad()
def test_whole_texts_are_read_as_they_are_decoded(targets, monkeypatch):
    """To the bit, and whatever is beside a text: so a head learns from the states that it will draft from."""
    _, narrow = targets
    ids = torch.randint(3, 61, (3, 20), generator=torch.Generator().manual_seed(0))
    post_norm, features, _ = read(narrow, ids, (1,) * 20)
    whole = narrow.read_texts(ids, feature_layers=(1, 3))
    assert torch.equal(whole.post_norm, post_norm) and torch.equal(whole.features, features)
    shorter = narrow.read_texts(ids[1:, :12], feature_layers=(1, 3))
    assert torch.equal(shorter.post_norm, post_norm[1:, :12])
    monkeypatch.setattr(CpuDecoder, "most_tokens", 19)
    monkeypatch.setattr(SlotCache, "seek", None)
    plain = narrow.read_texts(ids, feature_layers=(1, 3))
    assert (plain.post_norm - post_norm).float().norm() < 0.1 * post_norm.float().norm()


@in_each_way
@pytest.mark.parametrize("split", [(20,), (12, 1, 6, 1), (1,) * 20], ids=str)
@torch.no_grad()
def test_states_features_and_logits_are_the_models_own(targets, split):
    wide, narrow = targets
    ids = torch.randint(3, 61, (2, 20), generator=torch.Generator().manual_seed(0))
    exact, ours = read(wide, ids, split), read(narrow, ids, split)
    assert isinstance(narrow.decoder, CpuDecoder) and str(narrow.kernels).endswith(", all layers")
    theirs = narrow.model(ids, output_hidden_states=True)
    their_features = torch.stack([theirs.hidden_states[i] for i in (1, 3)], 2)
    for true, found, plain in zip(exact, ours, (theirs.hidden_states[-1], their_features, theirs.logits), strict=True):
        error, usual = ((states.float() - true).norm(dim=-1) for states in (found, plain))
        if has_mixtures(narrow):  # a token goes elsewhere where two experts have the same score but for rounding
            error, usual = error.median(), usual.median()
        assert error.norm() <= 1.5 * usual.norm() + 1e-3, "no further from fp32 than the model in bf16"


def has_mixtures(target):
    return any(packing.has_experts(module) for module in target.model.modules())


@in_each_way
@torch.no_grad()
def test_a_tokens_states_do_not_depend_on_what_is_read_with_it(targets):
    """So verifying drafts gives what decoding token by token gives, bit for bit: in any width, batch and order."""
    _, narrow = targets
    ids = torch.randint(3, 61, (3, 20), generator=torch.Generator().manual_seed(0))
    alone = [read(narrow, row[None], (1,) * 20) for row in ids]
    for split in ((20,), (12, 1, 6, 1), (3, 17), (9, 11)):
        together = read(narrow, ids, split)
        for i, one in enumerate(alone):
            assert all(torch.equal(part[i], own[0]) for part, own in zip(together, one, strict=True))


@in_each_way
@torch.no_grad()
def test_many_tokens_at_once_have_the_states_that_few_have(tiny_model):
    target = Target.of(tiny_model("llama").to(torch.bfloat16), name="narrow", fingerprint="")
    ids = torch.randint(3, 61, (12, 40), generator=torch.Generator().manual_seed(0))
    together, few = read(target, ids, (40,)), read(target, ids, (13, 20, 7))
    assert isinstance(target.decoder, CpuDecoder) and ids.numel() > 256 > 12 * 20
    assert all(torch.equal(one, other) for one, other in zip(together, few, strict=True))


@in_each_way
@pytest.mark.skipif(not STATISTICS.is_file(), reason="resident memory is read from /proc")
def test_many_rows_are_multiplied_in_the_memory_of_few():
    """A thread that widens rows keeps what they took."""
    x, weight = torch.ones(2**16, 512, dtype=torch.bfloat16), blocked(torch.ones(32, 512, dtype=torch.bfloat16))
    before = resident_bytes()
    found = multiply(x, weight, 32)
    assert (found == 512).all() and resident_bytes() - before < x.numel() * 2


def resident_bytes():
    return int(STATISTICS.read_text().split()[1]) * mmap.PAGESIZE


@in_each_way
@torch.no_grad()
def test_a_path_through_a_tree_has_the_states_of_a_chain(targets):
    """Its nodes lie in slots with others between them, which are passed over, and not added as zeros."""
    _, narrow = targets
    ids = torch.randint(3, 61, (1, 14), generator=torch.Generator().manual_seed(1))
    wanted = read(narrow, ids, (1,) * 14)[0][:, 10:]
    cache = narrow.new_cache(64)
    narrow.forward(ids[:, :10], feature_layers=(), cache=cache, positions=torch.arange(10)[None], extent=10)
    # a root, two children, of the second of them one: the path is root, second, its child
    nodes = torch.tensor([[ids[0, 10], 7, ids[0, 11], ids[0, 12]]])
    seen = torch.tensor([[[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 1]]]).bool()
    positions = torch.tensor([[10, 11, 11, 12]])
    output = narrow.forward(nodes, feature_layers=(), cache=cache, positions=positions, extent=14, seen=seen)
    assert torch.equal(output.post_norm[:, [0, 2, 3]], wanted[:, :3])


@in_each_way
@pytest.mark.parametrize("head_dim", [8, 80, 256])
@torch.no_grad()
def test_what_reads_the_same_keys_together_gives_what_each_gives_alone(tiny_model, head_dim):
    """Three heads per key head, and a tree behind 37 tokens; heads of sizes of which unequal numbers go together."""
    sizes = {"hidden_size": 96, "head_dim": head_dim, "num_attention_heads": 6, "num_hidden_layers": 2}
    wide = tiny_model("llama", **sizes)
    narrow = tiny_model("llama", **sizes)
    narrow.load_state_dict(wide.state_dict())
    target = Target.of(narrow.to(torch.bfloat16), name="narrow", fingerprint="")
    ids = torch.randint(3, 61, (2, 45), generator=torch.Generator().manual_seed(0))
    alone = read(target, ids, (1,) * 45, layers=(1,))
    for split in ((45,), (37, 8), (36, 5, 4)):
        parts = read(target, ids, split, layers=(1,))
        assert all(torch.equal(part, own) for part, own in zip(parts, alone, strict=True))
    cache = target.new_cache(64)
    target.forward(ids[:, :37], feature_layers=(), cache=cache, positions=torch.arange(37).expand(2, -1), extent=37)
    # behind the root two chains of three by turns, of which the second goes on with the text
    nodes = torch.stack([ids[:, 37], *(column for i in (38, 39, 40) for column in (ids[:, 0], ids[:, i]))], 1)
    is_seen = (torch.arange(7)[:, None] - torch.arange(1, 7)) % 2 == 0
    seen = (is_seen & (torch.arange(1, 7) <= torch.arange(7)[:, None])).expand(2, -1, -1).clone()
    seen[:, 0] = False
    positions = (37 + torch.tensor([0, 1, 1, 2, 2, 3, 3])).expand(2, -1)
    tree = target.forward(nodes, feature_layers=(), cache=cache, positions=positions, extent=44, seen=seen)
    assert torch.equal(tree.post_norm[:, [0, 2, 4, 6]], alone[0][:, 37:41])
    exact, theirs = wide(ids).logits, narrow(ids).logits
    assert (alone[2].float() - exact).norm() <= 1.5 * (theirs.float() - exact).norm() + 1e-3


@in_each_way
@torch.no_grad()
def test_choices_are_the_argmax_of_the_logits_with_the_states_or_by_themselves(targets):
    ids = torch.randint(3, 61, (3, 20), generator=torch.Generator().manual_seed(3))
    for target in targets:
        cache, where = target.new_cache(64), {"positions": torch.arange(20).expand(3, -1), "extent": 20}
        output = target.forward(ids, cache=cache, **where, chooses=True)
        wanted = target.logits(output.post_norm).argmax(-1)
        assert torch.equal(target.best(output.post_norm), wanted)
        if isinstance(target.decoder, CpuDecoder):  # also where values that differ are the same logits, by a cap
            assert output.best is not None and torch.equal(output.best, wanted)
            assert torch.equal(target.best(output.post_norm, 7), target.logits(output.post_norm)[..., :7].argmax(-1))
        assert target.forward(ids, cache=cache, **where).best is None, "it was not asked for"


@in_each_way
def test_of_logits_that_tie_the_first_is_best():
    with torch.no_grad():
        for size in (1, 15, 47, 1024):
            logits = torch.zeros(2, 3, size, dtype=torch.bfloat16)
            logits[0, 1, size // 2 :] = 3.0
            logits[1] = -5.0
            assert torch.equal(best(logits), logits.argmax(-1))


@needs_kernels
@torch.no_grad()
def test_other_layers_are_left_to_the_model_with_products_of_our_kernels(tiny_model, monkeypatch):
    for model, dtype, num_linears, num_experts in (
        (tiny_model("gpt_neox"), torch.bfloat16, 17, 0),
        (KINDS["qwen2_moe"].model(), torch.bfloat16, 33, 4),  # with two products for the experts of a layer
        (tiny_model("llama"), torch.float32, 0, 0),
    ):
        target = Target.of(cast(Any, model).to(dtype), name="", fingerprint="")
        ids = torch.randint(3, 61, (1, 9), generator=torch.Generator().manual_seed(2))
        wanted = target.model(ids).logits.float()
        assert target.decoder is None and target.num_packed == num_linears + num_experts
        calls = []
        for own in (multiply, multiply_experts):
            counted = lambda *inputs, own=own, calls=calls: calls.append(own) or own(*inputs)  # noqa: E731
            monkeypatch.setattr(packing, own.__name__, counted)
        logits = read(target, ids, (9,))[2]
        assert (calls.count(multiply), calls.count(multiply_experts)) == (num_linears, 2 * num_experts)
        assert target.kernels == (f"{build.instruction_set()}, products only" if num_linears else None)
        assert (logits - wanted).norm() < 0.1 * wanted.norm()


def test_layers_of_a_models_own_code_are_no_known_ones_whatever_they_are_called(tiny_model):
    model = tiny_model("llama")
    layers, given = model.model.layers, (model.config, model.lm_head.weight)
    assert has_known_layers(layers, *given)
    own = type("LlamaDecoderLayer", (type(layers[0]),), {"__module__": "transformers_modules.own.modeling_own"})
    for layer in layers:
        layer.__class__ = own
    assert not has_known_layers(layers, *given)


@in_each_way
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "aria_text", "nemotron_h"])  # transposed, biased, not gated
@torch.no_grad()
def test_experts_give_what_their_own_code_gives_and_each_token_what_it_gives_alone(kind):
    experts: Any = next(part for part in KINDS[kind].model().bfloat16().modules() if hasattr(part, "is_transposed"))
    source = torch.Generator().manual_seed(0)
    x = torch.randn(11, packing.experts_of(experts)[0].shape[2], generator=source).bfloat16()
    indices = torch.rand(11, 4, generator=source).argsort(-1)[:, :2]
    shares = torch.rand(11, 2, generator=source).bfloat16()
    wanted = experts(x, indices, shares)
    assert pack_linears(experts) >= 1 and "forward" in vars(experts)
    found = experts(x, indices, shares)
    assert (found - wanted).float().norm() < 0.02 * wanted.float().norm()
    for i in range(len(x)):
        assert torch.equal(experts(x[i : i + 1], indices[i : i + 1], shares[i : i + 1])[0], found[i])


@needs_kernels
def test_experts_that_compute_otherwise_than_they_look_are_left_to_the_model(monkeypatch):
    experts: Any = next(part for part in KINDS["mixtral"].model().bfloat16().modules() if hasattr(part, "has_gate"))
    plain = type(experts).forward
    monkeypatch.setattr(type(experts), "forward", lambda self, *given: 2 * plain(self, *given))
    assert pack_linears(experts) == 0
    monkeypatch.undo()
    assert pack_linears(experts) == 1


@needs_kernels
@torch.no_grad()
def test_layers_that_compute_otherwise_than_they_look_are_left_to_the_model(tiny_model, monkeypatch):
    """As one does that has all that Llama has: what its kernels would compute is compared when they are made."""
    model = tiny_model("llama").to(torch.bfloat16)
    first = model.model.layers[2].self_attn
    plain = first.forward
    for other in (lambda **how: plain(**{**how, "position_embeddings": swapped(how)}), None):
        monkeypatch.setattr(first, "forward", other) if other else monkeypatch.undo()
        target = Target.of(model, name="otherwise", fingerprint="")
        assert target.may_use(CpuDecoder) and isinstance(target.decoder, CpuDecoder) is (other is None)


def swapped(how):
    """The rotary embedding of the positions in the other direction."""
    cos, sin = how["position_embeddings"]
    return cos, -2 * sin


@in_each_way
@pytest.mark.parametrize("num_rows", [1, 5, 8, 9, 21])
@pytest.mark.parametrize(("num_outputs", "size"), [(32, 64), (47, 30), (1, 2), (100, 576)])
def test_a_product_is_the_product_for_any_sizes(num_rows, num_outputs, size):
    source = torch.Generator().manual_seed(num_rows)
    x, weight = (torch.randn(n, size, generator=source).bfloat16() for n in (num_rows, num_outputs))
    exact = x.double() @ weight.double().T
    found = multiply(x, blocked(weight), num_outputs)
    assert found.shape == exact.shape
    torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=1e-3 * size**0.5)


@in_each_way
def test_packed_linears_give_the_same_product_and_leave_gradients_alone():
    layers = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 48, bias=False)).to(torch.bfloat16)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        wanted = layers(x)
    pack_linears(layers)
    with torch.no_grad():
        assert torch.allclose(layers(x), wanted, rtol=0.02, atol=0.02)
    layers(x).sum().backward()
    assert all(parameter.grad is not None for parameter in layers.parameters())


@needs_kernels
def test_packed_linears_without_gradients_are_used_while_others_are_trained(monkeypatch):
    frozen = nn.Linear(64, 32).to(torch.bfloat16).requires_grad_(False)
    pack_linears(frozen)
    calls = []
    monkeypatch.setattr(packing, "multiply", lambda *inputs: calls.append(1) or multiply(*inputs))
    frozen(torch.randn(5, 64, dtype=torch.bfloat16))
    assert len(calls) == 1
    x = torch.randn(5, 64, dtype=torch.bfloat16, requires_grad=True)
    frozen(x).sum().backward()
    assert len(calls) == 1 and x.grad is not None, "as a trained layer below needs it"


@needs_kernels
def test_without_a_compiler_the_model_decodes_itself_and_that_is_said(monkeypatch, tmp_path, tiny_model):
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    build._loaded.cache_clear()
    target = Target.of(tiny_model("llama").to(torch.bfloat16), name="plain", fingerprint="")
    with pytest.warns(UserWarning, match="without kernels of its own.*(g\\+\\+|clang\\+\\+) is not on PATH"):
        assert target.decoder is None
    build._loaded.cache_clear()
    assert not (tmp_path / "kernels").exists()


def test_products_that_torch_would_emulate_are_those_of_fp32_rounded():
    layer, x = nn.Linear(64, 48).bfloat16(), torch.randn(5, 64).bfloat16()
    wanted = F.linear(x.float(), layer.weight.float(), layer.bias.float()).bfloat16()
    with products.WideProducts():
        assert torch.equal(layer(x), wanted)
        layer(x).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.bfloat16


@needs_kernels
def test_structs_of_another_size_are_refused_when_the_kernels_are_loaded(monkeypatch):
    library = kernels()
    assert library is not None
    structs.check_sizes(library)

    class Longer(structs.Forward):
        _fields_ = [("one_more", ctypes.c_int64)]

    monkeypatch.setattr(structs, "STRUCTS", (structs.Layer, Longer, structs.Chain))
    with pytest.raises(AssertionError, match="Longer"):
        structs.check_sizes(library)
