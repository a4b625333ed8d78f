"""`headstart data extract`: the target's hidden states on disk, for training that never runs the target."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ...configs.errors import BadInput
from ..overrides import Overrides


def extract(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A run YAML: its target, head and data count.")],
    output: Annotated[Path, typer.Option(help="The folder to write; the same command goes on with it.")],
    overrides: Overrides = None,
    storage_dtype: Annotated[str, typer.Option(help="float32, bfloat16 or 8bit.")] = "8bit",
    batch_tokens: Annotated[int, typer.Option(help="Of one target forward, with padding.")] = 8192,
    shard_bytes: Annotated[int, typer.Option(help="Of one shard, about.")] = 512 * 2**20,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    engine: Annotated[str, typer.Option(help="What runs the target: transformers, here, or vllm.")] = "transformers",
    server: Annotated[str | None, typer.Option(help="A running vLLM; else one is started.")] = None,
    vllm_python: Annotated[str | None, typer.Option(help="Of an environment with vLLM; else this one.")] = None,
    vllm_flags: Annotated[str | None, typer.Option(help='Of the started vLLM: "--tensor-parallel-size 8".')] = None,
) -> None:
    """Write what training the head reads of the target: hidden states, in sharded safetensors with checksums.

    \b
    Example:
      headstart data extract runs/eagle3.yaml target.path=MODEL data.train=chats.jsonl --output features/mine
      headstart train runs/eagle3.yaml target.path=MODEL data.train=chats.jsonl data.features=features/mine ...

    Says first how large it will be and how long it will take, and stops where the disk is too small. Interrupted at any
    point, the same command goes on from the last complete shard. On several devices:
    `accelerate launch -m headstart.scripts.data.extract CONFIG key=value ... --output FOLDER`. What it costs against
    running the target in every epoch, `headstart data plan` says.

    `--engine vllm` lets a vLLM server compute the states: this process loads the target's ends alone, see
    docs/launching.md.
    """
    import json
    from contextlib import ExitStack
    from dataclasses import replace
    from functools import partial

    from rich.progress import Progress

    from ...configs.loader import build
    from ...configs.terminal import PlainConsole
    from ...data_pipelines.plan import estimate
    from ...data_pipelines.served.reading import fields_of_served
    from ...data_pipelines.storage.extract import (
        TOKENS,
        ExtractConfig,
        Extraction,
        clear_unfinished,
        fields_of,
        is_finished,
    )
    from ...data_pipelines.storage.features import origin_of
    from ...data_pipelines.storage.shards import Shards, ShardWriter
    from ...heads.decoders.cpu.products import pack_linears
    from ...heads.target import Target
    from ...heads.targets.dtype import with_default_dtype
    from ...train.config import TrainConfig, load_inputs
    from ...train.data import encode_into
    from ...train.launch import runs_on_cpu, start_accelerator
    from ...train.main_process import held_by_main, on_main
    from ...train.target import check_unadapted, reads_of, why_built_with_layers, without_layers
    from .extract_served import ExtractEngine
    from .extract_served import clear_server_files as clear_served

    output = output.expanduser()
    settings = ExtractConfig(storage_dtype=storage_dtype, batch_tokens=batch_tokens, shard_bytes=shard_bytes)
    by = ExtractEngine(engine, server, vllm_python, vllm_flags)
    run = load_inputs(config, overrides or ())
    launched = build(TrainConfig, {"output_dir": str(output), "max_steps": 1, "device": device})
    accelerator = start_accelerator(launched)
    console = PlainConsole(stderr=True, quiet=not accelerator.is_main_process)
    source = run.target if by.is_vllm else with_default_dtype(run.target, "cpu" if runs_on_cpu(launched) else "cuda")
    if by.is_vllm:
        check_unadapted(source, "--engine vllm")
        target = without_layers(source, console, key="--engine vllm", why=why_built_with_layers(run.head))
    else:
        target = Target.load(**vars(source))
    reads = reads_of(run, target)
    data = replace(run.data, max_length=min(run.data.max_length, target.max_positions))
    fields = fields_of(target, reads, settings, origin_of(data, target.tokenizer))
    rank, num_ranks = accelerator.process_index, accelerator.num_processes
    if by.is_vllm and num_ranks > 1:
        raise BadInput("--engine vllm: one process asks for all rows; start it without accelerate")
    if not by.is_vllm:
        target.to(accelerator.device)
        pack_linears(target.base)

    def encode() -> None:
        written = ShardWriter(output, fields=fields).done  # stops where the folder is of other features
        encode_into(output / TOKENS, data, target, console, is_begun=bool(written))

    def tidy() -> None:
        clear_unfinished(output)
        clear_served(output)

    def check() -> None:
        told = estimate(extraction, output, num_ranks=num_ranks, is_served=by.is_vllm)
        console.print(f"{output}: {told}", soft_wrap=True)
        extraction.check_disk(output)

    with ExitStack() as holding:
        folder = held_by_main(accelerator, output, command="headstart data extract", settings=fields, holding=holding)
        if is_finished(output, fields, engine="vllm" if by.is_vllm else None):
            on_main(accelerator, tidy)
            print(f"{output}: finished already")
            return
        start = None
        if by.is_vllm:
            how = {"source": source, "max_length": data.max_length, "storage_dtype": storage_dtype}
            reader = holding.enter_context(by.reader(target, reads, output, **how, console=console))
            start, fields = reader.start, fields | fields_of_served(reader.served)
        on_main(accelerator, encode)
        extraction = Extraction(Shards(output / TOKENS), target, reads, config=settings, fields=fields)
        on_main(accelerator, check)
        if folder is not None:
            folder.keep()  # before, it is removed: one that does not fit is not in the way of the next try
        with Progress(console=console) as progress:
            bar = progress.add_task("tokens", total=extraction.num_tokens(rank, num_ranks))
            show = partial(progress.advance, bar)
            extraction.run(output, rank=rank, num_ranks=num_ranks, on_tokens=show, start=start)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            manifest = extraction.finish(output)
            keys = "num_rows num_tokens num_supervised_tokens bytes bytes_per_token layers storage_dtype"
            entries = manifest.as_json()
            print(json.dumps({key: entries[key] for key in keys.split()}))
        accelerator.wait_for_everyone()


def main() -> None:
    """As `headstart data extract`, for `accelerate launch`."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(context_settings={"allow_interspersed_args": True})(extract)
    try:
        app()
    except BadInput as error:
        print(f"headstart: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
