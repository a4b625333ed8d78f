"""A target read without its layers is, in all that heads read of it, the whole one, on every kind of target."""

import pytest
import torch
from headstart.configs.errors import BadInput
from headstart.heads.loading import TargetConfig
from headstart.heads.target import Target
from headstart.heads.targets.bare import BareTarget
from kind import quietly
from kinds import FAST, KINDS

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in KINDS if name not in FAST]


@pytest.mark.parametrize("name", [*FAST, *SLOW])
@torch.no_grad()
def test_without_layers_a_target_reads_and_writes_the_same(name, tmp_path):
    with quietly():
        KINDS[name].model().to(torch.bfloat16).save_pretrained(tmp_path)
    for dtype in ("auto", "float32"):
        try:
            whole = Target.load(tmp_path, dtype=dtype)
        except BadInput as error:
            pytest.skip(str(error))
        bare = BareTarget.read(TargetConfig(path=str(tmp_path), dtype=dtype), whole.output_use)
        known = [(each.fingerprint, each.dtype, each.eos_token_ids) for each in (whole, bare)]
        assert known[0] == known[1]
        ids = torch.arange(whole.vocab_size)[None]
        assert torch.equal(bare.embed(ids), whole.embed(ids)) and bare.embed(ids).dtype == whole.embed(ids).dtype
        assert torch.equal(bare.final_norm_scale(), whole.final_norm_scale())
        states = torch.randn(3, 5, whole.hidden_size, generator=torch.Generator().manual_seed(0))
        assert torch.equal(bare.logits(states), whole.logits(states))
        ours, theirs = bare.output_layer.weight, bare.input_embedding.weight
        assert (ours is theirs) == (whole.output_layer.weight is whole.input_embedding.weight)
        held = {id(value) for part in bare.parts for value in part.state_dict(keep_vars=True).values()}
        others = [value for value in bare.model.parameters() if id(value) not in held]
        assert all(value.device.type == "meta" for value in others if value.ndim > 1), "no other matrix is held"
        assert not any(value.requires_grad for value in bare.model.parameters())
