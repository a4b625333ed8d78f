"""`headstart eval`: the command that measures drafters."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from ..configs.errors import BadInput, first_line

if TYPE_CHECKING:
    import torch

    from ..eval.decoding.verify import AcceptRule
    from ..eval.measurement.servers.llama_server import ServerFiles

TARGET, DRAFTS, PROMPTS, DECODING, MEASURING, OUTPUT = (  # an option in this panel of the help
    partial(typer.Option, rich_help_panel=panel)
    for panel in ("Target", "Drafts", "Prompts", "Decoding", "Measuring", "Output")
)


class PanelledCommand(TyperCommand):
    """A command whose plain help has a section for each panel of its options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            row = option.get_help_record(ctx)
            if row is not None:
                sections.setdefault(getattr(option, "rich_help_panel", None) or "Help", []).append(row)
        for panel, rows in sections.items():
            with formatter.section(panel):
                formatter.write_dl(rows)


def evaluate(
    *,
    target: Annotated[str, TARGET(help="The target: local folder or hub id.")],
    dtype: Annotated[
        str, TARGET(help="float32, bfloat16, float16, auto; default: as stored, on a CPU float32 where bf16 is slow.")
    ] = "",
    device: Annotated[str, TARGET(help="cpu, cuda, cuda:1 ...; default: cuda where there is one.")] = "",
    adapter: Annotated[
        list[str] | None,
        TARGET(help="Folder of a LoRA adapter (peft): measured under it too, as served with it. Repeatable."),
    ] = None,
    head: Annotated[list[str] | None, DRAFTS(help="RUN/final, an exported head, or a hub id. Repeatable.")] = None,
    drafter: Annotated[
        list[str] | None,
        DRAFTS(
            help="ngram[:MAX], suffix[:ANSWERS.jsonl], sparse-self[:BUDGET], draft-model:PATH, "
            "hybrid:HEAD[:ANSWERS.jsonl], which looks up too, or head:PATH, as --head. Each may have its own K, as in "
            "suffix@7. Repeatable."
        ),
    ] = None,
    num_draft_tokens: Annotated[int | None, DRAFTS(help="K; default: the head's own.")] = None,
    tree: Annotated[
        list[str] | None,
        DRAFTS(help="chain, static, dynamic, optimal, sampled or sampled-chain. Repeatable. [default: chain]"),
    ] = None,
    tree_nodes: Annotated[int, DRAFTS(help="Nodes of a tree, at most.", min=1)] = 24,
    verify_cost: Annotated[
        str | None,
        DRAFTS(
            help="Each row of a head's chains verifies the drafts that pay, given what one more token costs: measured, "
            "or a number, in rounds that verify none. Default: all are verified."
        ),
    ] = None,
    prompts: Annotated[list[str] | None, PROMPTS(help="JSONL rows with prompt, messages or turns. Repeatable.")] = None,
    suite: Annotated[
        list[str] | None,
        PROMPTS(help="spec-bench, mt-bench, humaneval, gsm8k, mbpp, speed-bench[:SUBSET]; NAME=FILE. Repeatable."),
    ] = None,
    limit: Annotated[int | None, PROMPTS(help="Only the first N prompts.", min=1)] = None,
    suites_dir: Annotated[
        Path, PROMPTS(envvar="HEADSTART_SUITES", help="Where suites' files are; else from the hub.")
    ] = Path("suites"),
    system: Annotated[str | None, PROMPTS(help="A system prompt, put in front of chats that have none.")] = None,
    thinking: Annotated[str, PROMPTS(help="on or off: what the chat template is told as enable_thinking.")] = "",
    chat_template_kwargs: Annotated[
        str, PROMPTS(help='More that the template is told, as JSON: \'{"reasoning_effort": "low"}\'.')
    ] = "",
    max_new_tokens: Annotated[int, DECODING(help="Tokens per answer, at most.", min=2)] = 128,
    temperature: Annotated[float, DECODING(help="0 is greedy; above, both sides sample.", min=0.0)] = 0.0,
    top_k: Annotated[int, DECODING(help="Sample among the K most probable tokens; 0: all.", min=0)] = 0,
    top_p: Annotated[float, DECODING(help="Sample within this share of probability; 1: all.")] = 1.0,
    stop: Annotated[list[str] | None, DECODING(help="A text that ends an answer. Repeatable.")] = None,
    accept: Annotated[str, DECODING(help="exact; or typical, which needs --allow-lossy.")] = "exact",
    allow_lossy: Annotated[
        bool, DECODING("--allow-lossy", help="Permit a rule that changes the text's distribution.")
    ] = False,
    typical_epsilon: Annotated[
        float | None, DECODING(help="typical accepts above min(EPSILON, DELTA exp(-entropy)). [default: 0.09]", min=0.0)
    ] = None,
    typical_delta: Annotated[float | None, DECODING(help="DELTA of it. [default: 0.3]", min=0.0)] = None,
    seed: Annotated[int, DECODING(help="Seed of sampling.")] = 0,
    batch_size: Annotated[list[int] | None, MEASURING(help="Rows at a time. Repeatable. [default: 1]")] = None,
    repeats: Annotated[int, MEASURING(help="Timed passes per side.", min=1)] = 3,
    steps: Annotated[
        str, MEASURING(help="eager, graph (CUDA graphs) or compile; default: graph on a GPU, eager on a CPU.")
    ] = "",
    compare: Annotated[
        str,
        MEASURING(
            help="Time another engine beside ours: transformers, with these drafters too; or "
            "llama-server:PATH[:TARGET.gguf], without drafts."
        ),
    ] = "",
    engine: Annotated[
        str, MEASURING(help="headstart; or llama-server: the head and the target are GGUF files.")
    ] = "headstart",
    server_bin: Annotated[
        Path | None, MEASURING(envvar="LLAMA_SERVER", help="llama-server's binary, or xllamacpp: that package's.")
    ] = None,
    server_args: Annotated[str, MEASURING(help="More flags for it, e.g. '-t 8 -ngl 99'.")] = "",
    output: Annotated[Path, OUTPUT(help="Folder for report.html, report.json and rounds.jsonl.")],
    overwrite: Annotated[bool, OUTPUT("--overwrite", help="Replace a finished report of other settings.")] = False,
) -> None:
    """Measure what drafters save: acceptance, speed against the same engine without drafts, and losslessness.

    \b
    Examples:
      headstart eval --target MODEL --head runs/a/final --prompts prompts.jsonl --output runs/a/eval
      headstart eval --target MODEL --drafter ngram --drafter draft-model:SMALLER --compare transformers ...
      headstart eval --target MODEL --adapter loras/sql --adapter loras/support --head runs/a/final ...
      headstart eval --engine llama-server --server-bin BIN --target T.gguf --head HEAD.gguf --prompts prompts.jsonl ...

    Baseline and speculation run interleaved over the same prompts. The same command again continues a measurement that
    was killed. Exit code 1 where a greedy text differs from the target's own by more than rounding, or sampled ones
    are not distributed as the target's; the report says where.
    """
    settings = {key: value for key, value in locals().items() if key not in ("output", "overwrite")}

    from ..configs.owned import OwnedFolder
    from ..eval.decoding.draft_setting import chain
    from ..eval.decoding.replay import check_steps, default_steps
    from ..eval.measurement.config import MeasureConfig
    from ..eval.measurement.measure import Row
    from ..eval.measurement.result import Result
    from ..eval.measurement.resume import BatchStore
    from ..eval.measurement.servers.served import swept
    from ..eval.report.recommendation import is_lossless
    from ..eval.suites.turns import with_every_turn
    from ..heads.loading import default_device
    from ..heads.target import Target
    from ..heads.targets.dtype import default_dtype
    from .eval_drafts import WantedDrafts, named_adapters
    from .eval_run import EvalRun, WantedSuites, held_out, measure_server, parse_yardstick, report_all, warn

    if temperature == 0 and (top_k or top_p < 1):
        raise BadInput("--top-k and --top-p choose what is sampled: they need --temperature above 0")
    rule = chosen_rule(accept, allow_lossy=allow_lossy, epsilon=typical_epsilon, delta=typical_delta)
    yardstick = parse_yardstick(compare, target)
    others = bool(drafter or tree or compare or batch_size or verify_cost)
    served = served_files(engine, server_bin, target, head or [], server_args, others=others)
    adapters = named_adapters(adapter or [])
    if adapters and (served or yardstick):
        raise BadInput(f"--adapter {next(iter(adapters.values()))}: llama-server computes without it: leave one out")
    wanted = WantedSuites.of(
        prompts or [], suite or [], suites_dir, system=system, thinking=thinking, told=chat_template_kwargs
    )
    drafts = None
    if not served:
        drafts = WantedDrafts.of(
            head or [], drafter or [], tree or ["chain"], tree_nodes, temperature=temperature, verify_cost=verify_cost
        )
    device = device or default_device()
    config = MeasureConfig(
        setting=None if num_draft_tokens is None else chain(num_draft_tokens),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        accept=rule,
        steps=check_steps(steps or default_steps(torch_device(device)), torch_device(device)),
        stop_strings=tuple(stop or ()),
        num_repeats=repeats,
        seed=seed,
    )
    with OwnedFolder(output, command="headstart eval", settings=settings) as folder:
        folder.check_settings(settings, finished="report.json", overwrite=overwrite)
        with BatchStore(folder.path, on_first=folder.keep) as store:

            def measure(under: str, path: str | None) -> tuple[Target, list[Result], list[Row]]:
                computed = dtype or default_dtype(target, device)
                loaded = Target.load(target, dtype=computed, device=device, adapter=path)
                suites = wanted.load(loaded, max_new_tokens=max_new_tokens, limit=limit, under=under)
                suites = [with_every_turn(suite, loaded, config, batch_size=max(batch_size or [1])) for suite in suites]
                suites = held_out(suites, drafts.trees if drafts else [])
                if drafts is None:
                    assert served is not None
                    lengths = swept(served) if num_draft_tokens is None else [num_draft_tokens]
                    return loaded, measure_server(loaded, served, suites, config, lengths, store), []
                run = EvalRun(loaded, drafts.load(loaded), suites, config, batch_size or [1], drafts, store)
                results, rounds = run.measure()
                if compare:
                    results += run.compare_llama_server(yardstick) if yardstick else run.compare_transformers()
                under_it = None if loaded.adapter is None else loaded.adapter.info
                return loaded, [replace(result, adapter=under_it) for result in results], rounds

            if num := len(store):
                warn(f"{store.path}: {num} batches of an unfinished measurement; those of these settings are kept")
            adapted = [measure(name, path)[1:] for name, path in adapters.items()]  # one target in memory at a time
            loaded, results, rounds = measure("", None)
            results += [result for found, _ in adapted for result in found]
            rounds += [row for _, raw in adapted for row in raw]
            folder.record(settings)
            report_all(loaded, results, rounds, folder.path)
            store.finish()
    if rule.is_lossless and not all(map(is_lossless, results)):
        raise typer.Exit(1)


def served_files(
    engine: str, binary: Path | None, target: str, heads: Sequence[str], args: str, *, others: bool
) -> "ServerFiles | None":
    """What `--engine llama-server` serves; None for our own engine. Raises BadInput on what it cannot be asked for.

    Args: others: whether drafters, trees, batch sizes or engines beside it were asked for.
    """
    from ..eval.measurement.servers.llama_server import ServerFiles

    if engine == "headstart":
        if args:
            raise BadInput("--server-args: goes with --engine llama-server")
        return None
    if engine != "llama-server":
        raise BadInput(f"--engine {engine}: expected headstart or llama-server")
    if binary is None:
        raise BadInput("--engine llama-server: name its binary with --server-bin or in LLAMA_SERVER")
    if len(heads) != 1 or not heads[0].endswith((".gguf", ".ngrams")) or not target.endswith(".gguf"):
        raise BadInput("--engine llama-server: takes --target TARGET.gguf and one --head HEAD.gguf or answers.ngrams")
    if others:
        raise BadInput("--engine llama-server: drafts chains of that head at batch 1, alone")
    return ServerFiles(binary, Path(target), Path(heads[0]), args)


def chosen_rule(accept: str, *, allow_lossy: bool, epsilon: float | None, delta: float | None) -> "AcceptRule":
    """Raises BadInput on an unknown accept rule, one that is not lossless without --allow-lossy, and settings of
    another rule."""
    from ..eval.decoding.verify import ACCEPT_RULES

    if accept not in ACCEPT_RULES:
        raise BadInput(f"--accept {accept}: expected one of {', '.join(ACCEPT_RULES)}")
    if not ACCEPT_RULES[accept].is_lossless and not allow_lossy:
        raise BadInput(f"--accept {accept}: is not lossless, the text would not be the target's; add --allow-lossy")
    if accept != "typical" and (epsilon, delta) != (None, None):
        raise BadInput(f"--accept {accept}: --typical-epsilon and --typical-delta go with --accept typical")
    return ACCEPT_RULES[accept].having(epsilon=epsilon, delta=delta)


def torch_device(name: str) -> "torch.device":
    """Raises BadInput on a device that torch does not know."""
    import torch

    try:
        return torch.device(name)
    except RuntimeError as error:
        raise BadInput(f"--device {name}: {first_line(error)}") from error
