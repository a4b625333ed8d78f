"""Training from extracted features is the run that the live target would have fed, and refuses features of another."""

import pytest
from headstart.configs.errors import BadInput
from headstart.heads.registry import HEADS
from run_files import losses

CASES = [(name, ["padded", "packed"][i % 2]) for i, name in enumerate(sorted(HEADS))]


@pytest.mark.parametrize(("head_type", "layout"), CASES)
@pytest.mark.fast_only(head_type=["eagle3", "mtp"])
def test_offline_and_online_training_have_the_same_losses(layout, head_type, run, features):
    how = f"data.layout={layout}", "data.max_length=60"
    stored = features(head_type, "features", *how)
    online = run(head_type, "online", *how)
    offline = run(head_type, "offline", *how, f"data.features={stored}")
    # a start in closed form is made of states that may differ by rounding, and steps enlarge that
    assert losses(online) == pytest.approx(losses(offline), rel=5e-4) and len(losses(online)) == 6
    assert not (offline / "tokens").exists()


def test_other_and_damaged_features_are_refused(run, features, tmp_path):
    """Which are, is in test_features.py and test_same_data.py of tests/data_pipelines/storage."""
    stored = features("eagle3", "features")
    with pytest.raises(BadInput, match="extracted with data.max_length 256, not 9"):
        run("eagle3", "refused", "data.max_length=9", f"data.features={stored}")
    shard = next(stored.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    with pytest.raises(BadInput, match=f"{shard.name}: damaged: sha256"):
        run("eagle3", "refused", f"data.features={stored}")
    assert not (tmp_path / "refused").exists()
