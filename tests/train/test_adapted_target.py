"""Training on a target with a served adapter: on its own states, live or stored, and on from its base's head."""

import json

import pytest
from headstart.base.errors import BadInput
from headstart.engines.heads import head_record, load_head
from headstart.targets.target import Target
from run_files import losses


def test_states_are_those_of_the_adapted_target_and_of_no_other(run, features, world, lora):
    adapter = lora(world / "target")
    under = f"target.adapter={adapter}"
    of_base, of_adapted = features("eagle3", "of_base"), features("eagle3", "of_adapted", under)
    online = run("eagle3", "online", under)
    offline = run("eagle3", "offline", under, f"data.features={of_adapted}")
    assert losses(online) == pytest.approx(losses(offline), rel=5e-4) != losses(run("eagle3", "base"))
    for refused in ([under, f"data.features={of_base}"], [f"data.features={of_adapted}"]):
        with pytest.raises(
            BadInput, match=r"data\.features .*: target .*\(fingerprint .* with adapter|with adapter.* not"
        ):
            run("eagle3", "refused", *refused)
    with pytest.raises(BadInput, match="holds a run on another target"):
        run("eagle3", "online")
    record = json.loads((online / "final" / "config.json").read_text())["headstart"]["training"]
    assert record["target_adapter"] == str(adapter)


def test_a_head_of_the_base_goes_on_under_an_adapter_and_back(run, world, lora, capsys):
    before = run("eagle3", "before")
    after = run("eagle3", "after", f"target.adapter={lora(world / 'target')}", f"train.start_from={before / 'final'}")
    base = Target.load(world / "target")
    assert head_record(after / "final").fingerprint == base.fingerprint
    assert "another target" not in "".join(capsys.readouterr())
    load_head(after / "final", base)
