"""What llama-server is told of a head, and what it says of its drafts. A stand-in answers as it does."""

import gguf_files
import pytest
from headstart.base.errors import BadInput
from headstart.benchmarks.plain_decoding import LlamaServer
from headstart.engines.neutral_sampling import LLAMA_SERVER
from headstart.engines.servers.asking import Arrived
from headstart.engines.servers.llama_server import LlamaServerEngine
from headstart.eval.drafters.answers import Answers
from headstart.eval.drafters.llamacpp_cache import write_cache
from serving_stand_in import StandIn, listening

ENGINE = LlamaServerEngine()


@pytest.mark.parametrize(
    ("head", "flags"),
    [
        (gguf_files.eagle3, "-md HEAD --spec-type draft-eagle3 --spec-draft-n-max 3 --spec-draft-p-min 0"),
        (gguf_files.draft_model, "-md HEAD --spec-type draft-simple --spec-draft-n-max 3 --spec-draft-p-min 0"),
        (gguf_files.with_modules, "--spec-type draft-mtp --spec-draft-n-max 3 --spec-draft-p-min 0 -md HEAD"),
    ],
)
def test_the_head_s_file_says_how_it_is_served(head, flags, tmp_path):
    file = str(tmp_path / "a head.gguf")
    gguf_files.write(file, *head())
    words, length = ENGINE.head_file(file, "t.gguf", 3) or ([], 0)
    assert ([word.replace(file, "HEAD") for word in words], length) == (flags.split(), 3)


def test_answers_take_a_heads_place_and_their_drafts_have_a_length_of_their_own(tmp_path):
    write_cache(Answers([([1, 2], [3, 4, 5])]), tmp_path)
    file = str(tmp_path / "answers.ngrams")
    also = f"--lookup-cache-static {tmp_path}/bigrams.ngrams"
    assert ENGINE.head_file(file, "t.gguf", None) == (
        f"--spec-type ngram-cache --lookup-cache-dynamic {file} {also}".split(),
        8,
    )
    with pytest.raises(BadInput, match="looks up at most 8 tokens"):
        ENGINE.head_file(file, "t.gguf", 3)


@pytest.mark.parametrize(
    ("num_tokens", "drafted", "length", "rounds"),
    [
        (9, (8, 4), 2, 4),  # behind the prefill's token 4 rounds, in each one accepted draft and a token more
        (7, (6, 6), 3, 2),  # the last round's drafts reach beyond the end of the text, and all count as accepted
        (7, (5, 3), 8, 3),  # looked up: not always as many
        (7, (0, 0), 8, 6),  # nothing was found
        (7, (6, 6), None, 1),  # of a running server whose K is not known
    ],
)
def test_forwards_follow_from_tokens_and_drafts(num_tokens, drafted, length, rounds):
    answers = [Arrived(num_tokens=num_tokens, drafted=drafted)] * 2
    found = ENGINE.counted_in(answers, length)
    assert found is not None and (found.num_rounds, found.num_drafted) == (2 * rounds, 2 * drafted[0])
    assert found.num_rounds + found.num_accepted == 2 * (num_tokens - 1)
    assert ENGINE.counted_in([Arrived(num_tokens=9)], length) is None, "another server"


def test_a_servers_own_sampling_defaults_are_not_measured():
    """Neutral settings are sent, and a server that does not say that it applies them is refused."""
    server, stand_in = LlamaServer(["llama-server"]), StandIn(style="llama-server")
    with listening(stand_in) as server.url:
        assert len(server.answer([1, 5], max_new_tokens=5)[0]) == 5
        assert {**LLAMA_SERVER, "temperature": 0.0}.items() <= stand_in.bodies[0].items()
        stand_in.applied = {"repeat_penalty": 1.3}
        with pytest.raises(RuntimeError, match=r"does not answer greedily as asked: repeat_penalty 1\.3"):
            server.answer([1, 5], max_new_tokens=5)
