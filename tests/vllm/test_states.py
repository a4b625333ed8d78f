"""Hidden states from vLLM itself, through headstart's connector: those of `Target.forward`, and what comes of them."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from headstart.benchmarks.quickstart.prompts import orders
from headstart.data_pipelines.served.reading import layers_asked
from headstart.data_pipelines.served.state_server import StateServer
from headstart.data_pipelines.served.vllm_process import state_process
from headstart.data_pipelines.storage.shards import Shards
from headstart.engines.heads import load_head
from headstart.engines.servers.setting import EngineSetting
from headstart.eval.decoding import generate
from headstart.eval.figures.metrics import acceptance
from headstart.scripts.data.extract import extract
from headstart.targets.target import Target
from headstart.targets.weights.gguf import cache_folder
from headstart.train.inputs.config import load_inputs, load_run
from headstart.train.inputs.target import reads_of
from headstart.train.trainer import train_head
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config
from vllm_runs import OFFLINE, save_tokenizer

SIZE, LENGTH = 120, 256  # of the vocabulary, of the context
SIZES: dict[str, Any] = {
    "vocab_size": SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
KINDS = {
    "untied, without bias": LlamaConfig(**SIZES),
    "untied, with bias": Qwen2Config(**SIZES, architectures=["Qwen2ForCausalLM"]),
    "tied, without bias": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
}
SMALL = ["--enforce-eager", "--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(64 << 20)]
CHUNKS = ["--max-num-batched-tokens", "64", "--max-num-seqs", "8", "--enable-prefix-caching"]
STEPS, ROWS = 100, 64  # of training on SmolLM2
HELD_OUT, ANSWER = 12, 64  # prompts that are decoded with the trained heads, and tokens of an answer
SMALLER = {"num_depths": 3, "draft_vocab_size": 2048}  # so that a step takes less than a second
pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each kind a target, and rows.jsonl with random rows beside all of them."""
    above = tmp_path_factory.mktemp("states")
    for name, config in KINDS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.15) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)
        model.save_pretrained(above / name)
        save_tokenizer(above / name, num_words=SIZE)
    source = random.Random(0)
    with (above / "rows.jsonl").open("w") as file:
        for i in range(120):
            row = [source.randrange(3, SIZE) for _ in range(LENGTH if i == 7 else source.randrange(4, LENGTH))]
            file.write(json.dumps({"input_ids": row, "prompt_length": source.randrange(1, len(row))}) + "\n")
    return {name: above / name for name in KINDS}


@contextmanager
def serving(python: str, folder: Path, layers: list[int], work: Path, *flags: str) -> Iterator[str]:
    """A server's address; its states come as files in work/states."""
    engine, words = EngineSetting(name="vllm", python=python), ["--dtype", "float32", *SMALL, *flags]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", OFFLINE["HF_HUB_OFFLINE"])
        patch.setenv("VLLM_NO_USAGE_STATS", OFFLINE["VLLM_NO_USAGE_STATS"])
        how = {"arguments": words, "adapter": None, "log": work / "vllm.log"}
        server = state_process(engine, str(folder), layers, work / "states", **how)
        server.__enter__()
    try:
        yield server.url
    finally:
        server.close()


@pytest.fixture(scope="module")
def running(python: str, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the first kind, which reads prompts in chunks and keeps their beginnings."""
    work = tmp_path_factory.mktemp("running")
    with serving(python, folders["untied, without bias"], [1, 2, 3, 4], work, *CHUNKS) as url:
        yield url


def config_of(folder: Path, work: Path, head: dict[str, Any] | None = None, rows: Path | None = None) -> str:
    config = {"target": {"path": str(folder), "dtype": "float32"}, "head": head or {"type": "eagle3"}}
    config |= {"data": {"train": str(rows or folder.with_name("rows.jsonl"))}}
    path = work / f"{config['head']['type']}.yaml"
    path.write_text(json.dumps(config))
    return str(path)


def stored(config: str, output: Path, **how: Any) -> list[Any]:
    extract(config, output=output, **{"storage_dtype": "float32", "device": "cpu", **how})
    return list(Shards(output))


def at(url: str) -> list[str]:
    """Keys of a run whose states come from the server there."""
    return ["engine.name=vllm", f"engine.server={url}"]


def check_states(url: str, folder: Path) -> None:
    """Rows of several lengths, asked for at the same time and some twice, some with the same beginning."""
    target, source = Target.load(folder, dtype="float32"), torch.Generator().manual_seed(2)
    lengths = (1, 2, 15, 16, 17, 100, 200, LENGTH - 1)
    rows = [torch.randint(3, SIZE, (n,), generator=source).tolist() for n in lengths]
    rows += [rows[-1], rows[-2][:150] + rows[-3]]
    server = StateServer(url, label="ab")
    with ThreadPoolExecutor(8) as threads:
        found = [answer.states for answer in threads.map(server.ask, rows)]
    for row, states in zip(rows, found, strict=True):
        out = target.forward(torch.tensor([row]), feature_layers=(1, 2, 3))
        torch.testing.assert_close(states[:, :3], out.features[0], atol=1e-4, rtol=0)
        assert target.final_norm is not None
        with torch.no_grad():
            torch.testing.assert_close(target.final_norm(states[:, 3]), out.post_norm[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_the_target_here(kind: str, python: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Whole extractions, with a server of our own; and rows asked for one by one."""
    config, flags = config_of(folders[kind], tmp_path), " ".join(SMALL)
    ours = stored(config, tmp_path / "here")
    by = ["engine.name=vllm", f"engine.python={python}", f"engine.args={flags}"]
    theirs = stored(config, tmp_path / "out", overrides=by, shard_bytes=2**20)
    for a, b in zip(ours, theirs, strict=True):
        assert a.sample == b.sample
        torch.testing.assert_close(a.states.features, b.states.features, atol=1e-4, rtol=0)
        torch.testing.assert_close(a.states.post_norm, b.states.post_norm, atol=1e-4, rtol=0)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["engine"], manifest["engine_version"]) == ("vllm", "0.32.0")


def test_chunks_and_kept_beginnings_change_nothing(running: str, folders: dict[str, Path]) -> None:
    for _ in range(2):
        check_states(running, folders["untied, without bias"])


def test_a_head_learns_from_states_that_it_gives_meanwhile(
    python: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The losses are those of features from the same server, up to the rounding of rows that it reads together."""
    folder = folders["untied, without bias"]
    losses: dict[str, list[float]] = {}
    with serving(python, folder, [1, 2, 3, 4], tmp_path) as url:
        config = config_of(folder, tmp_path)
        stored(config, tmp_path / "features", overrides=at(url))
        for name, keys in (("online", at(url)), ("offline", [f"data.features={tmp_path / 'features'}"])):
            how = [*keys, f"train.output_dir={tmp_path / name}", "train.max_steps=10", "train.batch_size=4"]
            train_head(load_run(config, [*how, "train.device=cpu"]))
            rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
            losses[name] = [row["loss"] for row in rows]
    assert losses["online"] == pytest.approx(losses["offline"], abs=1e-3) and len(losses["online"]) == 10
    assert not list((tmp_path / "states").iterdir())


# ---------------------------------------------------------------------------------------------------------------------
# Training on a real target


@pytest.fixture(scope="module")
def smollm2(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Target, Path, str]]:
    """SmolLM2-135M-Instruct, rows that it wrote, and a server of what EAGLE-3 and Medusa read of it."""
    folder = cache_folder() / "smollm2-135m-instruct"
    if not (folder / "config.json").is_file():
        pytest.skip("needs SmolLM2-135M-Instruct, from the package index")
    work = tmp_path_factory.mktemp("smollm2")
    inputs, target = load_inputs(config_of(folder, work, {"type": "eagle3"})), Target.load(folder, dtype="float32")
    prompts = prompts_of(target, ROWS, held_out=False)
    with (work / "answers.jsonl").open("w") as file:
        for at in range(0, ROWS, 16):
            some = prompts[at : at + 16]
            written = generate(target, None, some, max_new_tokens=ANSWER).token_ids
            for prompt, answer in zip(some, written, strict=True):
                file.write(json.dumps({"input_ids": prompt + answer, "prompt_length": len(prompt)}) + "\n")
    layers = layers_asked(target, reads_of(inputs, target))
    with serving(python, folder, layers, work, "--max-model-len", "512") as url:
        yield target, work / "answers.jsonl", url


def prompts_of(target: Target, num: int, *, held_out: bool) -> list[list[int]]:
    """Orders of the quickstart in the target's chat template."""
    talks = [[{"role": "user", "content": text}] for text in orders(num, seed=0, held_out=held_out)]
    how: dict[str, Any] = {"add_generation_prompt": True, "return_dict": False}
    return [target.tokenizer.apply_chat_template(talk, **how) for talk in talks]


@pytest.mark.parametrize("head", ["eagle3", "medusa"])
def test_a_head_learns_the_same_from_either(head: str, smollm2: tuple[Target, Path, str], tmp_path: Path) -> None:
    target, rows, url = smollm2
    config = config_of(Path(target.name), tmp_path, {"type": head, **SMALLER}, rows)
    short = ["data.max_length=512"]
    stored(config, tmp_path / "here", overrides=short)
    stored(config, tmp_path / "out", overrides=[*short, *at(url)])
    losses, lengths, prompts = list[list[float]](), list[float](), prompts_of(target, HELD_OUT, held_out=True)
    for name in ("here", "out"):
        how = [
            *short,
            f"data.features={tmp_path / name}",
            f"train.output_dir={tmp_path / 'run' / name}",
            "train.device=cpu",
        ]
        how += [f"train.max_steps={STEPS}", "train.batch_size=4", "train.log_every=1", "train.learning_rate=1e-4"]
        final = train_head(load_run(config, how))
        lines = [json.loads(line) for line in (final.parent / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in lines if "loss" in line])
        decoded = generate(target, load_head(final, target), prompts, max_new_tokens=ANSWER, num_draft_tokens=3)
        lengths.append(acceptance(decoded.rounds, num_draft_tokens=3).length or 0.0)
    worst = max(abs(a - b) / a for a, b in zip(*losses, strict=True))
    figures = f"losses {losses[0][0]:.4f} to {losses[0][-1]:.4f}, at most {worst:.2g} of the loss apart"
    print(f"{head}: {len(losses[0])} steps, {figures}; acceptance lengths {lengths[0]:.4f}, {lengths[1]:.4f}")
    assert len(losses[0]) == STEPS and worst < 1e-3
    assert lengths[0] > 1.05 and lengths[1] == pytest.approx(lengths[0], rel=0.01)
