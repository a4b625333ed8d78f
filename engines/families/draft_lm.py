"""Draft models: a plain folder with the target's tokenizer, which any engine loads."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ...targets.loading import TargetConfig
from ...targets.skeleton import load_skeleton
from ...targets.weights.tensor_files import TensorFiles, views_on_disk
from ..layouts.contracts import Contract, trained_config
from ..layouts.foreign import ForeignFolder, Imported
from ..layouts.gguf_file import GgufFile
from ..layouts.serving import HeadFolder, Serving, not_in_llamacpp
from ..layouts.writing import target_folder, write_config, write_ends, write_tensors
from .mtp import COUNT_KEYS

TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.tiktoken")
CHAT_FILES = ("chat_template*", "generation_config.json")


class DraftLMServing(Serving):
    layouts = ("hf",)
    is_whole_model = True

    def recognises(self, config: dict[str, Any], stored: TensorFiles) -> bool:
        return "forcausallm" in str(config.get("architectures")).lower()

    def contract(self, folder: Path, config: dict[str, Any], stored: TensorFiles, *, to: str) -> Contract:
        """All tensors of transformers' model for the config, and a tokenizer."""
        contract = Contract("draft model")
        if "auto_map" in config:
            contract.problems.append("auto_map: asks engines to run code of the folder")
            return contract
        has_tokenizer = any(folder.glob("tokenizer*"))
        contract.report(not has_tokenizer, "tokenizer.json: missing; engines compare it with the target's")
        try:
            model = load_skeleton(TargetConfig(path=str(folder))).model
        except BadInput as error:
            contract.problems.append(f"config.json: transformers makes no model of it: {error}")
            return contract
        made = model.config.get_text_config()
        token, size, key = config.get("pard_token"), made.vocab_size, "pard_token"
        is_parallel = trained_config(config).get("parallel")
        contract.report(is_parallel and token is None, f"{key}: missing; vLLM drafts behind that token")
        outside = token is not None and (type(token) is not int or not 0 <= token < size)
        contract.report(outside, f"{key}: {token!r}, expected 0 to {size - 1}")
        architectures, own = config.get("architectures"), [type(model).__name__]
        contract.report(architectures != own, f"architectures: found {architectures}, expected {own}")
        is_tied, state = getattr(made, "tie_word_embeddings", False), model.state_dict()
        tied = set(getattr(model, "all_tied_weights_keys", {})) if is_tied else set()
        contract.optional = {name: tuple(state.pop(name).shape) for name in tied if name in state}
        contract.shapes = {name: tuple(value.shape) for name, value in views_on_disk(state, stored.files).items()}
        return contract

    def method_of(self, file: GgufFile) -> str | None:
        return "draft_lm"

    def refusals(self, head: HeadFolder, *, to: str) -> list[str]:
        is_refused = to == "sglang" and head.is_parallel
        return ["parallel: SGLang drafts token by token: export to vllm"] if is_refused else []

    def write(self, head: HeadFolder, folder: Path, *, to: str) -> None:
        """A draft model with the target's tokenizer, as a plain folder. Raises BadInput if the target is not local."""
        source = target_folder(head)
        no_modules = {key: 0 for key in COUNT_KEYS if head.config.get(key)}  # it has none of the target's MTP
        write_config(folder, {**head.config, **no_modules, **head.provenance})
        write_tensors(folder, head.tensors)
        for pattern in (*TOKENIZER_FILES, "*.model", *CHAT_FILES):
            for path in sorted(source.glob(pattern)):
                if path.is_file():
                    shutil.copyfile(path, folder / path.name)
        write_ends(folder)

    def read(self, folder: ForeignFolder) -> Imported:
        if folder.own is not None:
            return Imported({}, folder.tensors())
        token = folder.config.read("pard_token", int)
        parallel: dict[str, Any] = {} if token is None else {"parallel": True, "mask_token_id": token, "num_depths": 8}
        keys = {"path": str(folder.path), **parallel}
        return Imported(keys, folder.fresh(keys))

    def not_in_llamacpp(self, config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
        return not_in_llamacpp(config, None)
