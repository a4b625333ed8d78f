"""What digests.py compares, in groups: each gives the names of its values and what computes them."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from digest_world import command, content_of, digest_of, files_of, kept, loaded, trained, variants

Tasks = dict[str, Callable[[], Mapping[str, Any]]]  # by the beginning of the names of what each computes
WARM = "--temperature 0.8"
EVALS = {  # options of `headstart eval`; a head by its variant
    **{f"trees-{one}": f"--head {one} --tree chain --tree dynamic --batch-size 3"
       for one in "eagle eagle3 medusa mtp draft_lm".split()},
    "single": "--head eagle3 --head mtp --tree chain --tree dynamic",
    "sampled": f"--head eagle3+cut --head medusa {WARM} --tree sampled-chain",
    "sampled-batches": f"--head eagle3 {WARM} --tree sampled-chain --tree chain --batch-size 4 --seed 3",
    "truncated": "--head medusa --temperature 1 --top-p 0.8 --top-k 20 --tree chain",
    "adapted": "--head medusa2 --tree chain",
    "stopped": "--head eagle3 --head eagle3+cut --num-draft-tokens 3 --stop w7 --limit 6",
    "lookups": "--drafter ngram --drafter ngram:2 --drafter suffix --batch-size 1 --batch-size 4",
    "models": "--drafter draft-model:smaller --batch-size 1 "
              "--batch-size 4",
    "drafters-warm": f"--drafter ngram --drafter suffix --drafter draft-model:smaller {WARM}",
    "beside": "--drafter ngram --drafter draft-model:smaller --head eagle3",
}  # fmt: skip
PLANS = {
    "head": "--head eagle3 --tree dynamic:6 --num-draft-tokens 2 --num-draft-tokens 4",
    "lookups": "--drafter suffix",
}
RUNS = {  # further ways to train: a config, and keys
    "weighted": 'eagle3 data.train=chats.jsonl data.segment_weights={"think":0.5}',
    "bucketed": "mtp data.layout=bucketed train.accumulation=2 train.optimizer=muon train.matrix_learning_rate=1e-2",
    "split": "medusa data.max_length=20 data.too_long=split data.turns=last data.train=chats.jsonl",
    "continued": "eagle3 train.start_from=trained/heads-eagle3/final",
    "adapters": "eagle3 train.start_from=trained/heads-eagle3/final train.lora_rank=2",
    "best": "medusa train.validate_every=2 train.checkpoint_every=3 train.patience=3",
    "killed": "eagle train.checkpoint_every=2",
    "shipped-eagle3": "runs/eagle3.yaml head.loss.l1=0.5",
    "shipped-medusa": 'runs/medusa.yaml head.loss={"l1":1.0}',
}
EXPORTS = {"eagle": "vllm sglang", "hass": "vllm sglang", "eagle3": "vllm sglang speculators", "medusa": "vllm",
           "eagle3+cut": "vllm sglang speculators", "medusa2": "vllm", "mtp+mimo": "vllm sglang hf",
           "draft_lm": "vllm sglang hf"}  # fmt: skip


def losses() -> Tasks:
    return {variant: partial(losses_of, variant) for variant in variants()}


def losses_of(variant: str) -> dict[str, Any]:
    """Loss, its depths and its gradients on padded rows, and the same with weights."""
    from headstart.heads.base import DraftBatch

    (target, head), rows = loaded(variant), content_of(Path("rows.jsonl"))
    texts = [torch.tensor(row["input_ids"]) for row in rows]
    masks = [torch.arange(len(row["input_ids"])) >= row["prompt_length"] for row in rows]
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    weights = torch.rand(pad(texts).shape, generator=torch.Generator().manual_seed(3))
    ids, mask, found = pad(texts), pad(masks), {}
    for name, given in {"padded": None, "weighted": weights}.items():
        torch.manual_seed(0)
        head.train().requires_grad_(True).zero_grad()
        output = target.forward(ids, feature_layers=tuple(head.feature_layers))
        out = head.loss(DraftBatch(input_ids=ids, loss_mask=mask, output=output, weights=given))
        out.loss.backward()
        gradients = {key: one.grad for key, one in head.named_parameters() if one.grad is not None}
        found[f"{name}/loss"] = out.loss.item()
        found[f"{name}/depths"] = [out.depth_loss.tolist(), out.depth_count.tolist(), out.hits.sum((0, 1)).tolist()]
        found[f"{name}/gradients"] = {key: digest_of(one) for key, one in gradients.items()}
    return found


@contextlib.contextmanager
def watched() -> Iterator[list[Any]]:
    """The tokens of every proposal that is made within; copies of the one before do not count."""
    from headstart.heads.drafting.trees import Proposal

    found: list[Any] = []
    name = "__new__" if issubclass(Proposal, tuple) else "__init__"
    make = getattr(Proposal, name)

    def making(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = make(self, *args, **kwargs)
        tokens = (self if made is None else made).tokens.tolist()
        if found[-1:] != [tokens]:
            found.append(tokens)
        return made

    with mock.patch.object(Proposal, name, making):
        yield found


def drafts() -> Tasks:
    ways = "chain short chain-warm dynamic dynamic-warm sampled-chain".split()
    return {f"{variant}/{way}": partial(drafts_of, variant, way) for variant in variants() for way in ways}


def drafts_of(variant: str, way: str) -> dict[str, Any]:
    """Texts of `generate`, what each round drafted and accepted, and the drafted tokens."""
    from headstart.eval.decoding import generate
    from headstart.heads.drafting import trees as drafting

    target, head = loaded(variant)
    depth = min(4, head.max_draft_tokens or 4)
    how: dict[str, Any] = {"num_draft_tokens": 2} if way == "short" else {}
    if way.startswith("dynamic"):
        how["tree"] = drafting.DynamicTree(num_nodes=10, depth=depth, top_k=4)
    elif way == "sampled-chain":
        how["tree"] = drafting.SampledChain(depth)
    if way.endswith("warm") or way.startswith("sampled"):
        how |= {"temperature": 0.8, "top_p": 0.95, "generator": torch.Generator().manual_seed(7)}
    prompts = [row["input_ids"][: row["prompt_length"]] for row in content_of(Path("rows.jsonl"))[:4]]
    with watched() as drafted:
        done = generate(target, head, prompts, max_new_tokens=24, **how)
    counts = [[one.num_drafted, one.num_accepted, one.num_committed, one.num_emitted] for one in done.rounds]
    return {"texts": done.token_ids, "rounds": counts, "drafted": drafted}


def reports() -> Tasks:
    planned = {f"plan-{name}": partial(planned_of, name) for name in PLANS}
    families = {"families": lambda: {"costs": kept(json.loads(command("heads", "--target", "target", "--json")[1]))}}
    return {**{name: partial(report_of, name) for name in EVALS}, **planned, **families}


def asked(verb: str, words: Sequence[str], output: str) -> list[str]:
    """The words of a `headstart eval` or `plan`; a variant behind --head becomes its folder."""
    pairs = zip(["", *words[:-1]], words, strict=True)
    paths = [str(trained(f"heads/{one}") / "final") if last == "--head" else one for last, one in pairs]
    common = "--target target --prompts prompts.jsonl --device cpu --max-new-tokens 16 --output".split()
    return [verb, *common, output, *paths]


def report_of(name: str) -> dict[str, Any]:
    """report.json, rounds.jsonl and the drafted tokens of a `headstart eval`."""
    words, folder = EVALS[name].split(), Path("evals", name)
    with watched() as drafted:
        code, _ = command(*asked("eval", words, str(folder)), "--repeats", "2", "--tree-nodes", "8")
    report, rounds = content_of(folder / "report.json"), content_of(folder / "rounds.jsonl")
    return {"exit_code": code, "report": report, "rounds": rounds, "drafted": drafted}


def planned_of(name: str) -> dict[str, Any]:
    """What plan.json says of acceptance, which depends on no time."""
    how = "--seconds 86400 --batch-size 1 --batch-size 8".split()
    code, _ = command(*asked("plan", PLANS[name].split(), f"plans/{name}"), *how)
    found = json.loads(Path("plans", name, "plan.json").read_text())
    return {"exit_code": code, **{key: found[key] for key in ("num_prompts", "max_new_tokens", "acceptance")}}


def training() -> Tasks:
    further = {f"runs/{name}": partial(run_of, name) for name in RUNS}
    return {**{name: partial(training_of, partial(trained, name)) for name in variants()}, **further}


def training_of(train: Callable[[], Path]) -> dict[str, Any]:
    """Rows of metrics.jsonl, the resolved config, and the head folder with a digest of each tensor."""
    folder = train()
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return {"metrics": content_of(folder / "metrics.jsonl"), "config": content_of(folder / "config.yaml"),
            "final": files_of(folder / "final"), "names": names}  # fmt: skip


def run_of(name: str) -> dict[str, Any]:
    """8 steps of one of RUNS; `killed` stops on the way and goes on."""
    config, *keys = RUNS[name].split()
    trained("heads/eagle3")
    if not config.startswith("runs/"):
        config = str(trained(f"heads/{config}").with_suffix(".yaml"))
    common = f"target.path=target data.train=rows.jsonl train.max_steps=8 train.device=cpu train.output_dir=runs/{name}"
    common += " train.precision=fp32 train.batch_size=2 train.warmup_steps=2"
    for more in (["train.stop_at_step=3"], []) if name == "killed" else ([],):
        command("train", config, *common.split(), *keys, *more)
    return training_of(lambda: Path("runs", name))


def data() -> Tasks:
    """Files that the verbs of `headstart data` write, and a head that is trained from stored features."""
    run, alone = "trained/heads-eagle3.yaml", "--device cpu --output"
    answers = "data/regenerate_local.yaml sources=chats.jsonl target=target sampling.max_tokens=9 engine.device=cpu"
    verbs = {  # the folder, and the command
        "prepare": ("ready", "data prepare data/prepare.yaml sources=[chats.jsonl,odd.jsonl] exclude=[known.jsonl]"
                             " output=ready validation_share=0.3"),
        "regenerate": ("answers", f"data regenerate {answers} output=answers"),
        **{f"extract-{dtype}": (dtype, f"data extract {run} --storage-dtype {dtype} {alone} {dtype}")
           for dtype in ("8bit", "bfloat16", "float32")},
        "stored": ("stored/final", f"train {run} data.features=8bit train.max_steps=8 train.output_dir=stored"),
    }  # fmt: skip
    return {name: partial(written_by, folder, words) for name, (folder, words) in verbs.items()}


def written_by(folder: str, words: str) -> dict[str, Any]:
    trained("heads/eagle3")  # whose config the commands name
    return {"exit_code": command(*words.split())[0], **files_of(folder)}


def exports() -> Tasks:
    return {f"{one}/{to}": partial(export_of, one, to) for one, layouts in EXPORTS.items() for to in layouts.split()}


def export_of(variant: str, to: str) -> dict[str, Any]:
    """An exported folder, what `headstart check` exits with, and the head that is read back."""
    folder = Path("served", f"{list(EXPORTS).index(variant)}-{to}")  # names of families may not be in its path
    command("export", str(trained(f"heads/{variant}")), str(folder), "--to", to)
    _, head = loaded(f"heads/{variant}", folder)
    again = {name: digest_of(value) for name, value in head.state_dict().items()}
    return {"files": files_of(folder), "check": command("check", str(folder))[0], "again": again}


GROUPS: dict[str, Callable[[], Tasks]] = {
    "losses": losses, "drafts": drafts, "reports": reports, "training": training, "data": data, "exports": exports
}  # fmt: skip
