"""What the benchmarks' tests share."""

import pytest
from headstart.eval.measurement.result import Result


@pytest.fixture
def made_result():
    """made_result(drafter=..., speedup=...): a result of report.json with these figures."""

    def make(**changes):
        fields = {
            "engine": "headstart",
            "drafter": "eagle3",
            "suite": "code",
            "suite_version": None,
            "suite_digest": "",
            "system": None,
            "thinking": None,
            "template_hash": None,
            "tree": "chain",
            "num_drafted": 5,
            "temperature": 0.0,
            "top_k": 0,
            "top_p": 1.0,
            "accept": "exact",
            "steps": "eager",
            "batch_size": 1,
            "num_draft_tokens": 5,
            "num_prompts": 2,
            "failed": [],
            "max_new_tokens": 8,
            "num_repeats": 1,
        }
        return Result(**{**fields, **changes})

    return make
