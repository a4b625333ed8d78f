"""A stored target is read as its model would be, or the line says what is wrong with the file or the config."""

import math
from typing import Any

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.targets.bare import BareTarget
from headstart.targets.loading import TargetConfig
from headstart.targets.target import Target
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, XGLMConfig

pytestmark = pytest.mark.usefixtures("checking")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", [torch.float16, torch.float32])
def test_buffers_have_the_dtype_that_the_model_makes_them_in(stored, dtype, tmp_path):
    """XGLM's table of positions is a buffer that is added to embeddings."""
    config = XGLMConfig(
        vocab_size=61, d_model=32, ffn_dim=48, num_layers=2, attention_heads=4, max_position_embeddings=64
    )
    AutoModelForCausalLM.from_config(config).to(stored).save_pretrained(tmp_path)
    target = Target.load(tmp_path, dtype=dtype, device="cpu")
    assert target.base.embed_positions.weights.dtype == target.dtype and target.can_decode
    assert target.forward(torch.tensor([[1, 5, 9]])).post_norm.dtype == target.dtype


class Uncapped(Gemma2ForCausalLM):
    """Whose config names a cap of the logits that its forward does not apply."""

    def forward(self, *args, **kwargs):
        output, before = None, self.config.final_logit_softcapping
        self.config.final_logit_softcapping = None
        try:
            output = super().forward(*args, **kwargs)
        finally:
            self.config.final_logit_softcapping = before
        return output


def gemma2(kind: type[Gemma2ForCausalLM]) -> Gemma2ForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=8)
    return kind(Gemma2Config(**sizes, final_logit_softcapping=0.5)).eval()


@pytest.mark.parametrize(("kind", "cap"), [(Uncapped, None), (Gemma2ForCausalLM, 0.5)])
def test_a_cap_of_logits_counts_only_where_the_model_applies_it(kind, cap, tmp_path):
    target = Target.of(gemma2(kind), name="tiny", fingerprint="")
    assert target.logit_cap == cap and target.output_use.is_capped == (cap is not None)
    gemma2(Gemma2ForCausalLM).save_pretrained(tmp_path)
    assert BareTarget.read(TargetConfig(path=str(tmp_path)), target.output_use).logit_cap == cap


def test_a_weight_that_is_not_finite_is_named(tiny_model):
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = math.nan
    line = "^target tiny: its weight model.layers.1.mlp.up_proj.weight has values that are not finite$"
    with pytest.raises(BadInput, match=line):
        Target.of(model, name="tiny", fingerprint="")
