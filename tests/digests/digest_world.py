"""What digests.py computes on: tiny targets, texts that they wrote, trained heads; and what it keeps of a file."""

import contextlib
import hashlib
import io
import json
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

LEFT_OUT = frozenset(  # timed; of machine and version; prose
    "seconds draft_seconds verify_seconds tokens_per_second baseline_tokens_per_second speedup "
    "speedup_ci95 speedup_p10 speedup_median speedup_p90 "
    "timing baseline_bandwidth mfu "
    "step_medians disturbance baseline_seconds seconds_loading "
    "data_wait peak_bytes environment version headstart_version transformers_version reason idea problem".split()
)
SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
                         "num_key_value_heads": 2, "max_position_embeddings": 256}  # fmt: skip
TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TEMPLATE = (
    "{% for m in messages %}{{ 'w10 ' if m.role == 'user' else 'w11 ' }}{{ m.content }} w12 {% endfor %}"
    "{% if add_generation_prompt %}w11 {% endif %}"
)
# head keys that no shipped config sets, on top of the config before the plus; depths tell the losses of a mix apart
EXTRAS: dict[str, dict[str, Any]] = {
    "eagle3+cut": {"draft_vocab_size": 40, "fc_norm": True, "norm_output": True, "num_depths": 3},
    "eagle3+foreign": {"norm_before_residual": True, "norm_before_fc": True, "num_layers": 2, "num_depths": 3},
    "eagle3+exponential": {"num_depths": 4, "depth_weights": "exponential"},
    "eagle3+losses": {"loss": {one: 1.0 for one in "soft_ce kl topk_ce l1 greedy_gce feature".split()}},
    "medusa2+tokens": {"self_distillation": False},
    "mtp+mimo": {"layout": "mimo", "num_depths": 2},
    "mtp+qwen3_next": {"layout": "qwen3_next", "num_depths": 2, "draft_vocab_size": 40},
}


def digest_of(value: Tensor | bytes) -> str:
    """A short hash of a tensor, its dtype and shape included, or of bytes."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        value = f"{value.dtype} {tuple(value.shape)} ".encode() + flat.numpy().tobytes()
    return hashlib.sha256(value).hexdigest()[:16]


def kept(value: Any) -> Any:
    """JSON without the keys of LEFT_OUT."""
    if isinstance(value, Mapping):
        return {key: kept(one) for key, one in value.items() if key not in LEFT_OUT}
    return [kept(one) for one in value] if isinstance(value, list) else value


def content_of(path: Path) -> Any:
    """What is compared of a file: JSON and YAML by keys, tensors each, a hash of others; of pages that they exist."""
    if path.suffix in (".json", ".yaml"):
        return kept(yaml.safe_load(path.read_text()))
    if path.suffix == ".jsonl":
        return [kept(json.loads(line)) for line in path.read_text().splitlines()]
    if path.suffix == ".safetensors":
        return {name: digest_of(value) for name, value in load_file(path).items()}
    return "is there" if path.suffix in (".md", ".html", ".svg") else digest_of(path.read_bytes())


def files_of(folder: str | Path) -> dict[str, Any]:
    """The content of each file of a folder, by its name there."""
    paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): content_of(path) for path in paths}


def command(*words: str) -> tuple[int, str]:
    """`headstart WORDS` in this process: exit code and stdout. Raises on codes other than 0 and 1."""
    from headstart.scripts.cli import main

    said, problems, code = io.StringIO(), io.StringIO(), 0
    torch.manual_seed(0)
    with mock.patch.object(sys, "argv", ["headstart", *words]), contextlib.redirect_stdout(said):
        with contextlib.redirect_stderr(problems):
            try:
                main()
            except SystemExit as end:
                code = int(end.code or 0)
    if code not in (0, 1):
        raise RuntimeError(f"headstart {words[0]}: {(problems.getvalue().strip() or '-').splitlines()[-1]}")
    return code, said.getvalue()


def write_model(folder: str, words: Sequence[str], *, family: str = "Llama", num_layers: int = 4, seed: int = 0) -> Any:
    """A random model whose greedy text does not collapse into one token, and a tokenizer of words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**SIZES, **TOKENS, num_hidden_layers=num_layers)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in (one for one in model.parameters() if one.ndim >= 2):
        torch.nn.init.normal_(parameter, std=0.25)
    model.eval().save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    how = {"eos_token": "w2", "pad_token": "w0", "chat_template": TEMPLATE}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **how).save_pretrained(folder)
    return model


def build_world() -> None:
    """Into the working folder: `target`, two draft models and `qwen`; prompts.jsonl, rows.jsonl of what the target
    answers, chats.jsonl, and odd.jsonl with rows that `data prepare` drops."""
    words = ["w0", "w1", "w2", "<think>", "</think>", *(f"w{i}" for i in range(5, SIZES["vocab_size"]))]
    model = write_model("target", words)
    write_model("smaller", words, num_layers=1, seed=1)
    write_model("foreign", [*words[:5], *words[:4:-1]], num_layers=1, seed=1)  # other ids: it drafts by text
    write_model("qwen", words, family="Qwen2", seed=2)
    source = torch.Generator().manual_seed(5)
    ids = [[1, *torch.randint(5, 61, (length,), generator=source).tolist()] for length in (2, 9, 1, 5, 70, 4, 7, 5)]
    texts = [" ".join(words[i] for i in prompt) for prompt in ids]
    questions: list[Any] = [{"prompt": text, "category": "ab"[i % 2]} for i, text in enumerate(texts[:6])]
    questions += [{"turns": [texts[6]], "domain": "c"}, {"messages": [{"role": "user", "content": texts[7]}]}]
    rows, chats = [], []
    for prompt, text in zip([*ids[:6], *([10, *one, 12, 11] for one in ids[6:])], texts, strict=True):
        new = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=32, min_new_tokens=32)[0].tolist()
        rows.append({"input_ids": new, "prompt_length": len(prompt)})
        answer = " ".join(["<think> w7 w8 </think>", *(words[i] for i in new[len(prompt) :])])
        turns = [("user", text), ("assistant", answer), ("user", "w9"), ("assistant", "w8 w7")]
        chats.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    odd = [{"prompt": "w5", "response": "w7 " * 9}, {"prompt": "w9", "response": ""}, chats[5], {"text": "w1 w2"}]
    known = [{"prompt": text} for text in texts[:3]]
    questions.append({"prompt": "w5 " * 300})  # beyond the context
    for name, lines in {"prompts": questions, "rows": rows, "chats": chats, "odd": odd, "known": known}.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@cache
def variants() -> dict[str, dict[str, Any]]:
    """Head sections: of every shipped config of a head, and EXTRAS; adapters of the target no wider than it."""
    from headstart.configs.loader import read_config, shipped

    paths = [*shipped("heads/*.yaml"), *shipped("bench/*.yaml")]
    found = {f"{path.parent.name}/{path.stem}": read_config(path).get("head", {}) for path in paths}
    found |= {f"heads/{name}": found[f"heads/{name.split('+')[0]}"] | keys for name, keys in EXTRAS.items()}
    small = {"target_lora_rank": 4}
    return {name: {**head, **(small if small.keys() & head.keys() else {})} for name, head in found.items() if head}


@cache
def trained(variant: str) -> Path:
    """The run folder of a variant, trained on what its target wrote until it is right now and then."""
    folder = Path("trained", variant.replace("/", "-"))
    path, rows = folder.with_suffix(".yaml"), {"train": "rows.jsonl", "validation": "rows.jsonl"}
    train = {"output_dir": str(folder), "max_steps": 40, "batch_size": 4, "learning_rate": 1e-2, "warmup_steps": 2,
             "device": "cpu", "decode_prompts": 2, "decode_tokens": 8}  # fmt: skip
    config = {"target": {"path": target_of(variant)}, "head": variants()[variant], "data": rows, "train": train}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(config))  # which is YAML too
    command("train", str(path))
    return folder


def target_of(variant: str) -> str:
    return "qwen" if "mimo" in variant else "target"  # engines load modules of that layout with such a model


def loaded(variant: str, folder: Path | None = None) -> tuple[Any, Any]:
    """A fresh target, and on it the trained head, or that of a folder."""
    from headstart.engines.heads import load_head
    from headstart.targets.target import Target

    folder, target = folder or trained(variant) / "final", Target.load(target_of(variant), device="cpu")
    return target, load_head(folder, target)
