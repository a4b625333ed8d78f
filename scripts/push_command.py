"""`headstart push`: a trained head on the Hugging Face Hub, with a card that says what it was measured to save."""

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..configs.errors import BadInput, first_line

if TYPE_CHECKING:
    from ..heads.export.folder import HeadFolder

REPO_ID = r"[\w.-]+/[\w.-]+"


def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a head's own, RUN/final.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="owner/name on the hub.")],
    to: Annotated[str, typer.Option(help="Layout, as in headstart export; default: the family's first.")] = "",
    report: Annotated[Path | None, typer.Option(help="report.json of headstart eval, for the card.")] = None,
    target: Annotated[str, typer.Option(help="The target's folder; default: where it was in training.")] = "",
    base_model: Annotated[str, typer.Option(help="The target's hub id, where it was a local folder.")] = "",
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of a commit.")] = False,
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
    from ..heads.export.folder import read_folder, switching_word
    from ..heads.export.write import WRITERS

    if not re.fullmatch(REPO_ID, repo):
        raise BadInput(f"{repo}: expected a repository as owner/name")
    head = read_folder(run, target=target or None)
    named = base_model or head.record.target_name
    if not re.fullmatch(REPO_ID, named) or Path(named).exists():
        raise BadInput(f"target {named}: no hub id; say with --base-model which model the head drafts for")
    word = switching_word(repo, head.family)
    if word is not None:
        raise BadInput(f"{repo}: `{word}` in its name makes vLLM take {head.family} for another method")
    chosen = to or next(iter(WRITERS.get(head.family, {"": None})))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "head")
        prepare(head, run, folder, repo=repo, to=chosen, base_model=named, report=report)
        if dry_run:
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    print(f"{path.stat().st_size:>12,}  {path.relative_to(folder)}")
            print((folder / "README.md").read_text())
            return
        print(upload(folder, repo, private=private, create_pr=create_pr, endpoint=endpoint or None))


def prepare(
    head: "HeadFolder", run: Path, folder: Path, *, repo: str, to: str, base_model: str, report: Path | None
) -> None:
    """Everything that goes to the hub, in a new folder. Raises BadInput where the export breaks its contract."""
    from ..heads.export.check import check_folder
    from ..heads.export.write import export_head, notes, serve_commands
    from .model_card import card, read_report, without_paths

    results, environment = [], {}
    if report is not None:
        fingerprint = head.record.fingerprint or ""
        results, environment = read_report(report, family=head.family, fingerprint=fingerprint)
    export_head(head.path, folder, to=to or "hf", target=head.target if head.target_config else None)
    problems = check_folder(folder).problems
    if problems:
        raise BadInput(f"{run}: {problems[0]}; headstart export and check say more")
    publish_names(folder / "config.json", {head.record.target_name, head.target}, base_model)
    source = head.path.parent if (head.path.parent / "config.yaml").is_file() else head.path
    recipe, data = recipe_of(source)
    text = card(
        repo=repo,
        family=head.family,
        base_model=base_model,
        commands=serve_commands(head, repo, to=to, target=base_model),
        recipe=without_paths(recipe),
        data=without_paths(data),
        results=results,
        environment=environment,
        notes=[f"Note: {line}." for line in notes(head)],
    )
    (folder / "README.md").write_text(text)
    if report is not None:
        shutil.copyfile(report, folder / "report.json")
        publish_names(folder / "report.json", {head.record.target_name, head.target}, base_model)
        for plot in sorted([*report.parent.glob("*.svg"), *report.parent.glob("*.png")]):
            shutil.copyfile(plot, folder / plot.name)


def publish_names(path: Path, local: set[str], base_model: str) -> None:
    """Rewrite a JSON file: for the target's local folder its hub id stands; of other paths, their last part."""
    from .model_card import without_paths

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: renamed(part) for key, part in value.items()}
        if isinstance(value, list):
            return [renamed(part) for part in value]
        if isinstance(value, str):
            return base_model if value in local else without_paths(value)
        return value

    path.write_text(json.dumps(renamed(json.loads(path.read_text())), indent=2) + "\n")


def recipe_of(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The resolved config of a run, and of which data and code it was; empty where the folder is a head's alone."""
    from ..configs.loader import read_config

    recipe = read_config(run / "config.yaml") if (run / "config.yaml").is_file() else {}
    record = run / "run.json"
    starts = json.loads(record.read_text()) if record.is_file() else []
    data = {key: starts[-1][key] for key in ("headstart", "packages", "data") if key in starts[-1]} if starts else {}
    return recipe, data


def upload(folder: Path, repo: str, *, private: bool, create_pr: bool, endpoint: str | None) -> str:
    """Create the repository and send the folder in one commit; returns its address. Raises BadInput on a refusal."""
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(endpoint=endpoint)
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = [CommitOperationAdd(str(path.relative_to(folder)), path) for path in paths]
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        done: Any = api.create_commit(
            repo, operations=files, commit_message="Head trained with Headstart", create_pr=create_pr
        )
    except Exception as error:  # the hub's own, and those of the network
        raise BadInput(f"{repo}: the hub refused: {redacted(first_line(error))}") from error
    return str(done.pr_url or done.commit_url)


def redacted(text: str) -> str:
    """Without the token, should another library's message hold it."""
    from huggingface_hub import get_token

    token = get_token()
    text = text.replace(token, "***") if token else text
    return re.sub(r"hf_\w+", "***", text)
