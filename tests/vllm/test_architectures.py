"""Heads of other architectures in vLLM: scaled embeddings, models with several modalities, hybrids; and what it does
not serve."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from dense import ALTERNATING, GRANITE, NOT_PER_LAYER
from headstart.engines.check import check_folder
from headstart.engines.export import export_head
from headstart.engines.heads import load_head
from headstart.heads import assistant
from headstart.targets.target import Target
from kind import VOCAB_SIZE, Kind, kind, wrapper
from recurrent import CONVOLUTIONS, STEADY
from transformers import AutoModelForCausalLM, PreTrainedModel
from vllm_runs import asked_vllm, job_of, same_drafts, save_tokenizer, speculation, trained, write_rows
from wrappers import AROUND, IMAGES, QWEN, TOWER, ids

PROMPTS = [[1] + [(7 * i * i + 3 * i * j + 11) % 490 + 4 for i in range(5 + j)] for j in range(6)]
NUM_DRAFT = 3
WIDE: dict[str, Any] = {"head_dim": 32}  # vLLM's attention for CPUs has no kernel for smaller heads
TWO_HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}  # 32 wide, where no config key says so
MAMBA: dict[str, Any] = {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1, "chunk_size": 32}
LINEAR = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}  # for the same reason
GEMMA3 = kind("", "gemma3_text", query_pre_attn_scalar=32, layer_types=ALTERNATING, **WIDE)
GEMMA4 = kind("", "gemma4_text", layer_types=ALTERNATING, **NOT_PER_LAYER, **WIDE)
AROUND4 = ids(
    *("image_token_id", "boi_token_id", "eoi_token_id", "video_token_id"),
    *("audio_token_id", "boa_token_id", "eoa_token_id"),
)
KINDS = {
    "granite": kind("embeddings scaled by the model", **GRANITE, **TWO_HEADS),
    "gemma3": wrapper(
        "embeddings scaled by their module, images",
        "gemma3",
        GEMMA3,
        seed=2,
        vision_config={**TOWER, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
        **AROUND,
    ),
    "gemma4": wrapper(
        "the same, whose features vLLM's own class hands out",
        "gemma4",
        GEMMA4,
        vision_config={**TOWER, "num_key_value_heads": 2, "head_dim": 16},
        audio_config=None,
        **AROUND4,
    ),
    "llava": wrapper(
        "bare embeddings, images",
        "llava",
        kind("", "llama", **WIDE),
        vision_config={**TOWER, "model_type": "clip_vision_model", "projection_dim": 32},
        image_token_index=500,
    ),
    "qwen3_5": wrapper(
        "linear and full attention", "qwen3_5", kind("", "qwen3_5_text", **LINEAR, **WIDE), vision_config=QWEN, **IMAGES
    ),
    "nemotron_h": kind(
        "Mamba-2, attention and MLP as layers of their own",
        spreads=STEADY,
        num_hidden_layers=...,
        layers_block_type=["mamba", "mlp", "attention", "mlp"],
        ssm_state_size=16,
        **MAMBA,
        **WIDE,
    ),
    "falcon_h1": kind("Mamba-2 and attention in each layer", mamba_d_ssm=128, **WIDE),
    "granitemoehybrid": kind("Mamba-2 and attention, experts", layer_types=["mamba", "attention"] * 2, **TWO_HEADS),
    "bamba": kind("Mamba-2 with a few layers of attention", attn_layer_indices=[1, 3], **TWO_HEADS),
    "lfm2": kind(
        "convolutions and attention",
        layer_types=CONVOLUTIONS,
        full_attn_idxs=[1, 3],
        conv_dim=64,
        block_dim=64,
        **TWO_HEADS,
    ),
}
KINDS = {name: Kind(**{**vars(made), "model_type": made.model_type or name}) for name, made in KINDS.items()}
EAGLE3 = {"type": "eagle3", "num_depths": 3}
EAGLE = {"type": "eagle", "num_depths": 3}
DFLASH = {"type": "block", "num_depths": 3, "num_layers": 1, "sample_from_anchor": False, "markov_rank": 0}
ASSISTANT = {"type": "assistant", "num_depths": 3, "num_layers": 2, "hidden_size": 48}
TEXT_ALONE = {"language_model_only": True}
BY_TRANSFORMERS = {"model_impl": "transformers"}


@dataclass(frozen=True)
class Case:
    """A head of a kind of target, and how vLLM is to serve it."""

    kind: str
    head: dict[str, Any]
    engine: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    is_extracted: bool = False  # the text model is served from a folder of its own
    mended: str = ""  # see client.py
    max_steps: int = 60

    @property
    def method(self) -> str:
        family = str(self.head["type"])
        return {"block": "dflash", "assistant": "gemma4_mtp"}.get(family, family)


SERVED = {
    "eagle3 of granite": Case("granite", EAGLE3),
    "eagle of granite": Case("granite", EAGLE),
    "dflash of granite": Case("granite", DFLASH, max_steps=200),
    "eagle3 of gemma3's text model": Case("gemma3", EAGLE3, BY_TRANSFORMERS, is_extracted=True),
    "eagle of gemma3's text model": Case("gemma3", EAGLE, BY_TRANSFORMERS, is_extracted=True),
    "dflash of gemma3's text model": Case("gemma3", DFLASH, BY_TRANSFORMERS, is_extracted=True, max_steps=200),
    "eagle3 of gemma4": Case("gemma4", EAGLE3, TEXT_ALONE),
    "eagle of gemma4": Case("gemma4", EAGLE, TEXT_ALONE),
    "dflash of gemma4": Case("gemma4", DFLASH, TEXT_ALONE, max_steps=200),
    "assistant of gemma4": Case("gemma4", ASSISTANT, TEXT_ALONE, max_steps=150),
    "eagle3 of llava": Case("llava", EAGLE3, TEXT_ALONE),
    "eagle3 of qwen3_5, bfloat16": Case("qwen3_5", EAGLE3, TEXT_ALONE, dtype="bfloat16", max_steps=30),
    "eagle3 of nemotron_h, states moved": Case("nemotron_h", EAGLE3, mended="states_moved"),
}
NO_FEATURES = "Model does not support EAGLE3 interface"
NOT_SERVED = {
    "gemma3": (Case("gemma3", EAGLE3, TEXT_ALONE), NO_FEATURES),
    "falcon_h1": (Case("falcon_h1", EAGLE3), NO_FEATURES),
    "granitemoehybrid": (Case("granitemoehybrid", EAGLE3), NO_FEATURES),
    "lfm2": (Case("lfm2", EAGLE3), NO_FEATURES),
    "bamba": (Case("bamba", EAGLE3), "does not dispatch through the Transformers attention interface"),
    "qwen3_5, float32": (Case("qwen3_5", EAGLE3, TEXT_ALONE), "CPU GDN attention requires BF16"),
}
pytestmark = pytest.mark.timeout(3600)  # an engine starts for every head


@pytest.fixture(scope="module")
def world(python: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Path]:
    """A folder for each kind that is asked for, with its target and rows that a head can learn by heart."""
    made = {}
    for name in {case.kind for case in asked(request).values()}:
        folder = made[name] = tmp_path_factory.mktemp(name)
        model = KINDS[name].model()
        model.save_pretrained(folder / "target")
        save_tokenizer(folder / "target", num_words=VOCAB_SIZE)
        write_rows(folder, PROMPTS)
        if name == "qwen3_5":  # else its bfloat16 texts depend on rounding
            learn_by_heart(model, folder)
            model.save_pretrained(folder / "target")
        if name == "gemma3":
            extract_text_model(folder)
    return made


def asked(request: pytest.FixtureRequest) -> dict[str, Case]:
    """The cases that this run is asked for."""
    cases = {**SERVED, **{name: case for name, (case, _) in NOT_SERVED.items()}}
    chosen = [str(item.callspec.params.get("name")) for item in request.session.items if hasattr(item, "callspec")]
    return {name: case for name, case in cases.items() if name in chosen}


def learn_by_heart(model: PreTrainedModel, folder: Path, *, num_steps: int = 15) -> None:
    """Train a target on its own answers until it is sure of them."""
    rows = [json.loads(line)["input_ids"] for line in (folder / "rows.jsonl").read_text().splitlines()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    padded = [torch.tensor(row) for row in rows]
    texts = torch.nn.utils.rnn.pad_sequence(padded, batch_first=True)  # [B, T]
    labels = torch.nn.utils.rnn.pad_sequence(padded, batch_first=True, padding_value=-100)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(input_ids=texts, labels=labels).loss.backward()
        optimizer.step()


def extract_text_model(folder: Path) -> None:
    """The text model of `target` alone into `text`, as docs/serve.md has it."""
    config = Target.load(folder / "target", dtype="float32").config
    text = AutoModelForCausalLM.from_pretrained(
        folder / "target", config=config, key_mapping={r"^language_model\.": ""}, dtype="float32"
    )
    text.save_pretrained(folder / "text", save_original_format=False)
    save_tokenizer(folder / "text", num_words=VOCAB_SIZE)


@pytest.fixture(scope="module")
def served(
    python: str, world: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Any]:
    """What vLLM made of every head that is asked for."""
    job: dict[str, Any] = {}
    for i, (name, case) in enumerate(asked(request).items()):
        folder = world[case.kind]
        run = trained(folder, f"run{i}", case.head, max_steps=case.max_steps)
        export_head(run, folder / f"head{i}", to="vllm", dtype=case.dtype)
        assert check_folder(folder / f"head{i}").problems == []
        (folder / f"{name}.txt").write_text(str(run))
        asked_for = speculation(folder / f"head{i}", case.head, case.method, NUM_DRAFT) | {"mended": case.mended}
        target = folder / ("text" if case.is_extracted else "target")
        job[name] = job_of(target, PROMPTS, dtype=case.dtype, **case.engine)
        job[name]["heads"][name] = asked_for
    return asked_vllm(python, job, tmp_path_factory.mktemp("job"))


@pytest.mark.parametrize("name", list(SERVED))
def test_vllm_drafts_what_we_draft_of_other_architectures(
    name: str, world: dict[str, Path], served: dict[str, Any], figures: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = SERVED[name]
    for edge in ("AHEAD", "MORE"):  # vLLM's own: its queries are where the last key is, and see as many as the target's
        monkeypatch.setattr(assistant, edge, 0)
    target = Target.load(world[case.kind] / "target", dtype=case.dtype)
    head = load_head(Path((world[case.kind] / f"{name}.txt").read_text()), target)
    of = {"head": name, "target": case.kind, "method": case.method, "num_draft_tokens": NUM_DRAFT}
    found = same_drafts(target, head, PROMPTS, served[name], num_draft=NUM_DRAFT)
    assert sum(found["accepted_at"]) < NUM_DRAFT * found["num_rounds"]  # drafts were rejected, and states moved back
    figures.append({**of, **found})


@pytest.mark.parametrize("name", list(NOT_SERVED))
def test_what_vllm_does_not_serve_is_as_the_docs_say(name: str, served: dict[str, Any]) -> None:
    assert NOT_SERVED[name][1] in served[name].get("error", "it was served")
