"""What a target of a kind goes through, and what came of each step: ok, refused, wrong or crashed."""

import contextlib
import io
import json
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from headstart.configs.errors import BadInput, first_line
from headstart.eval.drafters.host import RowText, TextDrafter
from headstart.eval.drafters.lookup import NgramDrafter
from headstart.eval.generate import generate
from headstart.heads.drafter import Drafter
from headstart.heads.drafting import DynamicTree, Proposal, StaticTree, Tree
from headstart.heads.export.check import check_export
from headstart.heads.export.write import export_head
from headstart.heads.nn.documents import Documents
from headstart.heads.registry import HEADS, build_head
from headstart.heads.target import Target
from headstart.train import trainer
from headstart.train.config import load_run
from kind import VOCAB_SIZE, WINDOW, Kind, quietly
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

NUM_NEW = 24
LONG = [1] + [(7 * i * i + 3 * i + 11) % 490 + 4 for i in range(3 * WINDOW - 1)]
PROMPTS = [[1, 400, 9, 270, 9], LONG, [1, 290]]
TREE = StaticTree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)])
WIDE = DynamicTree(num_nodes=7, depth=3, top_k=3)
FAMILIES = "eagle3", "medusa", "mtp", "block"
TOLERANCE = 1e-4  # of the largest value, in fp32


class Wrong(Exception):
    """The product's answer differs from transformers'."""


class PlantedRow(RowText):
    def __init__(self, texts: list[list[int]]):
        self.texts, self.text = texts, []

    def extend(self, tokens) -> None:
        self.text += list(tokens)

    def known(self, num_tokens: int) -> list[int]:
        """What follows in the text that begins like this one; of no use in texts that are not known."""
        length = len(self.text)
        text = next((text for text in self.texts if text[:length] == self.text), [])
        return [*text[length:], *[3] * num_tokens][:num_tokens]

    def is_right(self, depth: int) -> bool:
        """Whether the draft at this depth is left right: rounds then accept none, some or all of four."""
        return (len(self.text) + depth) % 9 not in (2, 3, 8)

    def draft(self, num_tokens: int) -> list[int]:
        known = self.known(num_tokens)
        return [token if self.is_right(i) else (token + 1) % VOCAB_SIZE for i, token in enumerate(known)]

    def node(self, path: tuple[int, ...], known: list[int]) -> int:
        """Right on one path, by turns through the first or the second child of the root, down to a planted fault."""
        depth, turn = len(path) - 1, len(self.text) % 2
        is_right = path == (turn, *[0] * depth) and all(self.is_right(i) for i in range(len(path)))
        return known[depth] if is_right else (known[depth] + 1 + path[-1]) % VOCAB_SIZE


class Planted(TextDrafter):
    """Drafts the texts that are expected, with faults planted in them."""

    drafts_trees = True

    def __init__(self, texts: list[list[int]]):
        self.texts = texts

    def new_rows(self, batch_size: int) -> list[RowText]:
        return [PlantedRow(self.texts) for _ in range(batch_size)]

    def propose_tree(self, state, tree: Tree, *, draws=None) -> Proposal:
        assert isinstance(tree, StaticTree)
        tokens = [[row.node(path, row.known(tree.depth)) for path in tree.paths] for row in state.rows]
        return Proposal(torch.tensor(tokens), torch.tensor(tree.parents).expand(len(tokens), -1))


class Walk:
    """One target: transformers' own model of a kind, and the product's of the same weights in a folder."""

    def __init__(self, kind: Kind, folder: Path):
        self.folder = folder
        self.model: PreTrainedModel = kind.model()
        self.model.save_pretrained(folder / "target")
        tokenizer().save_pretrained(folder / "target")

    @cached_property
    def target(self) -> Target:
        return Target.load(self.folder / "target", dtype="float32", device="cpu")

    @cached_property
    def texts(self) -> list[list[int]]:
        """The new tokens that transformers' `generate` gives to each prompt alone."""
        how: dict[str, Any] = {"do_sample": False, "max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW}
        how |= {"pad_token_id": 0, "eos_token_id": None}
        rows = [torch.tensor([prompt]) for prompt in PROMPTS]
        with torch.no_grad(), quietly():
            texts = [self.model.generate(row, attention_mask=torch.ones_like(row), **how) for row in rows]  # type: ignore[operator]
        return [text[0, row.shape[1] :].tolist() for row, text in zip(rows, texts, strict=True)]

    @property
    def whole_texts(self) -> list[list[int]]:
        return [prompt + text for prompt, text in zip(PROMPTS, self.texts, strict=True)]

    def load(self) -> None:
        assert self.target.vocab_size == self.model.get_output_embeddings().weight.shape[0]

    def states(self) -> None:
        """Features of every layer, post-norm states and logits on a text of more than three windows."""
        ids = torch.tensor([self.whole_texts[1]])
        with torch.no_grad():
            theirs = self.model(input_ids=ids, output_hidden_states=True, use_cache=False)
            layers = tuple(range(self.target.num_layers))
            ours = self.target.forward(ids, feature_layers=layers)
            check_close("logits", self.target.logits(ours.post_norm), theirs.logits)
        check_close("post-norm states", ours.post_norm, theirs.hidden_states[-1])
        for i in layers:
            check_close(f"the state before layer {i}", ours.features[:, :, i], theirs.hidden_states[i])

    def packed(self) -> None:
        """Three texts in one row have the states that they have alone."""
        texts = [LONG[:20], self.whole_texts[0][:27], PROMPTS[2]]
        row = torch.tensor([sum(texts, [])])
        documents = Documents.of([[len(text) for text in texts]], num_positions=row.shape[1])
        packed = self.target.forward(row, documents=documents).post_norm
        alone = torch.cat([self.target.forward(torch.tensor([text])).post_norm for text in texts], 1)
        check_close("packed states", packed, alone)

    def decoded(self, drafter: Drafter | None, rows: tuple[int, ...], **how: Any) -> None:
        """The rows are decoded as one batch: each has its text."""
        prompts = [PROMPTS[i] for i in rows]
        done = generate(self.target, drafter, prompts, max_new_tokens=NUM_NEW, eos_token_ids=[], **how)
        for i, text in zip(rows, done.token_ids, strict=True):
            if text != self.texts[i]:
                place = next(at for at, pair in enumerate(zip(text, self.texts[i], strict=True)) if pair[0] != pair[1])
                raise Wrong(f"prompt of {len(PROMPTS[i])}, {len(rows)} in the batch: token {place} of {NUM_NEW} differs")

    def each(self, drafter: Drafter | None, **how: Any) -> None:
        self.decoded(drafter, (0,), **how)
        self.decoded(drafter, (1,), **how)

    def plain(self) -> None:
        self.each(None)

    def look_ups(self) -> None:
        self.each(NgramDrafter(), num_draft_tokens=4)

    def chains(self) -> None:
        self.each(Planted(self.whole_texts), num_draft_tokens=4)

    def trees(self) -> None:
        self.each(Planted(self.whole_texts), tree=TREE)

    @cached_property
    def head(self) -> Any:
        """A fresh EAGLE-3 head, whose drafts are mostly wrong."""
        head = build_head(HEADS["eagle3"].config_class(type="eagle3"), self.target, seed=1)
        source = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=source))
        return head.eval()

    def eagle3(self) -> None:
        self.each(self.head, num_draft_tokens=3)

    def eagle3_trees(self) -> None:
        self.each(self.head, tree=WIDE)

    def batches(self) -> None:
        """Rows of 5, 48 and 2 tokens together."""
        self.decoded(None, (0, 1, 2))
        self.decoded(Planted(self.whole_texts), (0, 1, 2), num_draft_tokens=4)

    def batches_of_trees(self) -> None:
        self.decoded(Planted(self.whole_texts), (0, 1, 2), tree=TREE)

    def train(self, family: str) -> None:
        """Two steps, from a config as a user's; the losses are finite."""
        rows = zip(self.whole_texts, PROMPTS, strict=True)
        lines = [json.dumps({"input_ids": text, "prompt_length": len(prompt)}) + "\n" for text, prompt in rows]
        (self.folder / "rows.jsonl").write_text("".join(lines))
        train = {"max_steps": 2, "batch_size": 2, "warmup_steps": 1, "learning_rate": 1e-3, "device": "cpu"}
        config = {
            "target": {"path": str(self.folder / "target"), "dtype": "float32"},
            "head": {"type": family, "num_depths": 3},
            "data": {"train": str(self.folder / "rows.jsonl")},
            "train": {**train, "output_dir": str(self.folder / family)},
        }
        path = self.folder / f"{family}.yaml"
        path.write_text(yaml.safe_dump(config))
        trainer.train(load_run(path))
        metrics = [json.loads(line) for line in (self.folder / family / "metrics.jsonl").read_text().splitlines()]
        losses = [row["loss"] for row in metrics if "loss" in row]
        if len(losses) != 2 or not all(0 < loss < 1e6 for loss in losses):
            raise Wrong(f"losses {losses}")

    def export(self, family: str) -> None:
        """For vLLM, as `check` finds it."""
        output = self.folder / f"served_{family}"
        export_head(self.folder / family, output, to="vllm")
        if problems := check_export(output, to="vllm").problems:
            raise Wrong("; ".join(problems))

    def steps(self) -> dict[str, Callable[[], None]]:
        """In order; `load` first, as without it no other is possible."""
        steps = [self.load, self.states, self.packed, self.plain, self.look_ups, self.chains, self.trees]
        steps += [self.eagle3, self.eagle3_trees, self.batches, self.batches_of_trees]
        named: dict[str, Callable[[], None]] = {step.__name__: step for step in steps}
        for family in FAMILIES:
            named[f"train {family}"] = lambda family=family: self.train(family)
            named[f"export {family}"] = lambda family=family: self.export(family)
        return named


def check_close(what: str, ours: Tensor, theirs: Tensor) -> None:
    """Raises Wrong."""
    error = float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())
    if not error <= TOLERANCE:
        raise Wrong(f"{what}: off by {error:.0%} of the largest")


def tokenizer() -> PreTrainedTokenizerFast:
    """Words w0, w1 ..."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w1", eos_token="w2", pad_token="w0")


@contextlib.contextmanager
def silently() -> Iterator[None]:
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def outcome(step: Callable[[], None], folder: Path) -> str:
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


def walked(kind: Kind, only: Collection[str] = ()) -> dict[str, str]:
    """The outcome of each step, or of those in `only`. A step that builds on one that was not ok is left out."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        walk = Walk(kind, folder)
        for step, run in walk.steps().items():
            verb, _, family = step.partition(" ")
            needed = f"train {family}" if verb == "export" else "load"
            if (not only or step in only) and found.get(needed, "ok") == "ok":
                found[step] = outcome(run, folder)
    return found
