"""Training from extracted features is the run that the live target would have fed, and refuses features of another."""

import pytest
import yaml
from headstart.configs.errors import BadInput
from headstart.configs.jsonl import read_appended
from headstart.heads.registry import HEADS
from headstart.scripts.data.extract import extract


@pytest.fixture
def features(world, tmp_path):
    """features(head_type, name, "key=value", ...): extracts float32 states for a head into tmp_path/name."""

    def make(head_type, name, *overrides, storage_dtype="float32"):
        config = {
            "target": {"path": str(world / "target")},
            "head": {"type": head_type, "num_depths": 3},
            "data": {"train": str(world / "rows.jsonl")},
        }
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        extract(str(path), tmp_path / name, list(overrides), storage_dtype=storage_dtype, device="cpu")
        return tmp_path / name

    return make


def losses(folder):
    return [row["loss"] for row in read_appended(folder / "metrics.jsonl")]


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


def test_eight_bits_are_near(run, features):
    stored = features("eagle3", "features", storage_dtype="8bit")
    online, offline = run("eagle3", "online"), run("eagle3", "offline", f"data.features={stored}")
    assert losses(online) == pytest.approx(losses(offline), rel=0.02) and losses(online) != losses(offline)


def test_features_of_another_run_are_refused(run, features, world, tmp_path):
    stored = features("eagle3", "features")
    for head_type, change, problem in (
        ("eagle3", "head.feature_layers=[0, 1, 2]", r"layers \[1, 2, 3\], head eagle3 reads \[0, 1, 2\]"),
        ("eagle", "train.seed=0", "post_norm_at labels, head eagle needs context"),
        ("eagle3", "data.max_length=9", "extracted with data.max_length 256, not 9"),
    ):
        with pytest.raises(BadInput, match=problem):
            run(head_type, "refused", change, f"data.features={stored}")
    (tmp_path / "other.jsonl").write_text("".join(reversed((world / "rows.jsonl").read_text().splitlines(True))))
    with pytest.raises(BadInput, match="extracted with rows "):
        run("eagle3", "refused", f"data.train={tmp_path / 'other.jsonl'}", f"data.features={stored}")
    shard = next(stored.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    with pytest.raises(BadInput, match=f"{shard.name}: damaged: sha256"):
        run("eagle3", "refused", f"data.features={stored}")
    assert not (tmp_path / "refused").exists()
