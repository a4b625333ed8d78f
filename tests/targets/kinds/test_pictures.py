"""Rows with pictures: tokens, texts, states and losses are those of the target's own processor and code."""

import json
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.data_pipelines.masks.chat import encode_rows
from headstart.data_pipelines.rows.config import DataConfig
from headstart.data_pipelines.rows.sources import iter_rows
from headstart.data_pipelines.storage.extract import start_target
from headstart.data_pipelines.storage.features import Reads
from headstart.eval.decoding import generate
from headstart.eval.decoding.continuous import WaitingPrompt, answer_continuously
from headstart.eval.drafters.lookup import NgramDrafter
from headstart.eval.proof.own_forward import first_not_own
from headstart.eval.served.questions import Questions, as_sent
from headstart.eval.suites.prompts import DEFAULT_CHAT, load_suite
from headstart.heads.base import DraftBatch
from headstart.heads.drafting.drafter import Proposal
from headstart.targets.chat.messages import for_api, normalise
from headstart.targets.images.pictures import opened, pictures_of, with_pictures
from headstart.targets.images.reader import reader_of
from headstart.targets.target import Target
from perturbing import perturbed
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

pytest.importorskip("PIL")
pictured = pytest.importorskip("pictured")
NUM_ROWS, NUM_NEW = 20, 16
LAYERS = 0, 2  # the second behind one that image features are added to again (Qwen3-VL)
WITH_TORCHVISION = "qwen2_5_vl", "qwen3_vl", "qwen3_5_full", "qwen3_5_moe_full", "gemma4_full"
KINDS = ["llava", *(pytest.param(name, marks=pytest.mark.slow) for name in WITH_TORCHVISION)]


class World:
    """A target with rows, and what transformers makes of them."""

    def __init__(self, name: str, folder: Path):
        if name != "llava":
            pytest.importorskip("torchvision")  # transformers' processors of these kinds need it
        self.path, self.rows = pictured.image_target(name, folder / "target"), folder / "rows.jsonl"
        self.data = pictured.image_rows(folder, NUM_ROWS)
        self.rows.write_text("".join(json.dumps(row) + "\n" for row in self.data))
        self.target = Target.load(self.path, dtype="float32", device="cpu")
        self.prompts = load_suite(self.rows, self.target, max_new_tokens=NUM_NEW).prompts
        processor = AutoProcessor.from_pretrained(self.path)
        model = AutoModelForImageTextToText.from_pretrained(self.path).eval()
        self.inputs, self.texts = list[Any](), list[list[int]]()
        for row, prompt in zip(self.data, self.prompts, strict=True):
            text = processor.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=False)
            pictures = [opened(source) for source in pictures_of(prompt)]
            self.inputs.append(processor(images=pictures, text=[text], return_tensors="pt"))
            how: dict[str, Any] = {"max_new_tokens": NUM_NEW, "do_sample": False, "eos_token_id": None}
            new = model.generate(**self.inputs[-1], **how, min_new_tokens=NUM_NEW, pad_token_id=0)
            self.texts.append(new[0, len(prompt) :].tolist())
        layers, entering = model.model.language_model.layers, dict[int, torch.Tensor]()
        for layer in LAYERS:
            layers[layer].register_forward_pre_hook(lambda _, args, layer=layer: entering.update({layer: args[0]}))
        self.states = list[dict[int, torch.Tensor]]()  # those that enter layers, and under -1 those behind the norm
        for one in self.inputs:
            with torch.no_grad():
                last = model(**one, output_hidden_states=True, use_cache=False).hidden_states[-1]
            self.states.append({**entering, -1: last})


@pytest.fixture(scope="module", params=KINDS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(request.param, tmp_path_factory.mktemp(request.param))


def test_prompts_are_what_the_processor_makes(world):
    assert [one["input_ids"][0].tolist() for one in world.inputs] == world.prompts
    assert len({len(pictures_of(prompt)) for prompt in world.prompts}) == 2
    assert all(sum(5 < id < 500 for id in prompt) > 2 for prompt in world.prompts), "the words of the rows too"


def test_greedy_texts_are_transformers_own(world):
    """Alone and in a batch with a text, with drafts and without, of 20 rows all."""
    how: dict[str, Any] = {"max_new_tokens": NUM_NEW, "eos_token_ids": []}
    plain = [generate(world.target, None, prompt, **how).token_ids[0] for prompt in world.prompts]
    drafted = [generate(world.target, NgramDrafter(), prompt, **how).token_ids[0] for prompt in world.prompts]
    text = [5, 9, 17, 40, 9, 17]
    batch = generate(world.target, NgramDrafter(), [*world.prompts[:5], text], **how).token_ids
    assert plain == drafted == world.texts and sum(len(set(text)) for text in plain) > 5 * NUM_ROWS
    assert batch == [*world.texts[:5], *generate(world.target, None, text, **how).token_ids]


def test_batches_that_are_refilled_have_the_same_texts(world):
    waiting = deque(WaitingPrompt(str(i), prompt) for i, prompt in enumerate(world.prompts[:8]))
    found = dict(answer_continuously(world.target, waiting, batch_size=3, max_new_tokens=NUM_NEW))
    ends = world.target.eos_token_ids
    for i, text in enumerate(world.texts[:8]):
        cut = next((at + 1 for at, token in enumerate(text) if token in ends), NUM_NEW)
        assert found[str(i)] == text[:cut]


def test_the_proof_of_a_text_sees_the_pictures(world):
    prompt, text, other = world.prompts[1], world.texts[1], world.prompts[2]
    assert first_not_own(world.target, prompt, text) is None
    assert first_not_own(world.target, with_pictures([*prompt], pictures_of(other)), text) is not None


def test_states_of_training_are_the_model_s_own(world):
    """Those at image tokens too, of rows as training reads them, online and extracted."""
    answered = [
        {**row, "messages": [*row["messages"], {"role": "assistant", "content": "w7 w8 w9 end"}]} for row in world.data
    ]
    world.rows.with_name("answered.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answered))
    rows = iter_rows(str(world.rows.with_name("answered.jsonl")))
    config = DataConfig(train="", max_length=256)
    samples = list(encode_rows(rows, world.target.tokenizer, config, counts=Counter()))
    for sample, prompt in zip(samples, world.prompts, strict=True):
        start = len(prompt)
        assert sample.input_ids[:start].tolist() == prompt and sample.pictures == pictures_of(prompt)
        assert not sample.loss_mask[:start].any() and sample.loss_mask[start : start + 3].all()
    reads = Reads(LAYERS, "context", "context")
    stored = start_target(samples[:6], target=world.target, reads=reads, storage_dtype="float32")()
    for one, prompt, states in zip(stored, world.prompts, world.states, strict=False):
        assert one.states is not None
        for index, layer in enumerate(reads.layers):
            torch.testing.assert_close(
                one.states.features[: len(prompt), index], states[layer][0], rtol=1e-4, atol=1e-4
            )
        torch.testing.assert_close(one.states.post_norm[: len(prompt)], states[-1][0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_head_drafts_behind_pictures_what_training_scores(world, monkeypatch):
    """Logits of all depths in each round, of a head that counts positions as the target does."""
    head, drafted = perturbed("eagle3", world.target).eval(), list[Proposal]()
    propose = head.propose
    monkeypatch.setattr(head, "propose", lambda *args, **how: drafted.append(propose(*args, **how)) or drafted[-1])
    for prompt in world.prompts[:4]:
        drafted.clear()
        text = generate(world.target, head, prompt, max_new_tokens=6, eos_token_ids=[])
        assert len(drafted) == len(text.rounds) - 1 > 1
        end = len(prompt)
        for before, draft in zip(text.rounds, drafted, strict=False):
            end += before.num_committed[0]
            row = [*prompt, *text.token_ids[0][: end - len(prompt)], *draft.tokens[0].tolist(), 3, 4]
            ids, mask = torch.tensor([row]), torch.arange(len(row))[None] >= end - 1
            batch = DraftBatch(ids, mask, head.read_target(ids, [pictures_of(prompt)]))
            starts, scored = head.teacher_forced_logits(batch, num_depths=len(draft.logits))
            assert starts.positions[0, 0] == end - 2
            torch.testing.assert_close(torch.cat(draft.logits), scored[0, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("world", ["llava"], indirect=True)
def test_rows_whose_picture_is_missing_or_broken_are_dropped_and_counted(world, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"nothing")
    (tmp_path / "whole.png").write_bytes(pictured.picture(1))
    sources = ["whole.png", "whole.png", "whole.png", "broken.png", "none.png", "http://127.0.0.1/a.png"]
    rows = [
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": source}, {"type": "text", "text": "w9"}]},
                {"role": "assistant", "content": "w7 w8 end"},
            ]
        }
        for source in sources
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts, problems = Counter[str](), list[str]()
    read = encode_rows(
        iter_rows(str(tmp_path / "rows.jsonl")),
        world.target.tokenizer,
        DataConfig(train=""),
        counts=counts,
        problems=problems,
    )
    assert len(list(read)) == 3
    assert counts["dropped"] == counts["a picture is missing or broken"] == 3
    assert problems[0].startswith(f"{tmp_path}/rows.jsonl:4: picture {tmp_path}/broken.png"[:60])
    suite = load_suite(tmp_path / "rows.jsonl", world.target, max_new_tokens=4)
    assert [one.row for one in suite.failed] == ["rows.jsonl:4", "rows.jsonl:5", "rows.jsonl:6"]
    asked = Questions.read([str(tmp_path / "rows.jsonl")], None, limit=None, chat=DEFAULT_CHAT)  # of a server
    assert [one.row for one in asked.asked] == [f"rows.jsonl:{line}" for line in (1, 2, 3, 4, 6)], "which may fetch one"
    assert [problem.split(": ")[0] for problem in asked.unreadable] == [f"{tmp_path}/rows.jsonl:5"]


@pytest.mark.parametrize("world", ["llava"], indirect=True)
def test_a_row_that_is_cut_inside_a_picture_gives_no_sample(world):
    sources = pictures_of(world.prompts[0])
    reader, ids = reader_of(world.target.tokenizer), world.prompts[0]
    assert reader is not None and len(sources) == 2
    found = [reader.within(ids[:end], sources) for end in range(len(ids) + 1)]
    assert {None, (), sources[:1], sources} == set(found)
    assert all(found[end] is None for end in range(2, 5)) and found[1] == ()


def test_a_server_is_sent_pictures_as_data_urls(tmp_path):
    (tmp_path / "a.png").write_bytes(pictured.picture(2))
    asked = [{"role": "user", "content": [{"type": "text", "text": "w3"}, {"type": "image", "image": "a.png"}]}]
    [sent] = map(for_api, normalise(asked, f"{tmp_path}/rows.jsonl:3"))
    assert sent["content"][1]["image_url"]["url"].startswith("data:image/png;base64,iVBORw0KGgo")
    for shape in ("messages", "conversations", "prompt"):
        row = as_sent({shape: asked}, f"{tmp_path}/rows.jsonl:3")
        assert row["messages"][0]["content"] == sent["content"]
    for address in (f"file://{tmp_path}/a.png", "file:///none.png", "s3://bucket/a.png", "https://host/a.png"):
        part, is_here = {"type": "image_url", "image_url": {"url": address}}, address.endswith(f"{tmp_path}/a.png")
        for given, beside in (
            (part, {}),
            ({"type": "image", "image": address}, {}),
            ({"type": "image"}, {"images": [address]}),
            ({"type": "image"}, {"image": address}),
        ):
            row = as_sent({"messages": [{"role": "user", "content": [given]}], **beside}, f"{tmp_path}/rows.jsonl:3")
            assert row["messages"][0]["content"] == [sent["content"][1] if is_here else part], "the server may know it"
    with pytest.raises(BadInput, match="in no known form"):
        normalise([{"role": "user", "content": [{"type": "image"}]}], "rows.jsonl:1")


def test_a_target_of_text_alone_refuses_pictures_in_a_line(tmp_path):
    from kind import VOCAB_SIZE
    from words import word_tokenizer

    tokenizer = word_tokenizer(VOCAB_SIZE, bos_token="w1")
    tokenizer.chat_template = pictured.TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps(pictured.image_rows(tmp_path, 2)[1]) + "\n")
    rows = iter_rows(str(tmp_path / "rows.jsonl"))
    with pytest.raises(BadInput, match=r"rows.jsonl:1: .*(reads no pictures|an answer)"):
        list(encode_rows(rows, AutoTokenizer.from_pretrained(tmp_path), DataConfig(train=""), counts=Counter()))
