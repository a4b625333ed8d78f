"""`headstart export`: a trained head as a serving engine loads it. `headstart check`: a folder against the contract."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import BadInput
from .evaluating.engine_options import DraftWindowText


def export(
    source: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder, a head's own, RUN/final, or a file of answers.")
    ],
    output: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    to: Annotated[str, typer.Option(help="vllm, sglang, speculators, hf or llama.cpp.")],
    target: Annotated[str, typer.Option(help="The target's folder or hub id; default: where it was in training.")] = "",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or fp8 (vllm); default: the target's.")] = "",
    llama_cpp: Annotated[
        Path | None, typer.Option(envvar="LLAMA_CPP", help="A checkout of llama.cpp, whose converter makes the files.")
    ] = None,
    draft_window: DraftWindowText = "",
    outtype: Annotated[str, typer.Option(help="Of head.gguf: f32, f16, bf16 or q8_0; default: as --dtype.")] = "",
    target_outtype: Annotated[str, typer.Option(help="Make target.gguf too, of this type.")] = "",
) -> None:
    """Write a trained head as a serving engine loads it, and check it against that engine's contract.

    \b
    Examples:
      headstart export runs/mine served/mine --to vllm
      headstart export runs/mine served/mine --to speculators     then: vllm serve served/mine
      headstart export runs/mine served/mine --to llama.cpp --llama-cpp ~/llama.cpp --target-outtype bf16
      headstart export answers.jsonl served/lookup --to llama.cpp --target MODEL

    \b
    eagle, eagle3   vllm, sglang (one folder for both); eagle3 also speculators, which names its target, and llama.cpp
    medusa          vllm (0.32 at most)
    block           vllm, sglang, speculators, llama.cpp: DFlash, DFlash2, DSpark; vllm, sglang: LiLiCorr
    assistant       vllm, sglang (one folder for both), llama.cpp: of Gemma 4
    mtp             vllm, sglang, hf: a copy of the target with the modules in it; llama.cpp, of some targets
    draft_lm        vllm, sglang, hf, llama.cpp: a plain model with the target's tokenizer
    answers.jsonl   llama.cpp, sglang: what it looks up, with no head at all

    The folder is written whole or not at all. The command that serves it is printed. For llama.cpp it has head.gguf,
    and target.gguf where --target-outtype asks for it; without --llama-cpp the conversion is told and left to you.
    """
    from ..engines.check import check_export
    from ..engines.export import export_head, notes, serve_commands
    from ..engines.llamacpp import Conversion, serve_lines

    if source.name.endswith((".jsonl", ".jsonl.gz")):
        if dtype or outtype or target_outtype or draft_window:
            raise BadInput(f"{source}: answers have no --dtype, --outtype, --target-outtype or --draft-window")
        return export_answers(source, output, to=to, target=target)
    is_llamacpp = to == "llama.cpp"
    if not is_llamacpp and (outtype or target_outtype):
        raise BadInput(f"--to {to}: --outtype and --target-outtype go with --to llama.cpp")
    conversion = Conversion(llama_cpp if is_llamacpp else None, outtype or None, target_outtype or None)
    named = {"target": target or None, "dtype": dtype or None}
    head = export_head(source, output, to=to, **named, conversion=conversion, window=draft_window)
    for line in notes(head):
        print(f"headstart: {line}", file=sys.stderr)
    checked = check_export(output, to=to)
    for problem in checked.problems:
        print(f"headstart: {output}: {problem}", file=sys.stderr)
    print(f"written to {output}: {head.family} for {to} ({checked.layout})")
    if is_llamacpp:
        commands = serve_lines(head, str(output), conversion)
    else:
        commands = serve_commands(head, str(output), to=to).values()
    for command in commands:
        print(command)
    if checked.problems:
        raise typer.Exit(1)


def export_answers(source: Path, output: Path, *, to: str, target: str) -> None:
    """Answers as llama-server or SGLang looks them up. Raises BadInput for engines that read no such file."""
    from ..base.files import new_folder, write_text
    from ..engines.servers.llama_server import DYNAMIC, cache_flags
    from ..engines.sglang import CORPUS, corpus_command
    from ..eval.drafters.answers import load_answers
    from ..eval.drafters.llamacpp_cache import write_cache
    from ..targets.loading import TargetConfig, load_tokenizer

    if to not in ("llama.cpp", "sglang"):
        hint = "; vLLM's suffix decoding learns from the answers that it gives" if to == "vllm" else ""
        raise BadInput(f"--to {to}: reads no file of answers, only llama.cpp and sglang do{hint}")
    if not target:
        raise BadInput("--target: name the target, whose tokenizer the answers are read with")
    tokenizer = load_tokenizer(TargetConfig(path=target))
    answers = load_answers(source, tokenizer)
    if to == "sglang":
        with new_folder(output) as part:  # a text a line, as JSON
            texts = (tokenizer.decode(ids, skip_special_tokens=True) for _, ids in answers.rows)
            lines = (json.dumps(text, ensure_ascii=False) + "\n" for text in texts if text)
            write_text(part / CORPUS, "".join(lines))
        print(f"written to {output}: {len(answers.rows)} answers")
        print(corpus_command(str(output / CORPUS), target=target))
        return
    with new_folder(output) as part:
        num_ngrams = write_cache(answers, part)
    print(f"written to {output}: {num_ngrams} n-grams of {len(answers.rows)} answers")
    print(f"llama-server -m TARGET.gguf {shlex.join(cache_flags(output / DYNAMIC))}")


def check(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="An exported head, or a GGUF file.")],
    to: Annotated[str, typer.Option(help="sglang or llama.cpp: also what only that one cannot read.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout instead of lines.")] = False,
) -> None:
    """Find what is wrong with an exported head before an engine serves it without a word.

    \b
    Examples:
      headstart check served/mine
      headstart check served/mine --json
      headstart check served/mine/head.gguf

    Engines load heads with missing tensors and wrong layer numbers: the text stays right and drafts are no longer
    accepted. Looked at: files, names, shapes and dtypes of tensors, NaN, the draft vocabulary's maps, config keys that
    engines read or misread, and words in the path that switch vLLM's method.

    Exit code 0: fine; 1: problems, listed; 2: no head's folder.
    """
    from ..engines.check import check_export
    from ..engines.export import check_to

    if to:
        check_to(to)
    checked = check_export(folder, to=to)
    if as_json:
        problems = checked.problems
        report = {"folder": str(folder), "layout": checked.layout, "ok": not problems, "problems": problems}
        print(json.dumps(report, indent=2))
    else:
        for problem in checked.problems:
            print(problem)
        state = f"{len(checked.problems)} problems" if checked.problems else "fine"
        print(f"{folder}: {checked.layout or 'unknown layout'}: {state}")
    if checked.problems:
        raise typer.Exit(1)
