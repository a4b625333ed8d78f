"""A target is taken apart without running it: what is read, and what it says of itself, comes from modules and config.

So a target costs nothing before something is asked of it, on torch's meta device, spread over processes or in a server.
"""

import pytest
from headstart.data_pipelines.served.reading import ServedTarget
from headstart.targets.bare import BareTarget
from headstart.targets.frozen_model import OutputUse
from headstart.targets.loading import TargetConfig
from headstart.targets.sharded import ShardedTarget
from headstart.targets.skeleton import load_skeleton
from headstart.targets.target import Target
from torch.nn.modules.module import register_module_forward_pre_hook


@pytest.fixture
def forwards():
    """The modules that are run, in order."""
    run: list[str] = []
    hook = register_module_forward_pre_hook(lambda module, args: run.append(type(module).__name__))
    yield run
    hook.remove()


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe", "qwen3_5"])
@pytest.mark.parametrize("kind", [Target, BareTarget, ServedTarget, ShardedTarget])
@pytest.mark.usefixtures("checking")
def test_a_constructor_runs_no_forward(kind, family, tiny_model, forwards):
    model = tiny_model(family)
    kind(model, name="tiny", fingerprint="")
    assert forwards == []
    Target.of(model, name="tiny", fingerprint="")
    assert forwards, "the check does"


@pytest.mark.parametrize("kind", [BareTarget, ServedTarget])
def test_no_forward_is_run_without_weights_or_without_layers(kind, saved_target, forwards):
    source = TargetConfig(path=str(saved_target))
    load_skeleton(source)
    kind.read(source, OutputUse())
    assert forwards == []
