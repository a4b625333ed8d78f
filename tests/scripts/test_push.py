"""`headstart push` against a stand-in of the hub's API: the head arrives, its card, and nothing of the machine."""

import base64
import getpass
import json
import platform
import re
from dataclasses import replace
from urllib.parse import urlparse

import pytest
import torch
import yaml
from headstart.base.errors import BadInput
from headstart.engines.check import check_folder
from headstart.engines.heads import build_head, head_record, load_head, save_head
from headstart.engines.importers import import_head
from headstart.eval.figures.environment import Environment, TargetInfo
from headstart.eval.figures.recorded_training import RecordedTraining
from headstart.eval.proof.lossless import LosslessReport
from headstart.eval.report.results.document import Report
from headstart.heads.eagle3 import Eagle3Config
from headstart.heads.medusa import MedusaConfig
from headstart.scripts.push_command import published, push
from headstart.targets.target import Target
from http_stand_in import HttpStandIn, JsonHandler
from results import made_result

TOKEN = "hf_" + "notARealTokenOfAnyone"  # in two parts, so that no scanner takes it for one
OID = "a" * 40


class Hub(HttpStandIn):
    """files: by repository, what was committed. calls: method and path. refuses: the status of every answer, if set."""

    def __init__(self):
        super().__init__(Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.created: list[dict] = []
        self.calls: list[str] = []
        self.tokens: set[str | None] = set()
        self.refuses = 0


class Handler(JsonHandler):
    server: Hub

    def answer(self, value, status=200, headers=None):
        self.reply(value, status, {"X-Repo-Commit": OID, **(headers or {})})

    def do_POST(self):
        hub, path = self.server, urlparse(self.path).path
        body = self.body()
        hub.calls.append(f"POST {self.path}")
        hub.tokens.add(self.headers.get("Authorization"))
        if hub.refuses:
            self.answer(
                {"error": f"no access with {TOKEN}"}, hub.refuses, {"X-Error-Message": f"no access with {TOKEN}"}
            )
        elif path == "/api/repos/create":
            hub.created.append(json.loads(body))
            self.answer({"url": f"{hub.url}/me/mine"})
        elif path.startswith("/api/validate-yaml"):
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = [{**file, "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]]
            self.answer({"files": files})
        elif "/commit/" in path:
            repo = "/".join(path.split("/")[3:5])
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    content = base64.b64decode(entry["value"]["content"])
                    hub.files.setdefault(repo, {})[entry["value"]["path"]] = content
            self.answer({"success": True, "commitOid": OID, "commitUrl": f"{hub.url}/{repo}/commit/{OID}"})
        else:
            self.answer({"error": "unknown"}, 404)


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with Hub().running() as server:
        yield server


@pytest.fixture
def run(saved_target, tmp_path):
    """A run folder with its records, and report.json of a measurement on its target."""
    target = Target.load(saved_target)
    ids = torch.arange(3, 51, 2)
    for name, seed in (("run", 2), ("other", 3)):
        head = build_head(Eagle3Config(draft_vocab_size=24), target, draft_token_ids=ids, seed=seed)
        save_head(head, tmp_path / name / "final", training={"max_length": 64})
    own, other = (
        RecordedTraining.from_json(head_record(tmp_path / name / "final").training or {}) for name in ("run", "other")
    )
    recipe = {
        "target": {"path": str(saved_target)},
        "head": {"type": "eagle3", "num_depths": 7},
        "data": {"train": "/home/somebody/private/chats.jsonl"},
        "train": {"learning_rate": 1e-3, "output_dir": "/home/somebody/run"},
    }
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(recipe))
    start = {"headstart": "0.1.0", "git": None, "data": {"train": {"fingerprint": "0123abcd", "num_rows": 12}}}
    (tmp_path / "run" / "run.json").write_text(json.dumps([start]))
    setting = {"suite": "stories", "num_drafted": 7, "num_draft_tokens": 7, "num_prompts": 8, "trained": own}
    figures = {"acceptance_length": 2.34567, "speedup": 1.5, "speedup_ci95": (1.4, 1.6)}
    entry = made_result(drafter=f"eagle3:{tmp_path}/run/final", **setting, **figures)
    environment = Environment(headstart="0.1.0", device="a CPU", torch="2.13", copy_gigabytes_per_second=9.5)
    measured = TargetInfo(name=str(saved_target), fingerprint=target.fingerprint)
    others = replace(entry, drafter="eagle3", trained=other, acceptance_length=77.7, suite="foreign")
    results = [others, entry, replace(entry, drafter="ngram", trained=None)]
    # the same head beside look-ups and with a window, which nobody gets with it; and what is not the target's own
    foreign = {"suite": "foreign", "acceptance_length": 88.8}
    results += [replace(entry, drafter=name, **foreign) for name in ("hybrid+eagle3", "eagle3:window 64")]
    results += [replace(entry, lossless=LosslessReport(8, 7, 0, 1), **foreign)]
    report = Report(environment, measured, results).to_json()
    (tmp_path / "report.json").write_text(json.dumps(report))
    for name in ("report.svg", "holiday.png", "rounds.jsonl"):
        (tmp_path / name).write_text("<svg/>")
    return tmp_path / "run"


def front_matter(text):
    return yaml.safe_load(text.split("---")[1])


def test_what_is_pushed_is_loaded_as_the_same_head(hub, run, tmp_path, saved_target, capsys):
    push(run, "me/mine", base_model="org/base", report=tmp_path / "report.json", private=True, endpoint=hub.url)
    said = capsys.readouterr()
    assert said.out == f"{hub.url}/me/mine/commit/{OID}\n"
    assert hub.created[0]["name"] == "mine" and "private" in (hub.created[0].get("visibility"), *hub.created[0])
    files = hub.files["me/mine"]
    assert set(files) == {"README.md", "config.json", "model.safetensors", "report.json"}
    target = Target.load(saved_target)
    for name, content in files.items():
        (tmp_path / "pushed").mkdir(exist_ok=True)
        (tmp_path / "pushed" / name).write_bytes(content)
    head, ours = import_head(str(tmp_path / "pushed"), target), load_head(run / "final", target)
    assert head.config == ours.config and check_folder(tmp_path / "pushed").problems == []
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in head.state_dict().items())


def test_the_card_says_what_counts_of_this_head_told_by_its_fingerprint(hub, run, tmp_path):
    push(run, "me/mine", base_model="org/base", report=tmp_path / "report.json", endpoint=hub.url)
    card = hub.files["me/mine"]["README.md"].decode()
    front = front_matter(card)
    assert front["base_model"] == "org/base" and "eagle3" in front["tags"]
    [model] = front["model-index"]
    [result] = model["results"]
    assert result["dataset"]["name"] == "stories"
    assert {metric["type"]: metric["value"] for metric in result["metrics"]} == {
        "acceptance_length": 2.3457,
        "speedup": 1.5,
    }
    assert "learning_rate: 0.001" in card and "fingerprint: 0123abcd" in card and "train: chats.jsonl" in card
    assert "vllm serve org/base" in card and '"model":"me/mine"' in card
    assert "--speculative-draft-model-path me/mine" in card and "| stories | chain, K 7" in card
    # another head of the family on the same target is in the report too: its figures go nowhere
    sent = hub.files["me/mine"]["report.json"]
    report = json.loads(sent)
    assert [(one["drafter"], one["suite"]) for one in report["results"]] == [("eagle3", "stories")]
    assert report["target"]["name"] == "org/base" and not re.search("77.7|foreign", card + sent.decode())


def test_the_card_of_medusa_2_says_that_its_target_answers_otherwise(saved_target, tmp_path, capsys):
    head = build_head(MedusaConfig(type="medusa", num_depths=2, target_lora_rank=2), Target.load(saved_target))
    save_head(head, tmp_path / "head")
    push(tmp_path / "head", "me/mine", base_model="org/base", dry_run=True)
    said = capsys.readouterr().out
    assert "with target_adapter/ merged into it, which answers otherwise than the model alone" in said
    assert "target_adapter/adapter_model.safetensors" in said and "not what it answers" not in said
    assert "vllm serve MERGED_TARGET --spec" in said and "vllm serve org/base" not in said


def test_paths_within_texts_are_shortened_and_other_slashes_stay():
    told = {"row": "eagle3:/home/me/runs/final", "why": "see ~/data/my.jsonl:7, (/tmp/a/b)"}
    assert published(told, {}) == {"row": "eagle3:final", "why": "see my.jsonl:7, (b)"}
    for kept in ("https://hub.example/me/mine", "tokens/s", "</think>/no_think", "a /think b", "owner/name", "1/2/3"):
        assert published(kept, {}) == kept


def test_nothing_of_the_machine_or_the_token_goes_out(hub, run, tmp_path, saved_target, capsys):
    push(run, "me/mine", base_model="org/base", report=tmp_path / "report.json", endpoint=hub.url)
    said = capsys.readouterr()
    for name, content in hub.files["me/mine"].items():
        for secret in (TOKEN, str(saved_target), "/home/somebody", str(tmp_path)):
            assert secret.encode() not in content, (name, secret)
        words = set(re.findall(rb"[\w.-]+", content)) if name != "model.safetensors" else set()
        assert not words & {getpass.getuser().encode(), platform.node().encode()}, name
    assert hub.tokens == {f"Bearer {TOKEN}"} and TOKEN not in said.out + said.err
    hub.refuses = 403
    with pytest.raises(BadInput, match="me/mine: the hub refused: ") as caught:
        push(run, "me/mine", base_model="org/base", endpoint=hub.url)
    said = capsys.readouterr()
    assert TOKEN not in str(caught.value) + said.out + said.err and "\n" not in str(caught.value)
    assert not any(TOKEN in path.read_text(errors="ignore") for path in tmp_path.rglob("*") if path.is_file())


def test_a_dry_run_sends_nothing(hub, run, capsys):
    push(run, "me/mine", base_model="org/base", dry_run=True, endpoint=hub.url)
    said = capsys.readouterr().out
    assert hub.calls == [] and "model.safetensors" in said
    assert "base_model: org/base" in said and "Not measured yet" in said and "model-index" not in said


def test_what_cannot_be_pushed_is_refused_before_anything_is_sent(hub, run, tmp_path, saved_target):
    other = json.loads((tmp_path / "report.json").read_text())
    reports = {
        "target": {**other, "target": {"name": "x", "fingerprint": "0" * 32}},
        "results": {**other, "results": [other["results"][0], *other["results"][2:]]},
        "none": {},
    }
    for name, content in reports.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    cases = [
        ({"repo": "mine"}, "mine: expected a repository as owner/name"),
        ({"repo": "me/dflash-x"}, "`dflash` in its name makes vLLM take eagle3 for another method"),
        ({"base_model": ""}, "no hub id; say with --base-model"),
        ({"to": "hf"}, "hf loads no eagle3 heads"),
        ({"report": tmp_path / "target.json"}, "measured on target x"),
        ({"report": tmp_path / "results.json"}, "no lossless result of this eagle3 head "),
        ({"report": tmp_path / "none.json"}, "no report of headstart eval: KeyError"),
        ({"report": tmp_path / "absent.json"}, "no report of headstart eval: FileNotFoundError"),
        ({"run": tmp_path}, "no config.json in it"),
    ]
    for changes, problem in cases:
        how = {"run": run, "repo": "me/mine", "base_model": "org/base", "endpoint": hub.url, **changes}
        with pytest.raises(BadInput, match=problem):
            push(how.pop("run"), how.pop("repo"), **how)
    assert hub.calls == []
