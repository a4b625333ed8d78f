"""What is cheap to know is checked before a target is loaded: each verb ends in one line, and no weights were read."""

import json
import shutil
from itertools import product

import pytest
import yaml
from drafted import untrained
from headstart.engines.heads import save_head
from headstart.targets.target import Target

TARGET = "{target}"
EVAL = f"eval --target {TARGET} --output {{out}}"
TRAIN = f"train {{run}} target.path={TARGET} train.output_dir={{out}}"
EXTRACT = f"data extract {{run}} target.path={TARGET} --output {{out}}"
REGENERATE = f"data regenerate data/regenerate_local.yaml target={TARGET} output={{out}}"
REFIT = f"refit --target {TARGET} --budget 60s --output {{out}}"
AUTO = f"auto --target {TARGET} --budget 60s --output {{out}}"
PLAN = f"plan --target {TARGET} --output {{out}}"
ROWS = {
    "data.train=gone.jsonl": "gone.jsonl",
    "data.train=broken.jsonl": "broken.jsonl:2",
    "data.train=keys.jsonl": "keys.jsonl:1",
    "data.train=roles.jsonl": "roles.jsonl:1",
}
CASES = [
    # (command line, what the line names)
    (f"{EVAL} --drafter ngram --prompts gone.jsonl", "gone.jsonl"),
    (f"{EVAL} --drafter ngram --prompts broken.jsonl", "broken.jsonl:2"),
    (f"{EVAL} --drafter ngram --prompts keys.jsonl", "keys.jsonl:1"),
    (f"{EVAL} --drafter ngram --prompts roles.jsonl", "roles.jsonl:1"),
    (f"{EVAL} --drafter ngram --suite mt-bench=broken.jsonl", "broken.jsonl"),
    ("eval --target ./gone --output {out} --drafter ngram --prompts good.jsonl", "target gone: no such folder"),
    (f"{EVAL} --head gone --prompts good.jsonl", "gone"),
    (f"{EVAL} --head taken --prompts good.jsonl", "head taken: no config.json in it"),
    (f"{EVAL} --drafter ngrm --prompts good.jsonl", "drafter 'ngrm': expected one of ngram, ngram:MAX, suffix"),
    (f"{EVAL} --prompts good.jsonl", "give at least one --head or --drafter"),
    (f"{EVAL} --drafter ngram --prompts good.jsonl --accept most", "--accept most: expected one of exact"),
    (f"{EVAL} --head older --prompts good.jsonl", "config keys of another version of Headstart: ['dpace']"),
    (f"{EVAL} --drafter suffix:gone.jsonl --prompts good.jsonl", "gone.jsonl"),
    (f"{EVAL} --drafter draft-model:gone --prompts good.jsonl", "gone"),
    (f"{EVAL} --drafter ngram --adapter gone --prompts good.jsonl", "gone"),
    (f"{EVAL} --drafter ngram --engine vlm --prompts good.jsonl", "--engine: name 'vlm'"),
    (f"eval --target {TARGET} --output taken --drafter ngram --prompts good.jsonl", "taken"),
    (f"{EVAL} --drafter ngram", "nothing to measure on: give at least one --prompts or --suite"),
    (f"{EVAL} --drafter ngram --suite spec_bench", "did you mean spec-bench?"),
    (f"{EVAL} --drafter ngram --prompts good.jsonl --prompts good.jsonl", "good.jsonl: is given twice"),
    (f"{EVAL} --drafter ngram --prompts good.jsonl --thinking maybe", "--thinking maybe: expected on or off"),
    (f"{EVAL} --drafter ngram --prompts good.jsonl --top-p 0.9", "they need --temperature above 0"),
    (f"{EVAL} --drafter ngram --prompts good.jsonl --top-k 5", "they need --temperature above 0"),
    (f"{PLAN} --prompts good.jsonl", "give one of --head and --drafter"),
    (f"{PLAN} --drafter ngram --tree bush:4 --prompts good.jsonl", "--tree bush:4: expected dynamic:NODES"),
    (f"{PLAN} --drafter ngram --tree dynamic:4 --prompts good.jsonl", "--tree dynamic:4: look-ups draft chains"),
    (f"{PLAN} --drafter ngram --prompts gone.jsonl", "gone.jsonl"),
    (f"{PLAN} --drafter ngram --prompts broken.jsonl", "broken.jsonl:2"),
    (f"{PLAN} --head gone --prompts good.jsonl", "gone"),
    (f"{PLAN} --drafter ngram --adapter gone --prompts good.jsonl", "gone"),
    *((f"{command} {rows}", named) for command, (rows, named) in product((TRAIN, EXTRACT), ROWS.items())),
    (f"{TRAIN} target.path=./gone", "target gone: no such folder"),
    (f"{TRAIN} head.type=eagle3 head.feature_layers=[1,2,9]", "feature layer 9: "),
    (f"{TRAIN} head.type=eagle3 head.draft_vocab_size=100", "draft vocabulary of 100 tokens: should be between 1 and"),
    (f"{TRAIN} target.path=small", "target small: "),
    (f"{TRAIN} train.max_step=3", "train.max_step: unknown key; did you mean train.max_steps?"),
    (f"{TRAIN} head.num_depth=3", "head.num_depth: unknown key; did you mean head.num_depths?"),
    (f"{TRAIN} trian.max_steps=3", "trian: unknown key; did you mean train?"),
    (f"{TRAIN} train.max_steps=many", "train.max_steps: should be"),
    (f"{TRAIN} train.max_steps", "override 'train.max_steps': should be key=value"),
    (f"{TRAIN} data.train=empty.jsonl", "empty.jsonl: empty file"),
    (f"{TRAIN} data.train=good.jsonl", "good.jsonl:1: "),
    (f"{TRAIN} data.validation=gone.jsonl", "gone.jsonl"),
    (f"{TRAIN} data.validation=broken.jsonl", "broken.jsonl:2"),
    (f"{TRAIN} data.train=good.jsonl data.features=gone", "gone"),
    (f"{TRAIN} target.adapter=gone", "gone"),
    (f"{TRAIN} train.start_from=gone", "train.start_from: head gone"),
    (f"{TRAIN} train.start_from={{head}} head.type=eagle", "is of type medusa, not eagle"),
    (f"{TRAIN} train.shard_target=true", "train.shard_target: one process"),
    (f"{TRAIN} train.output_dir=taken", "taken"),
    (f"{EXTRACT} engine.name=vlm", "vlm"),
    (f"data extract {{run}} target.path={TARGET} --output taken", "taken"),
    *((f"{REGENERATE} {rows.replace('data.train', 'sources')}", named) for rows, named in ROWS.items()),
    (f"{REGENERATE} sources=good.jsonl engine.adapter=gone", "gone"),
    (f"{REGENERATE} sources=good.jsonl output=taken", "taken"),
    (f"{AUTO} --prompts gone.jsonl", "gone.jsonl"),
    (f"{AUTO} --prompts many.jsonl --device cuda:1", "CUDA_VISIBLE_DEVICES=1"),
    (f"auto --target {TARGET} --budget 60s --output a:b --prompts many.jsonl", "a:b"),
    (f"{AUTO} --prompts many.jsonl --engine vllm --engine-args '--api-key x'", "HEADSTART_API_KEY"),
    (f"{AUTO} --prompts broken.jsonl", "broken.jsonl:2"),
    (f"{AUTO} --prompts three.jsonl", "at least 12 are needed"),
    (f"{REFIT} --head {{head}} --traffic gone.jsonl", "gone.jsonl"),
    (f"{REFIT} --head gone --traffic good.jsonl", "gone"),
    (f"{REFIT} --head older --traffic many.jsonl", "config keys of another version of Headstart: ['dpace']"),
    (f"{AUTO} --prompts many.jsonl --engine vlm", "vlm"),
    (f"auto --target {TARGET} --budget 60s --output taken --prompts many.jsonl", "taken"),
    # numbers that are none, or of which memory and time have no end
    (f"{EVAL} --drafter ngram --prompts good.jsonl --temperature inf", "temperature inf: expected"),
    (f"{EVAL} --drafter ngram --prompts good.jsonl --temperature 1e-40", "temperature 1e-40: expected"),
    (f"{EVAL} --drafter ngram --prompts good.jsonl --temperature 1 --top-p nan", "top_p nan: expected more than 0"),
    (f"{EVAL} --drafter ngram --prompts good.jsonl --top-p 2", "top_p 2.0: expected more than 0 and at most 1"),
    (f"{EVAL} --drafter ngram --prompts good.jsonl --num-draft-tokens 99999", "num_draft_tokens 99999: at most 128"),
    (f"{EVAL} --drafter ngram@99999 --prompts good.jsonl", "num_draft_tokens 99999: at most 128"),
    (f"{EVAL} --drafter ngram:99999 --prompts good.jsonl", "MAX should be a whole number from 1 to 64"),
    (f"{EVAL} --head {{head}} --prompts good.jsonl --draft-window 99999999999", "--draft-window 99999999999: expected"),
    (f"{EVAL} --head {{head}} --prompts good.jsonl --verify-cost nan", "--verify-cost nan: expected"),
    (f"{PLAN} --drafter ngram --prompts good.jsonl --num-draft-tokens 99999", "num_draft_tokens 99999: at most 128"),
    (f"{PLAN} --drafter ngram --prompts good.jsonl --tree dynamic:99999", "dynamic:NODES, of 1 to 1024"),
    (
        f"auto --target {TARGET} --budget 99999h --output {{out}} --prompts many.jsonl",
        "--budget 99999h: the maximum",
    ),
    (f"auto --target {TARGET} --budget {'9' * 400}h --output {{out}} --prompts many.jsonl", "the maximum is 1000h"),
    ("train gone.yaml", "gone.yaml: no such file"),
    ("heads --target ./gone", "target gone: no such folder"),
    ("check taken", "no config.json in it"),
    ("export gone {out} --to vllm", "gone"),
    ("export {head} taken --to vllm", "taken"),
    ("export {head} {out} --to vlm", "vlm"),
]
SERVED = [  # what of eval's options in servers does not go together
    ("--concurrency 8 --head x", "--concurrency: goes with --engine vllm or sglang or llama-server or openai, or"),
    ("--server http://h", "--server, --baseline-server: give both"),
    ("--head x --baseline-drafter ngram", "--baseline-drafter: goes with --engine"),
    ("--engine openai --head x", "--engine openai: name it with --server URL"),
    ("--engine vllm --head x --batch-size 2", "--batch-size: is not for servers"),
    ("--engine vllm", "nothing to measure: give at least one --head"),
    ("--engine vllm --drafter suffix", "vLLM drafts with head:PATH, draft-model:PATH or ngram"),
    ("--engine vllm --engine-python p --server http://h --baseline-server http://h", "--engine: python, args: are"),
    ("--engine-args -t", "--engine: args: goes with another engine"),
    ("--engine vllm --engine-python p --drafter ngram:x", "MAX should be a whole number"),
    ("--engine sglang --engine-python p --drafter ngram:8", "SGLang is not told how many tokens look-ups go by"),
    ("--engine vllm --drafter ngram --slo fast", "--slo fast: expected ttft=SECONDS"),
    ("--engine vllm --drafter ngram --slo ttft=nan", "--slo ttft=nan: expected ttft=SECONDS"),
    ("--engine vllm --drafter ngram --rate nan", "--rate nan: expected arrivals per second, 0.001 or more"),
    ("--engine vllm --drafter ngram --rate 1e-9", "--rate 1e-09: expected arrivals per second"),
    ("--engine vllm --drafter ngram --rate inf", "--rate inf: expected arrivals per second"),
    ("--engine vllm --drafter ngram --concurrency 0", "--concurrency 0: expected 1 to 4096"),
    ("--engine vllm --drafter ngram --concurrency 99999", "--concurrency 99999: expected 1 to 4096"),
    ("--engine vllm --drafter ngram --num-draft-tokens 99999", "num_draft_tokens 99999: at most 128, an answer's"),
    ("--engine vllm --drafter ngram@99999", "num_draft_tokens 99999: at most 128, an answer's"),
    ("--engine vllm --engine-python p --drafter ngram:99999", "MAX should be a whole number from 1 to 64"),
    ("--engine vllm --drafter ngram --temperature 1 --top-p 2", "top_p 2.0: expected more than 0 and at most 1"),
    ("--engine vllm --drafter ngram --draft-window 64", "--draft-window 64: goes with a head"),
    ('--engine vllm --drafter ngram --engine-args "--x \'y"', "No closing quotation"),
    ("--server http://h --baseline-server http://h --engine vllm --head x --drafter y", "name at most one --head"),
    ("--server ftp://h --baseline-server http://h", "--server 'ftp://h': expected a URL"),
]
CASES += [(f"{EVAL} --prompts good.jsonl {options}", problem) for options, problem in SERVED]
OUT_OF_RANGE = {
    f"{EVAL} --drafter ngram --prompts good.jsonl": (
        *("--batch-size 0", "--batch-size 4097", "--repeats 0", "--repeats 1001", "--limit 0", "--tree-nodes 0"),
        *("--tree-nodes 1025", "--num-draft-tokens 0", "--max-new-tokens 1", "--max-new-tokens 99999999"),
        *("--temperature -1", "--temperature nan", "--top-k -1", "--seed -1", f"--seed {2**63}"),
    ),
    f"{PLAN} --drafter ngram --prompts good.jsonl": (
        *("--batch-size 0", "--batch-size 4097", "--limit 0", "--num-draft-tokens 0", "--max-new-tokens 99999999"),
        *("--temperature -1", "--temperature nan", "--seconds 0", "--seconds inf", "--seconds nan"),
    ),
    f"{AUTO} --prompts many.jsonl": (
        *("--batch-size 4097", "--concurrency 0", "--concurrency 4097", "--max-new-tokens 99999999"),
        f"--seed {2**63}",
    ),
    f"{REFIT} --head {{head}} --traffic good.jsonl": ("--concurrency 4097", "--max-length 1", f"--seed {2**63}"),
    EXTRACT: ("--batch-tokens 0", "--batch-tokens 99999999", "--shard-bytes 0", "--shard-bytes 999999999999"),
    f"doctor --target {TARGET}": ("--gpus -1", "--gpus 1025", "--memory -1", "--memory inf", "--memory nan"),
    "doctor ddp": ("--num-processes 0",),
    "data inspect {run}": ("--row -1", "--num-rows -1"),
}


def refuse_to_load(monkeypatch):
    def load(*_, **__):
        raise AssertionError("a target is loaded")

    for reads in ("target.load_model", "sharded.ShardedTarget.read", "bare.BareTarget.read"):
        monkeypatch.setattr(f"headstart.targets.{reads}", load)


@pytest.fixture(scope="module")
def world(saved_target, tmp_path_factory):
    """A folder with what the commands name."""
    folder = tmp_path_factory.mktemp("world")
    good = {"messages": [{"role": "user", "content": "w1 w5"}, {"role": "assistant", "content": "w7"}]}
    files = {
        "good": [good],
        "keys": [{"question": "w1"}],
        "roles": [{"messages": [{"role": "narrator", "content": "w1"}]}],
        "many": (many := [{"prompt": f"w{i} w{i + 1}"} for i in range(3, 40)]),
        "three": many[:3],
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "broken.jsonl").write_text(json.dumps(good) + '\n{"messages": [\n')
    (folder / "empty.jsonl").touch()
    (folder / "small").mkdir()
    (folder / "small" / "config.json").write_text("{}")
    (folder / "taken").mkdir()
    (folder / "taken" / "thesis.txt").write_text("mine")
    head = save_head(untrained("medusa", Target.load(saved_target)), folder / "head")
    config = json.loads((shutil.copytree(head, folder / "older") / "config.json").read_text())
    config["headstart"]["head"]["dpace"] = True
    (folder / "older" / "config.json").write_text(json.dumps(config))
    train = {"max_steps": 3, "batch_size": 2, "device": "cpu", "output_dir": "unused"}
    data, head = {"train": str(saved_target.with_name("rows.jsonl"))}, {"type": "medusa", "num_depths": 3}
    run = {"target": {"path": str(saved_target)}, "head": head, "data": data, "train": train}
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder


@pytest.fixture
def refused(headstart, saved_target, world, tmp_path, monkeypatch):
    """refused("eval ..."): what a command says on stderr that ends with exit code 2, loads no target, says nothing on
    stdout and writes no folder; by lines."""
    monkeypatch.chdir(world)
    refuse_to_load(monkeypatch)
    places = {"target": saved_target, "out": tmp_path / "out", "run": world / "run.yaml", "head": world / "head"}

    def call(line):
        code, out, err = headstart(line.format(**places))
        assert code == 2 and out == "" and not (tmp_path / "out").exists(), err
        assert [path.name for path in (world / "taken").iterdir()] == ["thesis.txt"]
        return err.splitlines()

    return call


@pytest.mark.parametrize(("line", "named"), CASES)
def test_what_is_cheap_to_know_is_checked_before_a_target_is_loaded(line, named, refused):
    said = refused(line)
    assert [one for one in said if one.startswith("headstart: ")] == said[-1:], "behind what was going on"
    assert named in said[-1]


@pytest.mark.parametrize(("line", "option"), [(line, one) for line, every in OUT_OF_RANGE.items() for one in every])
def test_a_number_out_of_range_is_refused_at_once(line, option, refused):
    name, said = option.partition(" ")[0], refused(f"{line} {option}")[-1]
    starts = (f"Error: Invalid value for '{name}': ", f"headstart: {name} ", f"headstart: {name[2:]} ")
    assert said.startswith(starts), "a number that is none is ours to refuse, where the typer takes it"


def test_a_folder_with_another_run_is_refused_before_a_target_is_loaded(headstart, world, tmp_path, monkeypatch):
    line = f"train {world / 'run.yaml'} train.output_dir={tmp_path / 'run'}"
    assert headstart(line)[0] == 0
    refuse_to_load(monkeypatch)
    code, _, err = headstart(f"{line} train.seed=1")
    assert code == 2 and "holds a run with another train.seed" in err, err
