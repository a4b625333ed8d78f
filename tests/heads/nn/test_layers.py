"""What heads are built from."""

import pytest
import torch
import torch.nn.functional as F
from headstart.heads.nn.layers import RMSNorm, llama_config
from transformers import Mamba2Config, MambaConfig


@pytest.mark.parametrize("shape", [(0, 8), (5, 8), (2, 3, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_training_is_torchs_with_its_gradients(shape, dtype):
    source = torch.Generator().manual_seed(2)
    x = torch.randn(shape, generator=source).to(dtype).requires_grad_()
    norm = RMSNorm(8, eps=1e-2)
    norm.weight.data = torch.randn(8, generator=source)
    wanted = F.rms_norm(x.float(), (8,), norm.weight, 1e-2).to(dtype)
    ours = norm(x)
    grad = torch.randn(shape, generator=source).to(dtype)
    with torch.no_grad():
        assert torch.equal(norm(x), wanted)
    rtol = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(ours, wanted, rtol=rtol, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):  # as the loss differentiates: no product is rounded
        got = torch.autograd.grad(ours, [x, norm.weight], grad)
    for one, other in zip(got, torch.autograd.grad(wanted, [x, norm.weight], grad), strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=1e-5)
    assert torch.autograd.grad(norm(x.detach()).sum(), norm.weight)[0].isfinite().all()


def test_heads_of_64_channels_fill_the_hidden_size_of_a_target_without_attention():
    """Mamba-2's own `head_dim` is of its state spaces."""
    config = llama_config(Mamba2Config(hidden_size=256, num_heads=16, head_dim=32))
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 4, 64)
    assert llama_config(MambaConfig(hidden_size=32)).head_dim == 32
