"""Configs that no head can be built from are refused in one line."""

from typing import Any

import pytest
from headstart.base.errors import BadInput
from headstart.engines.heads import HEADS, build_head

PARALLEL = {"parallel": True, "num_depths": 4}
REFUSED = [
    ("block", {"output": "none"}, "output 'none': expected own or shared"),
    ("block", {"draft_vocab_size": 9}, "set output: own"),
    ("block", {"mask_token_id": 61}, "head.mask_token_id 61: the target has 61 tokens"),
    ("block", {"feature_layers": [2, 1]}, "must ascend"),
    ("block", {"loss": {"confidence": 1.0}}, "unknown loss"),
    ("block", {"sliding_window": 3, "sample_from_anchor": False}, "sliding_window 3: expected at least the 8 slots"),
    ("draft_lm", {"draft_vocab_size": 20}, "draft_vocab_size: draft_lm drafts the target's whole vocabulary"),
    ("draft_lm", {"feature_layers": [1]}, "feature_layers: draft_lm reads tokens only"),
    ("draft_lm", {"num_layers": 5}, "head.num_layers 5: expected 1 to 4"),
    ("draft_lm", {"path": "./gone"}, "head.path ./gone: "),
    ("draft_lm", {**PARALLEL, "num_depths": 1}, "num_depths 1: parallel drafting needs 2 or more"),
    ("eagle", {"feature_layers": [1]}, "feature_layers: eagle reads the state after the final norm only"),
    ("eagle", {"num_layers": 0}, "num_layers 0: expected at least 1"),
    ("eagle", {"noise": -0.1}, "noise -0.1: expected 0 or more"),
    ("eagle", {"num_depths": 0}, "num_depths 0: expected at least 1"),
    ("eagle3", {"architecture": {"hidden_size": 8}}, "architecture.hidden_size: expected keys of intermediate_size, "),
    ("eagle3", {"norm_before_fc": True, "fc_norm": True}, "norm_before_fc: not together with fc_norm"),
    ("eagle3", {"num_layers": 0}, "num_layers 0: expected at least 1"),
    ("eagle3", {**PARALLEL, "mask_token_id": 99}, "mask_token_id 99: the target has 61 tokens"),
    ("eagle3", {"start": "fitted", "parallel": True}, "start fitted: only of one layer"),
    ("eagle3", {"start": "fitted", "norm_output": True}, "start fitted: only of one layer"),
    ("eagle3", {"start": "fitted", "num_layers": 2}, "start fitted: only of one layer"),
    ("medusa", {"target_lora_rank": -1}, "target_lora_rank -1: expected 0 or more"),
    ("medusa", {"head_weight": 0.0}, "head_weight 0.0: expected more than 0"),
    ("medusa", {"target_learning_rate_scale": float("nan")}, "target_learning_rate_scale nan: expected more than 0"),
    ("mtp", {"layout": "mimi"}, "layout 'mimi': expected one of mimo, qwen3_next, hy_v3, glm_ocr, deepseek_v3"),
    ("mtp", {"init": "zero"}, "init 'zero'"),
    ("mtp", {"feature_layers": [1]}, "feature_layers"),
]


@pytest.mark.parametrize(("family", "options", "problem"), REFUSED)
def test_what_cannot_be_is_refused_in_one_line(family: str, options: dict[str, Any], problem: str, target):
    with pytest.raises(BadInput) as caught:
        build_head(HEADS[family].config_class(type=family, **options), target)
    assert problem in str(caught.value) and "\n" not in str(caught.value)
