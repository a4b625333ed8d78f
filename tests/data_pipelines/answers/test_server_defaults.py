"""A server's own sampling defaults, as vLLM's of generation_config.json, do not reach the rows, or the rows say so."""

import json
from typing import Any

import openai_server
import pytest
from headstart.base.jsonl import read_jsonl
from headstart.configs.loader import build
from headstart.data_pipelines.answers.regenerate import RegenerateConfig
from headstart.engines.neutral_sampling import NEUTRAL

# what a server applies where a request is silent: generation_config.json's of vLLM and SGLang, and llama-server's
DEFAULTS = {"repetition_penalty": 1.3, "repeat_penalty": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.05}
DEFAULTS |= {"presence_penalty": 1.5, "frequency_penalty": 0.2, "typical_p": 0.9, "xtc_probability": 0.5}
DEFAULTS |= {"dry_multiplier": 0.8, "top_n_sigma": 1.0, "dynatemp_range": 0.5, "mirostat": 2, "temperature": 0.6}


@pytest.fixture
def answered(tmp_path) -> Any:
    """answered(refusal, key=value ...): the server, what it applied to each row, rows, settings of the manifest.

    Args: refusal: (body) -> a status and an error, or None.
    """

    def run(refusal: Any = lambda body: None, *, num_rows: int = 6, **keys: Any) -> Any:
        def reply(server: Any, body: dict[str, Any], attempt: int) -> Any:
            applied = {key: body.get(key, value) for key, value in DEFAULTS.items()}
            status, error = refusal(body) or (200, None)
            return (status, {}, error) if error else openai_server.answered(body, content=json.dumps(applied))

        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(num_rows)))
        sections = {"sources": str(prompts), "output": str(tmp_path / "out"), "target": "tiny", **keys}
        client = {"concurrency": 2, **keys.get("client", {})}
        with openai_server.serving(reply) as server:
            config = build(
                RegenerateConfig, {**sections, "engine": {"name": "openai", "server": server.url}, "client": client}
            )
            openai_server.regenerated(config)
        rows = read_jsonl(tmp_path / "out/answers.jsonl")
        settings = json.loads((tmp_path / "out/manifest.json").read_text())["settings"]
        return server, [json.loads(row["messages"][-1]["content"]) for row in rows], rows, settings

    return run


def naming(*keys: str) -> Any:
    """Refuses requests with one of these keys, and names the first."""

    def refusal(body: dict[str, Any]) -> Any:
        found = [key for key in keys if key in body]
        return (400, {"error": {"message": f"Unrecognized request argument supplied: {found[0]}"}}) if found else None

    return refusal


def test_a_servers_own_defaults_are_not_applied(answered):
    _, applied, rows, settings = answered()
    assert all(one == {**{k: NEUTRAL[k] for k in DEFAULTS if k in NEUTRAL}, "temperature": 1.0} for one in applied)
    assert not any("left_to_server" in row for row in rows)
    assert settings["neutral_unless_chosen"] == NEUTRAL


def test_what_is_asked_for_is_applied(answered):
    keys = {"sampling": {"top_k": 7, "top_p": 0.5}, "client": {"extra_body": {"min_p": 0.1, "repetition_penalty": 1.1}}}
    _, applied, _, _ = answered(**keys)
    chosen = {"top_k": 7, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.1}
    assert all({key: one[key] for key in chosen} == chosen and one["repeat_penalty"] == 1.0 for one in applied)


def test_a_key_that_a_server_refuses_is_dropped_with_a_word_and_the_rows_say_so(answered, capsys):
    server, applied, rows, _ = answered(naming("min_p", "xtc_probability"), num_rows=12)
    assert all(one["min_p"] == 0.05 and one["repetition_penalty"] == 1.0 for one in applied)
    assert all(row["left_to_server"] == ["min_p", "xtc_probability"] for row in rows) and len(rows) == 12
    address = server.url.removesuffix("/v1")
    said = f"headstart: {address}: refuses min_p, xtc_probability: are left to its own defaults; the rows say so\n"
    assert capsys.readouterr().err == said
    assert len(server.bodies) <= 12 + 2 * 2, "it is found out once, by each of the two that ask at a time"


REFUSALS = {
    "fields of pydantic": (422, {"detail": [{"type": "extra_forbidden", "loc": ["body", "dry_multiplier"]}]}),
    "without a name": (400, {"error": {"message": "Extra inputs are not permitted"}}),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_refusals_of_other_forms_are_understood(refusal, answered):
    _, applied, rows, _ = answered(lambda body: REFUSALS[refusal] if "dry_multiplier" in body else None)
    assert len(applied) == 6 and all("dry_multiplier" in row["left_to_server"] for row in rows)


def test_a_setting_that_was_chosen_is_not_dropped(answered, tmp_path):
    refusal = naming("top_k")
    _, applied, _, _ = answered(
        lambda body: refusal(body) if body["messages"][0]["content"].endswith("0") else None, sampling={"top_k": 7}
    )
    assert len(applied) == 5 and all(one["top_k"] == 7 for one in applied)
    [one, *_] = read_jsonl(tmp_path / "out/failed.jsonl")
    assert one["problem"].endswith("Unrecognized request argument supplied: top_k")


def test_a_refusal_of_something_else_drops_nothing(answered, tmp_path):
    """Also where it repeats the request."""

    def refusal(body: dict[str, Any]) -> Any:
        too_long = body["messages"][0]["content"].endswith(" 3")
        return (400, {"error": {"message": f"too long: {json.dumps(body)}"}}) if too_long else None

    _, applied, rows, _ = answered(refusal)
    assert len(applied) == 5 and not any("left_to_server" in row for row in rows)
    assert len(read_jsonl(tmp_path / "out/failed.jsonl")) == 1
