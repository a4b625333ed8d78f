"""A head in both engines: trained a little, exported, decoded with by ours and by vLLM, and what was accepted."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from headstart.data_pipelines.served.vllm_process import CONNECTOR
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.loop import decode, generate
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.decoding.stopping import Stop
from headstart.heads.base import DraftHead
from headstart.targets.target import Target
from headstart.train.inputs.config import load_run
from headstart.train.trainer import train_head
from words import word_tokenizer

LENGTH = 40  # tokens of an answer
OFFLINE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def save_tokenizer(folder: Path, *, num_words: int) -> None:
    """Words w0, w1 ..."""
    word_tokenizer(num_words, pad_token=None).save_pretrained(folder)


def write_rows(folder: Path, prompts: list[list[int]]) -> None:
    """Prompts and the target's greedy answers into rows.jsonl beside it, which a head can learn by heart."""
    target = Target.load(folder / "target", dtype="float32")
    answers = generate(target, None, prompts, max_new_tokens=LENGTH, eos_token_ids=[]).token_ids
    rows = [{"input_ids": p + a, "prompt_length": len(p)} for p, a in zip(prompts, answers, strict=True)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def job_of(
    target: Path, prompts: list[list[int]], *, dtype: str = "float32", length: int = LENGTH, **engine: Any
) -> dict[str, Any]:
    """Args: engine: vLLM's options beside client.py's."""
    how = {"folder": str(target), "dtype": dtype, "engine": engine}
    return {**how, "prompts": prompts, "max_new_tokens": length, "heads": {}}


def speculation(folder: Path, config: dict[str, Any], method: str | None, num_draft: int) -> dict[str, Any]:
    """vLLM's own keys, and what client.py takes out of them."""
    if method is None:
        return {"within": str(folder)}
    asked: dict[str, Any] = {"method": method, "num_speculative_tokens": num_draft}
    asked["within" if method == "mtp" else "model"] = str(folder)
    if config.get("parallel"):
        asked["parallel_drafting"] = True
    if method == "dflash" and config["num_layers"] > 1:
        asked["mended"] = "norms_apart"
    return asked


def asked_vllm(python: str, job: dict[str, Any], work: Path) -> dict[str, Any]:
    (work / "job.json").write_text(json.dumps(job))
    command = [python, str(Path(__file__).with_name("client.py")), str(work / "job.json"), str(work / "out.json")]
    environment = {**OFFLINE, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(CONNECTOR)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((work / "out.json").read_text())


def trained(folder: Path, name: str, head: dict[str, Any], *, max_steps: int = 60) -> Path:
    if head["type"] == "draft_lm":
        head = {**head, "path": str(folder / "target")}
    how = {"max_steps": max_steps, "batch_size": 6, "learning_rate": 3e-3, "warmup_steps": 5, "device": "cpu"}
    config = {"target": {"path": str(folder / "target"), "dtype": "float32"}, "head": head}
    config |= {"data": {"train": str(folder / "rows.jsonl")}, "train": {**how, "output_dir": str(folder / name)}}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return train_head(load_run(folder / f"{name}.yaml"))


def decoded(target: Target, head: DraftHead, prompt: list[int], *, num_draft: int, length: int) -> tuple[list, list]:
    """Our text, and the drafts of every round."""
    most = len(prompt) + length
    engine = Engine(
        target, head, batch_size=1, max_length=most, num_draft_tokens=num_draft, tree=None, sampling=Sampling(),
        generator=None,
    )  # fmt: skip
    drafts: list[list[int]] = []
    draft = engine.draft

    def kept(read: Any) -> Any:
        proposal = draft(read)
        drafts.append(proposal.tokens[0].tolist())
        return proposal

    engine.draft = kept  # type: ignore[method-assign]
    return decode(engine, [prompt], max_new_tokens=length, stop=Stop.of(target)).token_ids[0], drafts


def accepted_at(text: list[int], drafts: list[list[int]]) -> tuple[int, list[int]]:
    """How many rounds a text took, the prefill's token aside, and how often each draft position was accepted in it."""
    counts, num_rounds, at = [0] * len(drafts[0]), 0, 1
    while at < len(text):
        num_accepted = 0
        while num_accepted < len(counts) and text[at : at + 1] == [drafts[num_rounds][num_accepted]]:
            counts[num_accepted] += 1
            num_accepted, at = num_accepted + 1, at + 1
        num_rounds, at = num_rounds + 1, at + 1
    return num_rounds, counts


def counted(texts: list[list[int]], rounds: list[list[list[int]]]) -> dict[str, Any]:
    """Over prompts."""
    every = [accepted_at(text, drafts) for text, drafts in zip(texts, rounds, strict=True)]
    at = [sum(counts) for counts in zip(*(counts for _, counts in every), strict=True)]
    return {"num_rounds": sum(num_rounds for num_rounds, _ in every), "accepted_at": at}


def same_drafts(
    target: Target, head: DraftHead, prompts: list[list[int]], theirs: dict[str, Any], *, num_draft: int
) -> dict[str, Any]:
    """What both engines counted, where texts and drafts are the same; else the test fails.

    Below float32 rounding decides between drafts that are nearly as likely: there the counts are alike, to a tenth. One
    draft more that stands in 55 rounds, and so a round less, is 2 to 3 %.

    Args: theirs: what client.py has of the head.
    """
    assert "error" not in theirs, theirs["error"]
    ours = [decoded(target, head, prompt, num_draft=num_draft, length=LENGTH) for prompt in prompts]
    assert [text for text, _ in ours] == theirs["texts"]
    found, seen = counted(*map(list, zip(*ours, strict=True))), counted(theirs["texts"], theirs["rounds"])
    assert sum(found["accepted_at"]) > found["num_rounds"] / 4  # it did learn: drafts that never stand show little
    if target.dtype != torch.float32:
        per_round = [sum(one["accepted_at"]) / one["num_rounds"] for one in (found, seen)]
        assert per_round[1] == pytest.approx(per_round[0], rel=0.1), (found, seen)
    else:
        for (_, drafts), drafted in zip(ours, theirs["rounds"], strict=True):
            assert drafted[: len(drafts)] == drafts and len(drafted) - len(drafts) <= 1  # it drafts behind the end too
        assert theirs["num_drafts"] == found["num_rounds"]
        for ours_at, theirs_at in zip(found["accepted_at"], theirs["accepted_at"], strict=True):
            assert 0 <= theirs_at - ours_at <= len(prompts)  # drafts behind the end of a text count there
    counts = {"vllm_accepted_at": theirs["accepted_at"], "vllm_num_drafts": theirs["num_drafts"]}
    return {"num_texts_equal": len(prompts), **found, **counts}
