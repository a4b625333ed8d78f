"""What a target of a kind goes through, and what came of each step: ok, refused, wrong or crashed."""

import contextlib
import io
import json
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import yaml
from headstart.base.errors import BadInput, first_line
from headstart.engines.check import check_export
from headstart.engines.export import engines_of, export_head
from headstart.engines.heads import HEADS, build_head
from headstart.eval.decoding import generate
from headstart.eval.drafters.draft_model import DraftModelDrafter
from headstart.eval.drafters.lookup import NgramDrafter
from headstart.heads.drafting.drafter import Drafter
from headstart.heads.drafting.trees import DynamicTree
from headstart.scripts.heads_command import describe_family
from headstart.targets.loading import TargetConfig
from headstart.targets.skeleton import load_skeleton
from headstart.targets.target import Target
from headstart.train import trainer
from headstart.train.inputs.config import load_run
from kind import VOCAB_SIZE, WINDOW, Kind
from planted import Planted
from torch import Tensor
from transformers import PreTrainedModel
from words import word_tokenizer

NUM_NEW = 24
LONG = [1] + [(7 * i * i + 3 * i + 11) % 490 + 4 for i in range(3 * WINDOW - 1)]
PROMPTS = [[1, 400, 9, 270, 9], LONG, [1, 290]]
TREE = DynamicTree(num_nodes=8, depth=3, top_k=3)  # of `planted.PATHS`
WIDE = DynamicTree(num_nodes=7, depth=3, top_k=3)
TOLERANCE = 1e-4  # of the largest value, in fp32
FEWEST_TOKENS = 6  # different ones in a text, or it could not tell right from wrong


class Wrong(Exception):
    """The product's answer differs from transformers'."""


class Walk:
    """One target: transformers' own model of a kind, and the product's of the same weights, from a folder.

    Each public method is a step; `steps` has their order.
    """

    def __init__(self, kind: Kind, folder: Path):
        self.kind, self.folder = kind, folder
        self.path = folder / "target"

    # transformers' own

    def transformers(self) -> None:
        """The kind exists in the installed release, and writes texts that can tell right from wrong."""
        self.kind.model().save_pretrained(self.path)
        word_tokenizer(VOCAB_SIZE, bos_token="w1").save_pretrained(self.path)
        fewest = min(len(set(text)) for text in self.texts)
        if fewest < FEWEST_TOKENS:
            raise Wrong(f"a text of {fewest} different tokens: another seed may write a better one")

    @cached_property
    def whole_model(self) -> PreTrainedModel:
        """As transformers itself loads it."""
        return self.kind.auto_class.from_pretrained(self.path).eval()

    @property
    def model(self) -> Any:
        """What is asked for texts and states."""
        return self.whole_model.get_submodule(self.kind.part)

    @cached_property
    def texts(self) -> list[list[int]]:
        """The new tokens that transformers' `generate` gives to each prompt alone."""
        how: dict[str, Any] = {"do_sample": False, "max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW}
        how |= {"pad_token_id": 0, "eos_token_id": None}
        rows = [torch.tensor([prompt]) for prompt in PROMPTS]
        texts = [self.model.generate(row, attention_mask=torch.ones_like(row), **how) for row in rows]
        return [text[0, row.shape[1] :].tolist() for row, text in zip(rows, texts, strict=True)]

    @property
    def whole_texts(self) -> list[list[int]]:
        return [prompt + text for prompt, text in zip(PROMPTS, self.texts, strict=True)]

    # loading and states

    def load(self) -> None:
        assert self.target.num_layers == len(self.target.layers), "layers and states do not match"

    @cached_property
    def target(self) -> Target:
        return Target.load(self.path, dtype="float32", device="cpu")

    def heads(self) -> None:
        """What `headstart heads` prints, from the config alone."""
        skeleton = load_skeleton(TargetConfig(path=str(self.path)))
        assert [describe_family(family, skeleton, sized=True)["name"] for family in HEADS] == list(HEADS)

    def states(self) -> None:
        """Features of every layer, post-norm states and logits of a text longer than four windows."""
        ids = torch.tensor([self.whole_texts[1]])
        with torch.no_grad():
            theirs = self.model(input_ids=ids, output_hidden_states=True, use_cache=False)
            layers = self.target.passed_layers
            ours = self.target.forward(ids, feature_layers=layers)
            check_close("logits", self.target.logits(ours.post_norm), theirs.logits)
        check_close("post-norm states", ours.post_norm, theirs.hidden_states[-1])
        own = theirs.hidden_states[:-1]  # before each layer; of Mamba and RWKV, behind each
        first = int(torch.allclose(own[0], ours.features[:, :, 1], rtol=TOLERANCE))
        for i in range(first, len(layers)):
            check_close(f"states before layer {layers[i]}", ours.features[:, :, i], own[i - first])

    # decoding: token for token the texts

    def decoded(self, drafter: Drafter | None, *rows: int, **how: Any) -> None:
        """Decode rows as one batch. Raises Wrong if one has not its text."""
        prompts = [PROMPTS[i] for i in rows]
        done = generate(self.target, drafter, prompts, max_new_tokens=NUM_NEW, eos_token_ids=[], **how)
        for i, text in zip(rows, done.token_ids, strict=True):
            if text != self.texts[i]:
                place = next(at for at, pair in enumerate(zip(text, self.texts[i], strict=True)) if pair[0] != pair[1])
                of = f"prompt of {len(PROMPTS[i])}" + f" in a batch of {len(rows)}" * (len(rows) > 1)
                raise Wrong(f"{of}: new token {place} differs, by {self.margin(i, place, text[place]):.1g}")

    def margin(self, row: int, place: int, token: int) -> float:
        """How much better transformers' token is than another there, in standard deviations of the logits."""
        before = PROMPTS[row] + self.texts[row][:place]
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([before]), use_cache=False).logits[0, -1]
        return float((logits[self.texts[row][place]] - logits[token]) / logits.std())

    def each(self, drafter: Drafter | None, **how: Any) -> None:
        """A short and a long prompt, each alone."""
        self.decoded(drafter, 0, **how)
        self.decoded(drafter, 1, **how)

    def plain(self) -> None:
        self.each(None)

    def look_ups(self) -> None:
        self.each(NgramDrafter(), num_draft_tokens=4)

    def chains(self) -> None:
        self.each(Planted(self.whole_texts), num_draft_tokens=4)

    def trees(self) -> None:
        self.each(Planted(self.whole_texts), tree=TREE)

    def batches(self) -> None:
        """Rows of 5, 48 and 2 tokens together."""
        self.decoded(None, 0, 1, 2)
        self.decoded(Planted(self.whole_texts), 0, 1, 2, num_draft_tokens=4)

    def batched_trees(self) -> None:
        self.decoded(Planted(self.whole_texts), 0, 1, 2, tree=TREE)

    @cached_property
    def head(self) -> Any:
        """A fresh EAGLE-3 head, whose drafts are mostly wrong."""
        head = build_head(HEADS["eagle3"].config_class(type="eagle3"), self.target, seed=1)
        source = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=source))
        return head.eval()

    def eagle3_chains(self) -> None:
        self.each(self.head, num_draft_tokens=3)

    def eagle3_trees(self) -> None:
        self.each(self.head, tree=WIDE)

    def draft_model(self) -> None:
        """The target as its own draft model."""
        self.each(DraftModelDrafter(self.target), num_draft_tokens=3)

    # training and export

    def train(self, family: str) -> None:
        """Two steps, from a config as a user's; the losses are finite."""
        rows = zip(self.whole_texts, PROMPTS, strict=True)
        known = [([token % VOCAB_SIZE for token in text], len(prompt)) for text, prompt in rows]  # to the tokenizer
        lines = [json.dumps({"input_ids": ids, "prompt_length": length}) + "\n" for ids, length in known]
        (self.folder / "rows.jsonl").write_text("".join(lines))
        train = {"max_steps": 2, "batch_size": 2, "warmup_steps": 1, "learning_rate": 1e-3, "device": "cpu"}
        config = {
            "target": {"path": str(self.path), "dtype": "float32"},
            "head": {"type": family, "num_depths": 3},
            "data": {"train": str(self.folder / "rows.jsonl")},
            "train": {**train, "output_dir": str(self.folder / family)},
        }
        path = self.folder / f"{family}.yaml"
        path.write_text(yaml.safe_dump(config))
        trainer.train_head(load_run(path))
        metrics = [json.loads(line) for line in (self.folder / family / "metrics.jsonl").read_text().splitlines()]
        losses = [row["loss"] for row in metrics if "loss" in row]
        if len(losses) != 2 or not all(0 < loss < 1e6 for loss in losses):
            raise Wrong(f"losses {losses}")

    def export(self, family: str) -> None:
        """For vLLM, as `check` finds it."""
        output = self.folder / f"served_{family}"
        export_head(self.folder / family, output, to="vllm")
        if problems := check_export(output, to="vllm").problems:
            raise Wrong(f"{problems[0]}; {len(problems)} such in all")

    @property
    def steps(self) -> dict[str, Callable[[], None]]:
        """By name, in order."""
        steps = [self.transformers, self.load, self.heads, self.states, self.plain, self.look_ups]
        steps += [self.chains, self.trees, self.batches, self.batched_trees, self.eagle3_chains, self.eagle3_trees]
        steps += [self.draft_model]
        named: dict[str, Callable[[], None]] = {step.__name__.replace("_", " "): step for step in steps}
        for family in sorted(HEADS):
            named[f"train {family}"] = partial(self.train, family)
            if "vllm" in engines_of(family):
                named[f"export {family}"] = partial(self.export, family)
        return named


def check_close(what: str, ours: Tensor, theirs: Tensor) -> None:
    """Raises Wrong."""
    error = float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())
    if not error <= TOLERANCE:
        raise Wrong(f"{what}: off by {error:.1g} of the largest")


@contextlib.contextmanager
def silently() -> Iterator[None]:
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def outcome(step: Callable[[], None], folder: Path) -> str:
    """`ok`, or what else came of it and the line that says why, without the names of temporary folders."""
    try:
        with silently():
            step()
        return "ok"
    except BadInput as error:
        line = f"refused: {error}"
    except Wrong as error:
        line = f"wrong: {error}"
    except Exception as error:
        line = f"crashed: {type(error).__name__}: {first_line(error)}"
    return line.replace(str(folder / "target"), "MODEL").replace(f"{folder}/", "")


def needed(step: str) -> str:
    """The step without which another is not tried."""
    word, _, family = step.partition(" ")
    return {"export": f"train {family}", "load": "transformers"}.get(word, "load")


def walked(kind: Kind, only: Collection[str] = ()) -> dict[str, str]:
    """What was not ok, by step; `only`: of these. What needs a step that was not ok is left out."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        done = set()
        for step, run in Walk(kind, folder).steps.items():
            if step == "transformers" or (needed(step) in done and (not only or step in only)):
                line = outcome(run, folder)
                done |= {step} if line == "ok" else set()
                found |= {step: line} if line != "ok" else {}
    return found
