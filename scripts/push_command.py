"""`headstart push`: a trained head on the Hugging Face Hub, with a card that says what it was measured to save."""

import json
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from ..base.errors import BadInput
from ..base.files import write_json

if TYPE_CHECKING:
    from ..engines.layouts.serving import HeadFolder
    from ..eval.measurement.result import Result
    from ..eval.report.results.document import Report
    from ..heads.stored.record import HeadRecord

ALIKE = "It changes how fast that model answers, not what it answers."
ADAPTED = "It drafts for that model with target_adapter/ merged into it, which answers otherwise than the model alone."
REPO_ID = r"[\w.-]+/[\w.-]+"
WITHIN = re.compile(r"(?<![\w/<.~-])(?:~|\.{1,2})?(?:/[^\s/:,;'\"]+)+/([^\s/:,;'\"]+)/?")  # a path of two parts or more


def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a head's own, RUN/final.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="owner/name on the hub.")],
    to: Annotated[str, typer.Option(help="Layout, as in headstart export; default: the family's first.")] = "",
    report: Annotated[Path | None, typer.Option(help="report.json of headstart eval, for the card.")] = None,
    target: Annotated[str, typer.Option(help="The target's folder; default: where it was in training.")] = "",
    base_model: Annotated[str, typer.Option(help="The target's hub id, where it was a local folder.")] = "",
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show files and card; send nothing.")] = False,
    endpoint: Annotated[str, typer.Option(help="Another hub than huggingface.co.")] = "",
) -> None:
    """Export a head, check it, and put it on the hub with a model card.

    \b
    Examples:
      headstart push runs/mine me/llama-8b-head --base-model meta-llama/Llama-3.1-8B-Instruct --dry-run
      headstart push runs/mine me/llama-8b-head --report runs/mine/eval/report.json --private

    The card has the base model, the recipe without local paths, the data's fingerprint, acceptance length and speedup
    per suite, and the commands that serve it. Log in first with `hf auth login`; the token is neither shown nor stored.
    """
    from ..engines.export import engines_of, read_folder
    from ..engines.vllm import switching_word

    if not re.fullmatch(REPO_ID, repo):
        raise BadInput(f"{repo}: expected a repository as owner/name")
    head = read_folder(run, target=target or None)
    named = base_model or head.record.target_name
    if not re.fullmatch(REPO_ID, named) or Path(named).exists():
        raise BadInput(f"target {named}: no hub id; say with --base-model which model the head drafts for")
    word = switching_word(repo, head.family)
    if word is not None:
        raise BadInput(f"{repo}: `{word}` in its name makes vLLM take {head.family} for another method")
    chosen = to or next(iter(engines_of(head.family)), "")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "head")
        prepare_upload(head, run, folder, repo=repo, to=chosen, base_model=named, report=report)
        if dry_run:
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    print(f"{path.stat().st_size:>12,}  {path.relative_to(folder)}")
            print((folder / "README.md").read_text())
            return
        print(upload(folder, repo, private=private, endpoint=endpoint or None))


def prepare_upload(
    head: "HeadFolder", run: Path, folder: Path, *, repo: str, to: str, base_model: str, report: Path | None
) -> None:
    """Everything that goes to the hub, in a new folder. Raises BadInput if the export breaks its contract."""
    from ..engines.check import check_export
    from ..engines.export import export_head
    from ..eval.report.results.one_result import learnt_words

    record, measured = head.record, None
    if report is not None:
        measured = lossless_report(report, record)
        if words := learnt_words(measured.results):
            print(f"headstart: {report}: {words}: the figures say little of other prompts", file=sys.stderr)
    export_head(head.path, folder, to=to or "hf", target=head.target if head.target_config else None)
    problems = check_export(folder, to=to).problems
    if problems:
        raise BadInput(f"{run}: {problems[0]}; headstart export and check say more")
    names = {local: base_model for local in (record.target_name, head.target)}
    if measured is not None:
        write_json(folder / "report.json", published(measured.to_json(), names))
    for path in (folder / "config.json", *folder.glob("*/adapter_config.json"), *folder.glob("tokenizer_config.json")):
        config = json.loads(path.read_text())
        keys = ("name_or_path",) if path.name == "tokenizer_config.json" else config  # its template is no path
        write_json(path, config | published({key: config[key] for key in keys if key in config}, names))
    (folder / "README.md").write_text(card(head, repo, to=to, base_model=base_model, report=measured))


def published(value: Any, names: Mapping[str, str]) -> Any:
    """A config or report without what holds on this machine only: local paths, also within a text, become their last
    part, or the name that `names` has for them."""
    if isinstance(value, dict):
        return {key: published(part, names) for key, part in value.items() if key != "output_dir"}
    if isinstance(value, list):
        return [published(part, names) for part in value]
    if isinstance(value, str):
        is_path = len(value) < 256 and (value.startswith(("/", "~", "./", "../")) or Path(value).exists())
        return names.get(value, Path(value).name if is_path else WITHIN.sub(r"\1", value))
    return value


def recipe_of(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The resolved config of a run, with its data and code versions; empty if the folder holds only a head."""
    from ..configs.loader import read_config

    recipe = read_config(run / "config.yaml") if (run / "config.yaml").is_file() else {}
    record = run / "run.json"
    starts = json.loads(record.read_text()) if record.is_file() else []
    data = {key: starts[-1][key] for key in ("headstart", "packages", "data") if key in starts[-1]} if starts else {}
    return recipe, data


def upload(folder: Path, repo: str, *, private: bool, endpoint: str | None) -> str:
    """Create the repository and send the folder in one commit; returns its address. Raises BadInput on a refusal."""
    from huggingface_hub import HfApi, get_token

    api = HfApi(endpoint=endpoint)
    secrets = "|".join(filter(None, (re.escape(get_token() or ""), r"hf_\w+")))
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Head trained with Headstart")
    except Exception as error:  # the hub's own, and those of the network; a message may hold the token
        told = re.sub(secrets, "***", str(error)).strip() or type(error).__name__
        raise BadInput(f"{repo}: the hub refused: {told.splitlines()[0]}") from None
    return str(commit.commit_url)


# The card: what a head drafts for, how it was trained, what it was measured to save, how to serve it


def card(head: "HeadFolder", repo: str, *, to: str, base_model: str, report: "Report | None") -> str:
    """README.md with its YAML head. report: with the results of this head; None: not measured."""
    from ..engines.export import notes, serve_commands

    name, family = repo.split("/")[-1], head.family
    front: dict[str, Any] = {
        "base_model": base_model,
        "base_model_relation": "adapter",
        "library_name": "headstart",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-head", family],
    }
    if report:
        front["model-index"] = [{"name": name, "results": list(map(indexed, report.results))}]
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {name}",
        f"A draft head ({family}) for speculative decoding on [{base_model}](https://huggingface.co/{base_model}), "
        f"trained with Headstart. {ADAPTED if head.has_adapter else ALIKE}",
    ]
    if commands := serve_commands(head, repo, to=to, target=None if head.has_adapter else base_model):
        served = [f"{engine}:\n\n```\n{command}\n```" for engine, command in commands.items()]
        parts += ["## Serve it", *served, *(f"Note: {line}." for line in notes(head))]
    measured = table(report) if report else "Not measured yet: `headstart eval` does it on your prompts."
    parts += ["## Measured", measured]
    recipe, data = recipe_of(head.path.parent if (head.path.parent / "config.yaml").is_file() else head.path)
    recipe.pop("engine", None)  # where the target ran: addresses and flags of servers
    for title, value in (("## Data", data), ("## Recipe", recipe)):
        if value:
            parts += [title, f"```yaml\n{yaml.safe_dump(published(value, {}), sort_keys=False)}```"]
    return "\n\n".join(parts) + "\n"


def indexed(result: "Result") -> dict[str, Any]:
    """One result as the hub's model-index has it."""
    values = {"acceptance_length": result.acceptance_length, "speedup": result.speedup}
    metrics = [
        {"type": key, "name": f"{key} ({settings(result)})", "value": round(value, 4)}
        for key, value in values.items()
        if value is not None
    ]
    dataset = {"type": result.suite, "name": result.suite}
    return {"task": {"type": "text-generation"}, "dataset": dataset, "metrics": metrics}


def settings(result: "Result") -> str:
    return f"{result.tree}, K {result.num_draft_tokens}, batch {result.batch_size}, temperature {result.temperature:g}"


def table(report: "Report") -> str:
    from ..eval.report.recommendation import number, speedup_words
    from ..eval.report.results.one_result import learnt_words

    rows = ["| suite | settings | acceptance length | speedup [95 %] |", "|---|---|---|---|"]
    for result in report.results:
        cells = [result.suite, settings(result), number(result.acceptance_length), speedup_words(result)]
        rows.append(f"| {' | '.join(one.replace('|', chr(92) + '|') for one in cells)} |")
    environment = report.environment
    where = f"With Headstart {environment.headstart} on {environment.device}, torch {environment.torch}."
    words = "Acceptance length: tokens per target forward; speedup: over the same engine without drafts."
    return "\n".join(rows) + f"\n\n{where} {words} {learnt_words(report.results)}".rstrip()


def lossless_report(path: Path, head: "HeadRecord") -> "Report":
    """A report of `headstart eval` with the lossless results of one head alone, told by its weights' fingerprint.

    Raises: BadInput if it is no report, of another target, or has no such result.
    """
    from ..eval.report.results.document import read_report
    from ..eval.report.results.one_result import is_lossless

    report = read_report(path)
    if report.target.fingerprint != head.fingerprint:
        name, measured = report.target.name, report.target.fingerprint
        raise BadInput(f"--report {path}: measured on target {name} ({measured[:12]}), not the head's")
    own = head.head_fingerprint
    if own is None:
        raise BadInput(
            f"--report {path}: whose figures they are is not known: the head was saved without a fingerprint"
        )
    results = [
        replace(result, drafter=head.family)
        for result in report.results
        if result.trained
        and result.trained.raw.get("fingerprint") == own
        and is_lossless(result)
        # neither beside look-ups nor with a window, which the head that is sent does not have
        and result.drafter.partition(":")[0] == head.family
        and ":window" not in result.drafter
    ]
    if not results:
        raise BadInput(f"--report {path}: no lossless result of this {head.family} head ({own[:12]}) in it")
    return replace(report, results=results)
