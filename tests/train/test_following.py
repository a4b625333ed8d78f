"""A head that follows a policy: it learns on from rollouts, and nothing of the policy is touched."""

import json
import os
from dataclasses import replace
from itertools import count
from types import MethodType
from typing import Any

import pytest
import torch
from headstart.base import files
from headstart.base.errors import BadInput
from headstart.engines.export import export_head
from headstart.engines.heads import HEADS, build_head, load_head, save_head
from headstart.eval.decoding.loop import generate
from headstart.heads.medusa import MedusaConfig
from headstart.targets.target import Target
from headstart.train import following
from headstart.train.following import FollowingHead, Rollouts, send_head, view_of
from headstart.train.inputs.config import TrainConfig
from http_stand_in import HttpStandIn, JsonHandler
from safetensors.torch import load_file

PROMPTS = [[1, 5, 9], [1, 7, 8, 3, 22], [1, 30, 31, 32], [1, 44, 3]]


@pytest.fixture
def start(target, tmp_path):
    """start(family): the folder of an untrained head of the tests' target."""

    def made(head_type="eagle3"):
        config = HEADS[head_type].config_class(type=head_type, num_depths=3)
        return save_head(build_head(config, target), tmp_path / "start")

    return made


@pytest.fixture
def policy(tiny_model):
    """The tests' target in training, with gradients and an optimizer's step behind it."""
    model = tiny_model("llama").requires_grad_(True).train()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    return model


@pytest.fixture
def config(tmp_path):
    def made(name="out", **changes):
        how: dict[str, Any] = {
            "learning_rate": 3e-3,
            "batch_size": 2,
            "max_steps": 1000,
            "warmup_steps": 0,
            "min_lr_ratio": 1.0,
        }
        how |= {"device": "cpu", "start_from": str(tmp_path / "start"), "output_dir": str(tmp_path / name)}
        return TrainConfig(**(how | changes))

    return made


def rolled(target, head=None, **how):
    """Sampled rollouts of all prompts, and the rounds in which they were decoded."""
    how |= {"temperature": 1.0, "generator": torch.Generator().manual_seed(3)}
    done = generate(target, head, PROMPTS, max_new_tokens=24, eos_token_ids=[], **how)
    rows = [[*prompt, *new] for prompt, new in zip(PROMPTS, done.token_ids, strict=True)]
    return Rollouts(rows, [len(prompt) for prompt in PROMPTS]), done.rounds


def test_the_policy_is_not_touched(head_type, start, policy, config):
    start(head_type)
    before = {name: (p.detach().clone(), p.grad.clone()) for name, p in policy.named_parameters()}
    attention, random = policy.config._attn_implementation, torch.get_rng_state()
    head = FollowingHead(policy, config(), share=None)
    rollouts, _ = rolled(head.target, head.drafter(), num_draft_tokens=2)
    weights = {name: p.detach().clone() for name, p in head.head.named_parameters()}
    done = head.follow(rollouts, max_steps=3)
    head.save()
    assert done.steps == 3 and any(not torch.equal(p, weights[name]) for name, p in head.head.named_parameters())
    for name, parameter in policy.named_parameters():
        assert parameter.requires_grad and torch.equal(parameter, before[name][0]), name
        assert torch.equal(parameter.grad, before[name][1]), name
    assert policy.training and policy.config._attn_implementation == attention
    assert torch.equal(torch.get_rng_state(), random), "the loop draws the same numbers with it and without"


def test_what_the_policys_optimizer_writes_is_read_at_once(policy):
    target, ids = view_of(policy, name="policy", fingerprint="0f"), torch.tensor([PROMPTS[1]])
    for _ in range(2):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.01)
            own = policy.eval()(ids).logits
            torch.testing.assert_close(target.logits(target.forward(ids).post_norm), own)
            cached = generate(target, None, ids, max_new_tokens=8, eos_token_ids=[]).token_ids[0]
            assert cached == policy.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)[0, 5:].tolist()


def test_a_trainers_own_forward_is_not_what_is_read(policy):
    """TRL's is a closure over the policy, in its mode; mixed precision is another."""
    policy.forward = MethodType(lambda *args, **kwargs: pytest.fail("the policy ran"), policy)
    target = view_of(policy, name="policy", fingerprint="0f")
    del policy.forward
    ids = torch.tensor([PROMPTS[1]])
    torch.testing.assert_close(target.logits(target.forward(ids).post_norm), policy.eval()(ids).logits)


def test_weights_that_are_replaced_are_refused(start, policy, config):
    """As by `to`, or by a state that is assigned: the target would decode on with the old ones."""
    start("medusa")
    head = FollowingHead(policy, config(), share=None)
    rollouts = rolled(head.target)[0]
    policy.lm_head.weight.data = policy.lm_head.weight.data.clone()
    for act in (head.drafter, lambda: head.follow(rollouts)):
        with pytest.raises(BadInput, match="lm_head.weight is another tensor than at first"):
            act()


def test_it_learns_what_the_policy_writes_now(start, policy, config):
    start("medusa")
    head = FollowingHead(policy, config(learning_rate=1e-2), share=None)
    lengths = []
    with torch.no_grad():
        policy.lm_head.weight.copy_(policy.lm_head.weight.roll(1, 0))  # a policy that has moved far
    for _ in range(12):
        rollouts, _ = rolled(head.target)
        told = head.follow(rollouts).acceptance
        assert told is not None and told.acceptance_length is not None
        lengths.append(told.acceptance_length)
    assert lengths[-1] > 1.2 * lengths[0], lengths


@pytest.mark.parametrize(("head_type", "noise"), [("eagle3", {}), ("eagle", {"noise": 100.0})])
def test_the_acceptance_that_it_expects_is_that_of_decoding(head_type, noise, start, config, target):
    """Also where training draws noise, here more than what it learns from."""
    start(head_type)
    head = FollowingHead(target, config(batch_size=len(PROMPTS)), share=None)
    head.follow(rolled(target)[0], max_steps=30)
    rollouts, rounds = rolled(target, head.drafter(), num_draft_tokens=3)
    head.head.config = replace(head.head.config, **noise)
    told = head.follow(rollouts, max_steps=1).acceptance
    committed = sum(sum(one.num_committed) for one in rounds[1:])
    num_rounds = sum(num > 0 for one in rounds[1:] for num in one.num_committed)
    assert told is not None and told.acceptance_length == pytest.approx(committed / num_rounds, rel=0.05)
    assert committed > 1.1 * num_rounds
    assert abs(told.num_rounds - num_rounds) <= len(PROMPTS), "but for last rounds, which max_new_tokens cuts"


def test_states_of_the_policys_own_forward_take_the_place_of_reading(start, policy, config, monkeypatch):
    start()
    heads = [FollowingHead(policy, config(name), share=None) for name in ("read", "given")]
    rollouts, _ = rolled(heads[0].target)
    longest = max(map(len, rollouts.rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rollouts.rows])
    hidden = policy(ids, output_hidden_states=True).hidden_states
    given = Rollouts(rollouts.rows, rollouts.prompt_lengths, heads[1].states_of(hidden))
    read = heads[0].follow(rollouts)
    forward, seen = heads[1].target.forward, []
    monkeypatch.setattr(heads[1].target, "forward", lambda ids, **how: seen.append(len(ids)) or forward(ids, **how))
    done = heads[1].follow(given)
    assert seen == [1], "one row, once, to see that the states are of their tokens"
    assert done.loss == pytest.approx(read.loss, rel=1e-5) and done.steps == read.steps == 2
    assert done.acceptance == read.acceptance


def test_states_of_other_tokens_are_refused(start, policy, config):
    """As of a loop that pads prompts on the left."""
    start("medusa")
    head = FollowingHead(policy, config(), share=None)
    rollouts, _ = rolled(head.target)
    prompts = max(rollouts.prompt_lengths)
    pairs = zip(rollouts.rows, rollouts.prompt_lengths, strict=True)
    ids = torch.tensor([[0] * (prompts - num) + row for row, num in pairs])
    padded = policy(ids, attention_mask=(ids > 0).long(), output_hidden_states=True).hidden_states
    with pytest.raises(BadInput, match="states of row 0 are not of its tokens"):
        head.follow(Rollouts(rollouts.rows, rollouts.prompt_lengths, head.states_of(padded)))


def test_a_restart_goes_on_to_the_same_bits(start, config, target):
    start()
    rollouts = rolled(target)[0]
    whole, first = (FollowingHead(target, config(name, optimizer="muon"), share=None) for name in ("whole", "parts"))
    losses = [whole.follow(rollouts).loss for _ in range(3)]
    assert first.follow(rollouts).loss == losses[0]
    fc = first.head.get_parameter("fc.weight")
    assert first.optimizer.state[fc]["scale"].shape == fc.shape, "sizes of what it reads are measured"
    first.save()
    second = FollowingHead(target, config("parts", optimizer="muon"), share=None)
    assert second.num_steps == 2 and [second.follow(rollouts).loss for _ in range(2)] == losses[1:]
    states = [load_file(head.save() / "model.safetensors") for head in (whole, second)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in {**states[0], **states[1]})
    assert load_head(second.folder, target).config == second.head.config


def test_a_kill_while_it_saves_leaves_a_head_that_goes_on(start, config, target, monkeypatch):
    """Whenever it comes, before and behind each rename: the state is of one step, and the head is that of the state."""
    start("medusa")
    head, rollouts = FollowingHead(target, config(), share=None), rolled(target)[0]
    head.follow(rollouts, max_steps=1)
    head.save()
    head.follow(rollouts, max_steps=1)
    found = []
    for number in count(1):
        child = os.fork()
        if child == 0:
            syncs = iter([*[False] * (number - 1), True])
            monkeypatch.setattr(files, "_sync", lambda path, syncs=syncs: next(syncs) and os._exit(9))
            head.save()
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        again = FollowingHead(target, config(), share=None)
        found.append(again.num_steps)
        served, own = load_file(again.folder / "model.safetensors"), again.head.state_dict()
        assert own.keys() <= served.keys() and all(torch.equal(served[name], tensor) for name, tensor in own.items())
        if code == 0:
            break
        assert code == 9
    assert found == sorted(found) and {1, 2} == {*found} and found.count(1) > 1, found


def test_it_takes_no_more_than_its_share_of_the_time(start, config, target, monkeypatch):
    start("medusa")
    clock = {"now": 0.0}
    monkeypatch.setattr(following.time, "monotonic", lambda: clock["now"])
    head = FollowingHead(target, config(), share=0.05)
    rollouts, step, taken = rolled(target)[0], head._step, []

    def slow(batch):
        clock["now"] += 1.0
        return step(batch)

    monkeypatch.setattr(head, "_step", slow)
    for _ in range(60):
        clock["now"] += 5.0  # rollouts and the policy's step
        taken.append(head.follow(rollouts).steps)
    assert sum(taken) == head.spent == pytest.approx(0.05 * clock["now"], abs=1.0)
    assert head.spent <= 0.05 * clock["now"] and max(taken) == 1 and 0 in taken
    assert head.follow(rollouts).acceptance is None


def test_steps_end_where_the_config_says(start, config, target):
    start("medusa")
    head = FollowingHead(target, config(max_steps=3), share=None)
    assert [head.follow(rolled(target)[0]).steps for _ in range(3)] == [2, 1, 0]


def test_rollouts_without_a_position_to_learn_move_nothing(start, config, target):
    """Answers of one token, as of a policy that has collapsed."""
    start("medusa")
    head = FollowingHead(target, config(), share=None)
    head.follow(rolled(target)[0])  # momentum is there
    before = {name: tensor.clone() for name, tensor in head.head.state_dict().items()}
    assert head.follow(Rollouts([[1, 5, 9, 2], [1, 7, 2]], [3, 2])).steps == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in head.head.state_dict().items())


def test_what_cannot_be_followed_is_refused(start, config, target, policy, tiny_target):
    with pytest.raises(BadInput, match="start: no such folder"):
        FollowingHead(target, config())
    folder = start("medusa")
    head = FollowingHead(target, config())
    with pytest.raises(BadInput, match="2 rollouts with 1 prompt lengths"):
        head.follow(Rollouts([[1, 2], [1, 2]], [1]))
    states = head.states_of([torch.zeros(2, 2, target.hidden_size)] * (target.num_layers + 1))
    with pytest.raises(BadInput, match=r"states \[2, 2, 32\] are not of 2 rollouts of up to 3 tokens"):
        head.follow(Rollouts([[1, 2], [1, 2, 3]], [1, 1], states))
    with pytest.raises(BadInput, match="lora_rank, accumulation"):
        FollowingHead(target, config("third", lora_rank=4))
    adapted = MedusaConfig(type="medusa", num_depths=3, target_lora_rank=2)
    save_head(build_head(adapted, tiny_target("llama")), folder)
    with pytest.raises(BadInput, match="adapters on the target, whose answers would be others"):
        FollowingHead(policy, config("other"))


@pytest.fixture
def vllm():
    """A server's URL, and what it was asked: the path and, of a draft's weights, which lay there."""
    asked: list[tuple[str, list[str]]] = []

    class Handler(JsonHandler):
        def do_POST(self) -> None:
            body = json.loads(self.body())
            folder = body["args"][0] if body else None
            asked.append((self.path, sorted(load_file(f"{folder}/model.safetensors")) if folder else []))
            self.reply(None, 500 if folder and "refusing" in folder else 200)

    with HttpStandIn(Handler).running() as server:
        yield server.url, asked


def test_a_head_is_sent_between_answers(vllm, saved_target, tmp_path):
    url, asked = vllm
    target = Target.load(saved_target)
    head = save_head(build_head(HEADS["eagle3"].config_class(type="eagle3"), target), tmp_path / "head")
    send_head(head, url, through=tmp_path)
    paths, tensors = zip(*asked, strict=True)
    assert paths == ("/pause?mode=wait", "/collective_rpc", "/resume")
    export_head(head, tmp_path / "served", to="vllm")
    assert tensors[1] == sorted(load_file(tmp_path / "served" / "model.safetensors"))
    (tmp_path / "refusing").mkdir()
    asked.clear()
    with pytest.raises(BadInput, match="/collective_rpc: 500"):
        send_head(head, url, through=tmp_path / "refusing")
    assert asked[-1][0] == "/resume" and not any((tmp_path / "refusing").iterdir()), "it answers on"
