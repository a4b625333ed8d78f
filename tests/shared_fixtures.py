"""Tiny random targets and the fixtures that tests of several folders share."""

import contextlib
import io
import itertools
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from headstart.base.children import free_port
from headstart.base.errors import BadInput
from headstart.engines.heads import HEADS
from headstart.eval.decoding import generate
from headstart.eval.decoding.sampling import Sampling, target_probs
from headstart.eval.figures import bandwidth
from headstart.eval.measurement import passes
from headstart.heads.base import DraftBatch, Proposal
from headstart.heads.drafting.drafter import Drafter, Reading
from headstart.heads.stored.folder import fingerprint_of_tensors
from headstart.targets import target as targets
from headstart.targets.check import check_target
from headstart.targets.target import Target
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from words import word_tokenizer

FOUND = (
    "logit_scale",
    "logit_cap",
    "caps_wide",
    "packs",
    "undecodable",
    "decodes_trees",
    "continues_prompts",
    "state_bytes",
)
torch.set_num_threads(1)  # tests run side by side, a process per core
# in a forked child torch makes its pool anew, and fails if two threads do so at once: so its first thread does
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": lambda **k: LlamaConfig(
        num_key_value_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 500.0}, **k
    ),
    "qwen2": lambda **k: Qwen2Config(num_key_value_heads=2, tie_word_embeddings=True, **k),
    "qwen3": lambda **k: Qwen3Config(num_key_value_heads=2, head_dim=16, **k),
    "mistral": lambda **k: MistralConfig(num_key_value_heads=1, sliding_window=8, **k),
    "gemma3": lambda **k: Gemma3TextConfig(
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * (k["num_hidden_layers"] // 2),
        query_pre_attn_scalar=16,
        tie_word_embeddings=False,  # a tied table, scaled on its way in, would only ever repeat its input
        **k,
    ),
    "gpt_neox": lambda **k: GPTNeoXConfig(**k),
    "qwen3_moe": lambda **k: Qwen3MoeConfig(**EXPERTS, **k),
}
OTHERS: dict[str, Callable[..., Any]] = {  # not among the families that tests run through
    "qwen3_5": lambda **k: Qwen3_5TextConfig(
        num_key_value_heads=2,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"] * (k["num_hidden_layers"] // 2),
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        **k,
    ),
    "olmo2": lambda **k: Olmo2Config(num_key_value_heads=2, **k),
    "cohere2": lambda **k: Cohere2Config(
        num_key_value_heads=2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * (k["num_hidden_layers"] // 2),
        tie_word_embeddings=False,
        **k,
    ),
}


def make_model(family: str, **changes: Any) -> PreTrainedModel:
    """A random model of a family whose greedy text does not collapse into one repeated token."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config((FAMILIES | OTHERS)[family](**{**SIZES, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.25)
    model.generation_config.eos_token_id = model.config.eos_token_id
    return model.eval()


def make_target(family: str = "llama", **changes: Any) -> Target:
    model = make_model(family, **changes)
    return Target.of(model, name=f"tiny-{family}", fingerprint=fingerprint_of_tensors(dict(model.named_parameters())))


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_machine():
    """Nothing here has to outlive it: what is synced, and when, is tested by the calls. No figure here is of its
    memory, whose bandwidth each report measures. Processes may fork at any time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setitem(bandwidth.COPY_BYTES, "cpu", 2**20)
        if not torch.cuda.is_available():  # tracing would register a GPU, for which no child that forks could train
            patch.setattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: None)
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    """No draw depends on the tests before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def measured_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch is measured again, however busy the machine that runs the tests, and none is decoded before to warm up,
    unless the test has the fixture `warming_up`."""
    monkeypatch.setattr(passes, "MOST_AGAIN", 0)
    if "warming_up" not in request.fixturenames:
        monkeypatch.setattr(passes.Sides, "warm_up", lambda self, batch: None)


@pytest.fixture(scope="session", autouse=True)
def _checked_once() -> Iterator[None]:
    """The check of a target takes eight times as long as all else that makes one. So one with the fingerprint, config,
    dtype and attention of one that passed is told what was found, unless the test has the fixture `checking`."""
    passed: dict[Any, dict[str, Any]] = {}

    def check(target: Target) -> None:
        key = target.fingerprint, str(target.config.to_dict()), target.dtype, target.own_attention
        if key not in passed or not target.can_decode:
            check_target(target)
            if not target.fingerprint or not target.can_decode:
                return
            passed[key] = {name: getattr(target, name) for name in FOUND}
        vars(target).update(passed[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "check_target", check)
        yield


@pytest.fixture
def checking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every target is checked when it is loaded."""
    monkeypatch.setattr(targets, "check_target", check_target)


@pytest.fixture
def warming_up() -> None:
    """Measurements decode a batch before those that are timed, as they do for users."""


@pytest.fixture(scope="session")
def target() -> Target:
    return make_target()


@pytest.fixture(scope="session")
def tiny_target() -> Callable[..., Target]:
    """A factory: tiny_target(family, vocab_size=...)."""
    return make_target


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    return make_model


@pytest.fixture(scope="session")
def saved_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's folder, with a tokenizer of words w0 .. w60 and no chat template; beside it rows.jsonl, text that the
    target itself wrote."""
    folder = tmp_path_factory.mktemp("saved") / "target"
    make_model("llama").save_pretrained(folder)
    word_tokenizer(SIZES["vocab_size"]).save_pretrained(folder)
    prompts = [[1, 5, 9], [1, 7, 8, 3, 22, 40, 11, 6], [1], [1, 30, 31, 32, 33, 34], [1, 44, 3], [1, 13, 14]]
    texts = generate(Target.load(folder), None, prompts, max_new_tokens=24, eos_token_ids=[]).token_ids
    rows = [{"input_ids": p + t, "prompt_length": len(p)} for p, t in zip(prompts, texts, strict=True)]
    folder.with_name("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="session")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """lora(target's folder, seed=1, **LoraConfig): the new folder of an adapter of it, as peft writes it, that changes
    all linear layers of the decoder unless told otherwise."""

    def write(folder: Path, *, seed: int = 1, **config: Any) -> Path:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(seed)
        settings: dict[str, Any] = {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": "all-linear",
            "task_type": "CAUSAL_LM",
            **config,
        }
        model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(**settings))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.15)
        written = tmp_path_factory.mktemp(f"lora-{seed}-")
        model.save_pretrained(written)
        return written

    return write


@pytest.fixture(params=sorted(HEADS))
def head_type(request: pytest.FixtureRequest) -> str:
    """Every family in the registry."""
    return request.param


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    """Every kind of target that the tests build."""
    return request.param


@pytest.fixture
def make_batch() -> Callable[..., DraftBatch]:
    """A batch of random rows whose first tokens are prompt, with the target's states for a head."""

    def make(target: Target, head: Any, *, num_rows: int = 3, length: int = 16, prompt: int = 4) -> DraftBatch:
        source = torch.Generator().manual_seed(5)
        ids = torch.randint(3, target.vocab_size, (num_rows, length), generator=source)  # [B, T]
        mask = torch.arange(length).expand(num_rows, -1) >= prompt
        mask = mask & (torch.arange(length) < length - torch.arange(num_rows)[:, None])  # ragged ends
        return DraftBatch(ids, mask, target.forward(ids, feature_layers=head.feature_layers))

    return make


@pytest.fixture
def hub_is(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """hub_is(load_dataset): stands in for the package datasets, installed or not."""
    return lambda load: monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))


class TargetAsDrafter(Drafter):
    """The target drafting for itself, with a cache of its own: every draft must be accepted."""

    def __init__(self, target: Target):
        self.target = target

    def begin(self, *, batch_size: int, max_length: int) -> dict[str, Any]:
        return {"cache": self.target.new_cache(max_length), "extent": max_length}

    def _read(self, state: dict[str, Any], tokens: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        positions = start[:, None] + torch.arange(tokens.shape[1])
        return self.target.forward(tokens, cache=state["cache"], positions=positions, extent=state["extent"]).post_norm

    def commit(self, state: dict[str, Any], read: Reading) -> None:
        self._read(state, read.tokens, read.start)
        state["next"] = read.next_tokens.gather(1, read.last[:, None])  # [B, 1]
        state["position"] = read.start + read.num_valid

    def propose(self, state: dict[str, Any], *, num_draft_tokens: int) -> Proposal:
        token, tokens = state["next"], []
        for depth in range(num_draft_tokens):
            hidden = self._read(state, token, state["position"] + depth)
            token = self.target.logits(hidden).argmax(-1)  # [B, 1]
            tokens.append(token)
        return Proposal(torch.cat(tokens, 1))


@pytest.fixture
def target_as_drafter() -> type[TargetAsDrafter]:
    return TargetAsDrafter


@pytest.fixture
def chi_square() -> Callable[..., float]:
    """Chi-square per degree of freedom of sampled texts against the target's distribution, enumerated exactly."""

    def measure(
        target: Target,
        drafter: Any,
        *,
        num_rows: int = 4000,
        num_new: int = 4,
        tree: Any = None,
        verify_cost: float | None = None,
        **how,
    ) -> float:
        sampling = Sampling(**{"temperature": 1.0, **how})
        source = torch.Generator().manual_seed(1)
        prompts, size = [[1, 4, 3]] * num_rows, target.vocab_size
        settings = {**vars(sampling), "max_new_tokens": num_new, "generator": source, "tree": tree}
        settings["verify_cost"] = verify_cost
        rows = torch.tensor(generate(target, drafter, prompts, **settings).token_ids)  # [rows, new]
        places = size ** torch.arange(num_new)
        counts = torch.bincount((rows * places).sum(1), minlength=size**num_new).double()
        every = torch.cartesian_prod(*[torch.arange(size)] * num_new)  # [cells, new]
        ids = torch.cat([torch.tensor([1, 4, 3]).expand(len(every), -1), every], 1)
        probs = target_probs(target.logits(target.forward(ids).post_norm[:, 2:-1]), sampling)  # [cells, new, V]
        joint = probs.gather(2, every[..., None]).squeeze(-1).double().prod(1) * num_rows
        expected = torch.zeros_like(counts).scatter_(0, (every * places).sum(1), joint)
        big = expected >= 5
        rest = (counts[~big].sum() - expected[~big].sum()) ** 2 / expected[~big].sum().clamp(min=1)
        terms = (counts[big] - expected[big]) ** 2 / expected[big]
        return float((terms.sum() + rest) / max(1, int(big.sum())))

    return measure


@pytest.fixture
def ended_process() -> int:
    """The number of a process that is no more."""
    return int(subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout)


@pytest.fixture
def at_every_call():
    """Runs something in child processes that are killed, or meet an OSError, at each of its calls of the system.

    Args: start: makes what is there before. action: what is interrupted. check: asserts what is there after.
    """

    def run(start: Callable[[], object], action: Callable[[], object], check: Callable[[], object]) -> None:
        for fault in ("OSError", "kill"):
            for number in itertools.count(1):
                start()
                child = os.fork()
                if child == 0:
                    try:
                        os._exit(exit_code_of(action, fault, number))
                    except BaseException:  # whatever else was raised: this process is not the test's
                        sys.setprofile(None)
                        traceback.print_exc()
                    finally:
                        os._exit(1)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                check()
                if code == 0:
                    break
                assert code == 9, "the action failed by itself"
            assert number > 5, "the action makes more calls than that"

    return run


def exit_code_of(action: Callable[[], object], fault: str, number: int) -> int:
    """0 where the action makes fewer calls than `number`, 9 where the fault came at that one."""
    num_calls = 0

    def interrupt(frame, event, argument):
        nonlocal num_calls
        if not is_of_the_system(frame, event, argument) or (fault == "OSError" and event != "c_call"):
            return
        num_calls += 1
        if num_calls == number and fault == "kill":
            os._exit(9)
        if num_calls == number:
            raise OSError(28, "no space left on device")

    sys.setprofile(interrupt)
    with contextlib.suppress(OSError, BadInput):  # told as it is, or in a line of ours
        action()
    sys.setprofile(None)
    return 0 if num_calls < number else 9


def is_of_the_system(frame: FrameType, event: str, argument: Any) -> bool:
    """Whether a profiler's event is a call of the system, or of a function of base/files.py."""
    if event != "c_call":
        return event == "call" and frame.f_code.co_filename.endswith("base/files.py")
    owner, module = getattr(argument, "__self__", None), str(getattr(argument, "__module__", ""))
    return owner is io or owner is sys.modules["posix"] or isinstance(owner, io.IOBase) or "safetensors" in module


@pytest.fixture
def python(tmp_path: Path) -> str:
    """In the place of a Python with vLLM or SGLang: its server is the stand-in."""
    script, stand_in = tmp_path / "python", Path(__file__).parent / "serving_stand_in.py"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {stand_in} "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def silent_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names a proxy for everything, at which nothing listens."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
