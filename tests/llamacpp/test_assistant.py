"""An assistant of Gemma 4 in llama.cpp's own server: one that knows its target's texts is accepted in full."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from headstart.engines.check import check_export
from headstart.engines.export import export_head
from headstart.engines.heads import save_head
from headstart.engines.llamacpp import Conversion
from headstart.eval.decoding import generate
from headstart.eval.served.served_result import ServedResult
from headstart.eval.suites.prompts import Suite
from headstart.targets.target import Target
from knowing import LENGTH, NUM_DRAFT, PROMPTS, answers_of, knowing_head, save_target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_all_drafts_of_an_assistant_that_knows_the_texts_are_accepted(
    llamacpp: tuple[str, Path], served: Callable[..., ServedResult], tmp_path: Path, figures: list[dict[str, Any]]
) -> None:
    server, checkout = llamacpp
    save_target(tmp_path / "target")
    target = Target.load(tmp_path / "target", dtype="float32")
    answers = answers_of(target)
    head = knowing_head(target, answers)
    save_head(head, tmp_path / "run" / "final")
    out = tmp_path / "out"
    export_head(tmp_path / "run", out, to="llama.cpp", dtype="float32", conversion=Conversion(checkout, "f32", "f32"))
    assert check_export(out).problems == []

    how = {"length": LENGTH, "num_draft": NUM_DRAFT}
    suite = Suite("known", PROMPTS)
    theirs = served(server, out / "target.gguf", out / "head.gguf", suite, tmp_path / "measured", **how)
    ours = generate(target, head, PROMPTS, max_new_tokens=LENGTH, eos_token_ids=[], num_draft_tokens=NUM_DRAFT)
    assert all(done.num_accepted == [NUM_DRAFT] * len(PROMPTS) for done in ours.rounds[1:])
    assert theirs.texts and theirs.acceptance and not theirs.failed
    texts = theirs.texts.report
    assert texts.identical == texts.checked == len(PROMPTS)
    found = {"acceptance_length": NUM_DRAFT + 1.0}
    found |= {"llama_server_acceptance_length": theirs.acceptance.acceptance_length}
    assert set(found.values()) == {NUM_DRAFT + 1}
    told = {"identical_texts": f"{texts.identical}/{texts.checked}"}
    figures.append({"head": "assistant", "K": NUM_DRAFT, **found, **told})
