"""LiLiCorr's lattice in both: candidates, scores and tokens of vLLM's own class, with an exported head's tensors.

vLLM drafts with it on GPUs only, so its class is given the states of our backbone here.
"""

import subprocess
from pathlib import Path

import pytest
import torch
from headstart.engines.export import export_head
from headstart.engines.heads import HEADS, build_head, save_head
from headstart.heads.drafting.drafter import Reading
from headstart.heads.nn.lilicorr import LatticeCandidates
from headstart.targets.target import Target
from safetensors.torch import load_file, save_file
from test_states import KINDS, SIZE
from transformers import AutoModelForCausalLM
from vllm_runs import OFFLINE, save_tokenizer

LATTICE = {"markov_rank": 0, "sample_from_anchor": False, "selector_rank": 24, "lattice_layers": 2}
CASES = {
    "narrow": {"selector_top_k": 8, "lattice_size": 48, "lattice_heads": 4, "lattice_mlp_ratio": 1.5},
    "as wide as the states, with convolutions": {"selector_top_k": 16, "lattice_size": 0, "conv_group_size": 16},
}


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_draft", [5, 3], ids=["whole", "shorter"])
def test_scores_and_paths_are_vllms(case: str, num_draft: int, python: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(KINDS["untied, without bias"]).save_pretrained(tmp_path / "target")
    save_tokenizer(tmp_path / "target", num_words=SIZE)
    target = Target.load(tmp_path / "target", dtype="float32")
    options = {**LATTICE, "num_depths": 5, **CASES[case]}
    options["lattice_size"] = options["lattice_size"] or target.hidden_size
    head = build_head(HEADS["block"].config_class(type="block", **options), target, seed=1).eval()
    for name, parameter in head.named_parameters():
        if name.startswith("lilicorr."):  # no zero, no one hides a fault
            parameter.add_(0.3 * torch.randn(parameter.shape))
    save_head(head, tmp_path / "head", dtype=torch.float32)
    export_head(tmp_path / "head", tmp_path / "out", to="vllm")
    tokens, following = torch.randint(3, SIZE, (2, 6, 9))
    read, starts = target.forward(tokens, feature_layers=head.feature_layers), torch.zeros(6, dtype=torch.long)
    state = head.begin(batch_size=6, max_length=64)
    head.commit(state, Reading(tokens, following, read, starts, torch.tensor([9, 7, 5, 3, 2, 9])))
    drafted, ours = head.propose(state, num_draft_tokens=num_draft), state.candidates
    assert isinstance(ours, LatticeCandidates)
    given = {"hidden": state.hidden, "context": state.context, "rows": target.output_layer.weight}
    given["embeddings"] = target.input_embedding.weight
    save_file({name: x.detach().clone().contiguous() for name, x in given.items()}, tmp_path / "given.safetensors")
    command = [python, str(Path(__file__).with_name("lattice_client.py")), str(tmp_path / "out")]
    command += [str(tmp_path / name) for name in ("given.safetensors", "found.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, env={**OFFLINE, "PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = load_file(tmp_path / "found.safetensors")
    assert torch.equal(ours.ids, theirs["ids"]) and torch.equal(drafted.tokens, theirs["tokens"])
    torch.testing.assert_close(ours.log_probs, theirs["log_probs"], rtol=0, atol=1e-4)
    torch.testing.assert_close(ours.pairs, theirs["scores"], rtol=0, atol=1e-4)
    assert len(set(drafted.tokens.flatten().tolist())) > 5  # they are not all the same
