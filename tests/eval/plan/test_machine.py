"""Profiles of machines: fitted as planted, read with their refusals, and what the shipped ones predict."""

import json
import re
from dataclasses import asdict
from itertools import combinations

import numpy as np
import pytest
from drafted import untrained
from headstart.configs.errors import BadInput
from headstart.eval.decoding.draft_setting import DraftSetting, chains
from headstart.eval.drafters.lookup import NgramDrafter
from headstart.eval.measurement.metrics import Acceptance
from headstart.eval.measurement.step_times import StepTime
from headstart.eval.plan.machine_profile import (
    PROFILES,
    MachineProfile,
    ProfileTimes,
    fit_profile,
    load_profile,
    non_negative_fit,
    times_on,
)
from headstart.eval.plan.prediction import Accepted, steady_speedup


def planted(batch, context, tokens):
    verify = 5 + 0.02 * batch * tokens + 3e-5 * batch * context
    return StepTime("K", batch, context, tokens, tokens - 1, 1.0, verify, 1.25)


def test_a_linear_machine_is_recovered(target):
    times = [planted(b, c, n) for b in (1, 8, 64) for c in (100, 4000) for n in (1, 4, 9)]
    found = fit_profile(target, times, name="it", device="d", source="s")
    assert (found.fixed_ms, found.token_ms, found.cache_token_ms) == pytest.approx((5, 0.02, 3e-5), rel=1e-6)
    assert found.overhead_ms == 1.25 and found.fit_error == 0
    assert found.weight_bytes > 0 and found.cache_token_bytes == 4 * 2 * 2 * 8 * 4  # layers, k and v, heads, dim, fp32


def test_no_term_is_negative():
    rows = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    falling = non_negative_fit(rows, np.array([3.0, 2.0, 1.0]))
    assert (falling >= 0).all() and falling[1] == 0


def best_subset_fit(rows, values):
    """The same by trying every subset of terms."""
    weighted, ones = rows / values[:, None], np.ones_like(values)
    best, terms = np.inf, np.zeros(rows.shape[1])
    for count in range(1, rows.shape[1] + 1):
        for chosen in map(list, combinations(range(rows.shape[1]), count)):
            found = np.linalg.lstsq(weighted[:, chosen], ones, rcond=None)[0]
            loss = np.square(weighted[:, chosen] @ found - ones).sum()
            if (found >= 0).all() and loss < best:
                best, terms = loss, np.zeros_like(terms)
                terms[chosen] = found
    return terms


@pytest.mark.parametrize("seed", range(8))
def test_the_fit_is_the_best_of_all_subsets_of_terms(seed):
    """Where some terms are planted negative too, in the orders of magnitude that step times have."""
    source = np.random.default_rng(seed)
    tokens, cached = source.integers(1, 640, 40), source.integers(16, 262_144, 40)
    rows = np.stack([np.ones(40), tokens, cached], 1).astype(float)
    values = np.abs(rows @ (source.normal(0.5, 1, 3) * [5, 0.02, 3e-5])) + source.uniform(0.1, 1, 40)
    assert non_negative_fit(rows, values) == pytest.approx(best_subset_fit(rows, values), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("name", sorted(path.stem for path in PROFILES.glob("*.json")))
def test_shipped_profiles_name_their_source(name):
    machine = load_profile(name)
    assert machine.name == name and machine.source and machine.device
    assert machine.fixed_ms > 0 and machine.weight_bytes > 0


def test_the_h100_profile_gives_the_published_speedups():
    """Chains of 3 with acceptance_length 2.6 at 512 tokens of context, drafting at its authors' fixed 2.135 ms."""
    machine = load_profile("h100-llama-3.1-8b-vllm")
    share = 2.13526175 / machine.forward_ms(tokens=1, cached=0)
    times = ProfileTimes(machine, 1.0, 1.0, {"K 3": share})
    one = Accepted(DraftSetting("K 3", 3), Acceptance(10, 26, [10] * 3, [6] * 3), [[2] * 4 + [3] * 6])
    wanted = {1: 1.99, 8: 1.91, 32: 1.72, 64: 1.56}
    found = {size: steady_speedup(one.setting, one.length, times, batch_size=size, context=512) for size in wanted}
    assert found == pytest.approx(wanted, rel=0.06)


def test_drafting_costs_its_share_of_a_forward(target):
    """A chain's operations grow with its length; a drafter on the host has none."""
    head = untrained("eagle3", target)
    machine = load_profile("h100-llama-3.1-8b-vllm")
    settings = chains(head, (1, 2, 4))
    times = times_on(machine, target, head, settings)
    one, two, four = (times.draft_share[f"K {length}"] for length in (1, 2, 4))
    assert 0 < one < two < four and four - two == pytest.approx(2 * (two - one), rel=0.2)
    assert times.at(None, batch_size=1, context=10).draft_ms == 0
    assert times.weights < 1e-4, "a toy beside 8B"
    host = times_on(machine, target, NgramDrafter(), chains(NgramDrafter(), (2,)))
    assert host.draft_share == {"K 2": 0}


def test_wrong_profiles_are_refused(tmp_path):
    with pytest.raises(BadInput, match="--machine nowhere: no such profile; expected a .json file or one of .*h100"):
        load_profile("nowhere")
    path = tmp_path / "m.json"
    path.write_text("{")
    with pytest.raises(BadInput, match="m.json: no JSON"):
        load_profile(str(path))
    good = asdict(load_profile("h100-llama-3.1-8b-vllm"))
    path.write_text(json.dumps({**good, "fixd_ms": 1}))
    with pytest.raises(BadInput, match="fixd_ms"):
        load_profile(str(path))
    path.write_text(json.dumps({**good, "version": 9}))
    with pytest.raises(BadInput, match="version 9: expected 1"):
        load_profile(str(path))
    path.write_text(json.dumps(good))
    assert load_profile(str(path)) == MachineProfile(**good)


def test_the_docs_name_every_shipped_profile_and_its_target():
    """`target` is what a profile was fitted on, in words; the table in docs/plan.md has the same."""
    docs = (PROFILES.parents[1] / "docs" / "plan.md").read_text()
    for path in PROFILES.glob("*.json"):
        [row] = [line for line in docs.splitlines() if line.startswith(f"| `{path.stem}` |")]
        profile = load_profile(path.stem)
        assert set(profile.target.replace(",", "").split()) <= set(re.sub("[`|(),]", " ", row).split()), row
