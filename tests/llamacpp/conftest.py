"""Where llama.cpp is, as `make test-llamacpp` has it, and the file that takes down what both engines counted."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from headstart.engines.servers.llama_server import PACKAGE, LlamaServerEngine
from headstart.eval.measurement.resume import BatchStore
from headstart.eval.served.blocks import ServedConfig, ServedDrafts, ServedSide, measure_in_servers
from headstart.eval.served.load import Load
from headstart.eval.served.questions import PLAIN, Question
from headstart.eval.served.served_result import ServedResult
from headstart.eval.suites.prompts import Suite
from results import written_down


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--llama-server", default=PACKAGE, help="a binary to serve with instead of that package")
    parser.addoption("--llama-cpp", help="a checkout, for its converter")
    parser.addoption("--llama-log", help="a JSON file for what both engines counted")


@pytest.fixture(scope="module")
def figures(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    """Of each head, once its test has passed; written down at the end where --llama-log names a file."""
    with written_down(request.config.getoption("--llama-log", default=None)) as found:
        yield found


@pytest.fixture(scope="module")
def llamacpp(request: pytest.FixtureRequest) -> tuple[str, Path]:
    """The server and the checkout."""
    server, checkout = (request.config.getoption(option, default=None) for option in ("--llama-server", "--llama-cpp"))
    if not checkout:
        pytest.skip("needs llama.cpp: make test-llamacpp")
    return str(server), Path(str(checkout))


def measured(
    binary: str, target: Path, head: Path, suite: Suite, folder: Path, *, length: int, num_draft: int
) -> ServedResult:
    """The head in llama-server, one question at a time, beside the server without it."""
    engine, questions = LlamaServerEngine(), [Question("", PLAIN, {"prompt": ids}, ids) for ids in suite.prompts]
    drafting = engine.head_file(str(head), str(target), num_draft)
    assert drafting is not None
    room = [*engine.room(1, max(map(len, suite.prompts)) + length + 16), "-t", "2"]
    plain, drafted = (ServedSide(None, engine.command(binary, str(target), told, room)) for told in ([], drafting[0]))
    config = ServedConfig([Load()], max_new_tokens=length, num_repeats=1, settings=engine.neutral)
    with BatchStore(folder) as store:
        drafts = ServedDrafts("head", num_draft, (plain, drafted))
        [result] = measure_in_servers(engine, drafts, questions, config, store=store)
    return result


@pytest.fixture
def served() -> Callable[..., ServedResult]:
    return measured
