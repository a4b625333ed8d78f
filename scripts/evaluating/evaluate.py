"""`headstart eval`: the command that measures drafters."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ...base.errors import BadInput
from .engine_options import LARGEST_SEED, MOST_NEW, MOST_ROWS, WINDOW_HELP, EngineArgs, EngineName, EnginePython

TARGET, DRAFTS, PROMPTS, DECODING, MEASURING, SERVERS, OUTPUT = (  # an option in this panel of the help
    partial(typer.Option, rich_help_panel=panel)
    for panel in ("Target", "Drafts", "Prompts", "Decoding", "Measuring", "Servers", "Output")
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
        str,
        TARGET(
            help="float32, bfloat16, float16, auto, in this process (a server's: --engine-args); default: as stored, "
            "on a CPU float32 where bf16 is slow."
        ),
    ] = "",
    device: Annotated[str, TARGET(help="cpu, cuda, cuda:1 ...; default: cuda where there is one.")] = "",
    adapter: Annotated[
        list[str] | None,
        TARGET(
            "--adapter",
            "--checkpoint",
            help="Folder of a LoRA adapter (peft), of a checkpoint of the target, or of several: measured under each "
            "too. Repeatable.",
        ),
    ] = None,
    head: Annotated[list[str] | None, DRAFTS(help="RUN/final, an exported head, or a hub id. Repeatable.")] = None,
    drafter: Annotated[
        list[str] | None,
        DRAFTS(
            help="ngram[:MAX], suffix[:ANSWERS.jsonl], draft-model:PATH, "
            "hybrid:HEAD[:ANSWERS.jsonl], which looks up too, or head:PATH, as --head. Each may have its own K, as in "
            "suffix@7. Repeatable."
        ),
    ] = None,
    num_draft_tokens: Annotated[int | None, DRAFTS(help="K; default: the head's own.", min=1)] = None,
    tree: Annotated[
        list[str] | None,
        DRAFTS(help="chain, dynamic or sampled-chain. Repeatable. [default: chain]"),
    ] = None,
    tree_nodes: Annotated[int, DRAFTS(help="Nodes of a dynamic tree.", min=1, max=1024)] = 24,
    draft_window: Annotated[str, DRAFTS(help=WINDOW_HELP)] = "",
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
        PROMPTS(help="spec-bench, mt-bench, humaneval, gsm8k, mbpp; NAME=FILE. Repeatable."),
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
    turns: Annotated[
        str, PROMPTS(help="own or recorded: behind whose answers a chat goes on; recorded keeps what tools gave back.")
    ] = "own",
    max_new_tokens: Annotated[int, DECODING(help="Tokens per answer, at most.", min=2, max=MOST_NEW)] = 128,
    temperature: Annotated[float, DECODING(help="0 is greedy; above, both sides sample.", min=0.0)] = 0.0,
    top_k: Annotated[int, DECODING(help="Sample among the K most probable tokens; 0: all.", min=0)] = 0,
    top_p: Annotated[float, DECODING(help="Sample within this share of probability; 1: all.")] = 1.0,
    stop: Annotated[list[str] | None, DECODING(help="A text that ends an answer. Repeatable.")] = None,
    accept: Annotated[str, DECODING(help="Which drafts are kept: exact, the lossless rule.")] = "exact",
    seed: Annotated[int, DECODING(help="Seed of sampling; of servers, of the arrivals.", min=0, max=LARGEST_SEED)] = 0,
    batch_size: Annotated[
        list[int] | None, MEASURING(help="Rows at a time. Repeatable. [default: 1]", min=1, max=MOST_ROWS)
    ] = None,
    repeats: Annotated[int, MEASURING(help="Timed passes per side.", min=1, max=1000)] = 3,
    steps: Annotated[
        str, MEASURING(help="eager, graph (CUDA graphs) or compile; default: graph on a GPU, eager on a CPU.")
    ] = "",
    engine: EngineName = "headstart",
    engine_python: EnginePython = "",
    engine_args: EngineArgs = "",
    server: Annotated[
        str,
        SERVERS(
            help="URL of one that runs and drafts, of any engine, with --baseline-server; its key: HEADSTART_API_KEY."
        ),
    ] = "",
    baseline_server: Annotated[str, SERVERS(help="URL of one that serves the same without drafts.")] = "",
    server_bin: Annotated[
        Path | None, SERVERS(envvar="LLAMA_SERVER", help="llama-server's binary, or xllamacpp: that package's.")
    ] = None,
    baseline_drafter: Annotated[
        str, SERVERS(help="What the baseline drafts with in the server, as --drafter; default: nothing.")
    ] = "",
    concurrency: Annotated[list[int] | None, SERVERS(help="Questions in flight. Repeatable. [default: 1]")] = None,
    rate: Annotated[list[float] | None, SERVERS(help="Arrivals per second instead, at random. Repeatable.")] = None,
    slo: Annotated[str, SERVERS(help="What goodput counts: ttft=0.5,tpot=50ms.")] = "",
    output: Annotated[Path, OUTPUT(help="Folder for report.html, report.json and rounds.jsonl.")],
    overwrite: Annotated[bool, OUTPUT("--overwrite", help="Replace a finished report of other settings.")] = False,
    verbose: Annotated[bool, OUTPUT("--verbose", help="Print a line of further figures for each result.")] = False,
) -> None:
    """Measure what drafters save: acceptance, speed against the same engine without drafts, and losslessness.

    \b
    Examples:
      headstart eval --target MODEL --head runs/a/final --prompts prompts.jsonl --output runs/a/eval
      headstart eval --target MODEL --drafter ngram --drafter draft-model:SMALLER ...
      headstart eval --target MODEL --adapter loras/sql --adapter loras/support --head runs/a/final ...
      headstart eval --target MODEL --checkpoint runs/grpo --head runs/a/final ...
      headstart eval --engine vllm --engine-python VLLM/bin/python --concurrency 1 --concurrency 8 --target MODEL ...
      headstart eval --engine llama-server --server-bin BIN --target T.gguf --head HEAD.gguf --prompts prompts.jsonl ...

    Baseline and speculation run interleaved over the same prompts. The same command again continues a measurement that
    was killed. Exit code 1 where a greedy text differs from the target's own by more than rounding, or sampled ones
    are not distributed as the target's; the report says where.
    """
    settings = {key: value for key, value in locals().items() if key not in ("output", "overwrite", "verbose")}

    from ...base.doing import doing
    from ...base.owned import OwnedFolder
    from ...eval.decoding.draft_setting import chain
    from ...eval.decoding.replay import check_steps, default_steps
    from ...eval.decoding.sampling import Sampling
    from ...eval.decoding.verify import ACCEPT_RULES
    from ...eval.measurement.measure import Row
    from ...eval.measurement.result import Result
    from ...eval.measurement.resume import BatchStore
    from ...eval.measurement.turns import with_every_turn
    from ...eval.proof.config import MeasureConfig, check_length
    from ...eval.report.recommendation import is_lossless
    from ...targets.dtype import default_dtype
    from ...targets.loading import default_device, torch_device
    from ...targets.target import Target
    from ...targets.weights.served_adapter import ServedAdapter
    from .eval_drafts import WantedDrafts, named_adapters
    from .eval_run import EvalRun, WantedSuites, report_all, telling_how_to_go_on, warn
    from .eval_served import WantedMeasurement, WantedServers, engine_or_running, evaluate_served

    Sampling(temperature=temperature, top_k=top_k, top_p=top_p)  # raises on what is out of range
    if temperature == 0 and (top_k or top_p < 1):
        raise BadInput("--top-k and --top-p choose what is sampled: they need --temperature above 0")
    program = engine_python if engine != "llama-server" or server else str(server_bin or "")
    by = engine_or_running(engine, program, engine_args, server, baseline_server)
    servers = WantedServers(by, baseline_server, concurrency or [], rate or [], slo)
    drafters = [*(f"head:{folder}" for folder in head or []), *(drafter or [])]
    if not by.is_ours:
        told = {"suite": suite, "tree": tree, "batch-size": batch_size, "adapter": (adapter or [])[1:]}
        told |= {"verify-cost": verify_cost, "accept": accept != "exact", "steps": steps}
        told |= {"draft-window": server and draft_window}
        if option := next((option for option, value in told.items() if value), None):
            raise BadInput(f"--{option}: is not for servers; they take --head, --drafter and --prompts")
        if not prompts:
            raise BadInput("nothing to measure on: give at least one --prompts")
    elif baseline_drafter:
        raise BadInput("--baseline-drafter: goes with --engine vllm, sglang or llama-server")
    wanted = WantedSuites(
        prompts or [], suite or [], suites_dir, system=system, thinking=thinking, told=chat_template_kwargs, turns=turns
    )
    if not by.is_ours:
        sampling = ({"top_k": top_k} if top_k else {}) | ({"top_p": top_p} if top_p < 1 else {})
        asked = WantedMeasurement(
            target=target,
            dtype=dtype,
            device=device,
            drafters=drafters,
            num_draft_tokens=num_draft_tokens,
            prompts=wanted.prompts,
            limit=limit,
            chat=wanted.chat,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            sampling=sampling | ({"stop": stop} if stop else {}),
            repeats=repeats,
            baseline=baseline_drafter,
            window=draft_window,
            adapter=ServedAdapter.read(adapter[0]) if adapter else None,
        )
        if not evaluate_served(servers, asked, output, settings, overwrite=overwrite):
            raise typer.Exit(1)
        return
    if accept not in ACCEPT_RULES:
        raise BadInput(f"--accept {accept}: expected one of {', '.join(ACCEPT_RULES)}")
    adapters = named_adapters(adapter or [])
    wanted.check(limit=limit)
    drafts = WantedDrafts(
        drafters,
        tree or ["chain"],
        tree_nodes,
        temperature=temperature,
        verify_cost=verify_cost,
        window=draft_window,
    )
    device = device or default_device()
    config = MeasureConfig(
        setting=None if num_draft_tokens is None else chain(num_draft_tokens),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        accept=ACCEPT_RULES[accept],
        steps=check_steps(steps or default_steps(torch_device(device)), torch_device(device)),
        stop_strings=tuple(stop or ()),
        num_repeats=repeats,
        seed=seed,
    )
    for length in filter(None, drafts.lengths):
        check_length(length, max_new_tokens)
    with telling_how_to_go_on(), OwnedFolder(output, command="headstart eval", settings=settings) as folder:
        folder.check_settings(settings, finished="report.json", overwrite=overwrite)
        with BatchStore(folder.path, on_first=folder.keep) as store:
            specs: dict[str, str] = {}

            def measure(under: str, path: str | None) -> tuple[Target, list[Result], list[Row]]:
                computed = dtype or default_dtype(target, device)
                with doing(f"loading {target}"):
                    loaded = Target.load(target, dtype=computed, device=device, adapter=path)
                suites = wanted.load(loaded, max_new_tokens=max_new_tokens, limit=limit, under=under)
                suites = [with_every_turn(suite, loaded, config, batch_size=max(batch_size or [1])) for suite in suites]
                named = drafts.load(loaded)
                specs.update(zip([one.name for one in named], drafts.specs, strict=True))
                run = EvalRun(loaded, named, suites, config, batch_size or [1], drafts, store)
                results, rounds = run.measure()
                under_it = None if loaded.adapter is None else loaded.adapter.info
                return loaded, [replace(result, adapter=under_it) for result in results], rounds

            if num := len(store):
                warn(f"{store.path}: {num} batches of an unfinished measurement; those of these settings are kept")
            adapted = [measure(name, path)[1:] for name, path in adapters.items()]  # one target in memory at a time
            loaded, results, rounds = measure("", None)
            results += [result for found, _ in adapted for result in found]
            rounds += [row for _, raw in adapted for row in raw]
            folder.record(settings)
            report_all(loaded, results, rounds, folder.path, specs=specs, window=draft_window, verbose=verbose)
            store.finish()
    if not all(map(is_lossless, results)):
        raise typer.Exit(1)
