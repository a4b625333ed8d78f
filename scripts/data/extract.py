"""`headstart data extract`: the target's hidden states on disk, for training that never runs the target."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ...base.ending import ending_in_time
from ...base.errors import BadInput
from .overrides import Overrides

COMMAND = "headstart data extract"


def extract(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A run YAML: its target, head and data count.")],
    output: Annotated[Path, typer.Option(help="The folder to write; the same command goes on with it.")],
    overrides: Overrides = None,
    storage_dtype: Annotated[str, typer.Option(help="float32, bfloat16 or 8bit.")] = "8bit",
    batch_tokens: Annotated[int, typer.Option(help="Of one target forward, with padding.", min=1, max=2**20)] = 8192,
    shard_bytes: Annotated[int, typer.Option(help="Of one shard, about.", min=1, max=2**36)] = 512 * 2**20,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
) -> None:
    """Write what training the head reads of the target: hidden states, in sharded safetensors with checksums.

    \b
    Example:
      headstart data extract runs/eagle3.yaml target.path=MODEL data.train=chats.jsonl --output features/mine
      headstart train runs/eagle3.yaml target.path=MODEL data.train=chats.jsonl data.features=features/mine ...

    Says first how large it will be, and stops where the disk is too small. Interrupted at any point, the same command
    goes on from the last complete shard. On several devices:
    `accelerate launch -m headstart.scripts.data.extract CONFIG key=value ... --output FOLDER`. Whether it pays against
    running the target in every epoch, `headstart doctor --target MODEL` says.

    `engine.name=vllm` lets a vLLM server compute the states, one that is started or `engine.server=URL`: this process
    loads the target's ends alone, see docs/launching.md.
    """
    import json
    from contextlib import ExitStack
    from dataclasses import replace

    from rich.filesize import decimal

    from ...base.doing import doing
    from ...base.owned import check_owner
    from ...base.terminal import PlainConsole
    from ...configs.loader import build
    from ...data_pipelines.rows.config import DataConfig
    from ...data_pipelines.served.reading import fields_of_served
    from ...data_pipelines.served.vllm_process import clear_server_files, served_states
    from ...data_pipelines.storage.extract import (
        TOKENS,
        ExtractConfig,
        Extraction,
        clear_unfinished,
        fields_of,
        is_finished,
    )
    from ...data_pipelines.storage.features import origin_of
    from ...data_pipelines.storage.shards import MANIFEST, Shards, ShardWriter
    from ...heads.stored.fit import check_fit
    from ...targets.cpu.packing import pack_linears
    from ...targets.dtype import with_default_dtype
    from ...targets.target import Target
    from ...train.inputs.config import TrainConfig, load_inputs
    from ...train.inputs.data import check_sources, encode_into
    from ...train.inputs.launch import runs_on_cpu, start_accelerator
    from ...train.inputs.main_process import held_by_main, on_main
    from ...train.inputs.target import reads_of, why_built_with_layers, without_layers

    output = output.expanduser()
    check_owner(output, command=COMMAND)
    settings = ExtractConfig(storage_dtype=storage_dtype, batch_tokens=batch_tokens, shard_bytes=shard_bytes)
    run = load_inputs(config, overrides or ())
    is_served = not run.engine.is_ours
    if not (output / MANIFEST).is_file():
        check_sources(replace(run.data, validation=None, features=None), encoded=output / TOKENS)
    skeleton = check_fit(run.head, run.target)
    launched = build(TrainConfig, {"output_dir": str(output), "max_steps": 1, "device": device})
    accelerator = start_accelerator(launched)
    console = PlainConsole(stderr=True, quiet=not accelerator.is_main_process)
    source = run.target if is_served else with_default_dtype(run.target, "cpu" if runs_on_cpu(launched) else "cuda")
    if is_served and accelerator.num_processes > 1:
        raise BadInput("engine.name vllm: one process asks for all rows; start it without accelerate")

    rank, num_ranks = accelerator.process_index, accelerator.num_processes

    def data_of(target: Target) -> DataConfig:
        return replace(run.data, max_length=min(run.data.max_length, target.num_positions))

    def load() -> Target:
        if is_served:
            return without_layers(source, console, key="engine.name vllm", why=why_built_with_layers(run.head))
        target = Target.load(**vars(source)).to(accelerator.device)
        pack_linears(target.base)
        return target

    def encode_first() -> None:
        """The rows of a new folder before the target is loaded, so that what is wrong with them is said at once."""
        if skeleton is not None and folder is not None and folder.is_new:
            encode_into(output / TOKENS, data_of(skeleton), skeleton, console, is_begun=False)

    def encode() -> None:
        written = ShardWriter(output, fields=fields).done  # stops where the folder is of other features
        encode_into(output / TOKENS, data, target, console, is_begun=bool(written))

    def tidy() -> None:
        clear_unfinished(output)
        clear_server_files(output)

    def check() -> None:
        console.print(f"{output}: {extraction.size_line(output)}", soft_wrap=True)
        extraction.check_disk(output)

    with ExitStack() as holding:
        folder = held_by_main(accelerator, output, command=COMMAND, settings={}, holding=holding)
        on_main(accelerator, encode_first)
        target = load()
        reads, data = reads_of(run, target), data_of(target)
        fields = fields_of(target, reads, settings, origin_of(data, target.tokenizer))
        if is_finished(output, fields, engine="vllm" if is_served else None):
            on_main(accelerator, tidy)
            print(f"{output}: finished already")
            return
        start = None
        if is_served:
            serving = served_states(
                run.engine,
                target,
                reads,
                output,
                source=source,
                max_length=data.max_length,
                storage_dtype=storage_dtype,
                console=console,
            )
            reader = holding.enter_context(serving)
            start, fields = reader.start, fields | fields_of_served(reader.served)
        on_main(accelerator, encode)
        extraction = Extraction(Shards(output / TOKENS), target, reads, config=settings, fields=fields)
        on_main(accelerator, check)
        if folder is not None:
            folder.record(fields)
            folder.keep()  # before, it is removed: one that does not fit is not in the way of the next try
        with doing("the target reads tokens", extraction.num_tokens(rank, num_ranks)) as show:
            extraction.run(output, rank=rank, num_ranks=num_ranks, on_tokens=show, start=start)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            manifest = extraction.finish(output)
            size = f"{manifest.num_rows:,} rows, {decimal(manifest.bytes)}"
            console.print(f"{size}; train with data.features={output}", soft_wrap=True, markup=False, highlight=False)
            keys = "num_rows num_tokens num_supervised_tokens bytes bytes_per_token layers storage_dtype"
            entries = manifest.as_json()
            print(json.dumps({key: entries[key] for key in keys.split()}))
        accelerator.wait_for_everyone()


def main() -> None:
    """Runs `headstart data extract` under `accelerate launch`."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(context_settings={"allow_interspersed_args": True})(extract)
    try:
        with ending_in_time():
            app()
    except BadInput as error:
        print(f"headstart: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
