"""Trajectories of an agent with two tools: `python examples/agents.py MODEL TRAJECTORIES.jsonl [SERVER_URL]`.

The model answers a hundred questions about a small shop: it searches the shop's table, calculates, and reads what these
tools give back. The rows have `messages` and `tools`, as `headstart data prepare`, `train` and `eval --turns recorded`
read them; put your own tools in their place. Without a server the model runs in this process. A server is asked for
MODEL, and finds the calls itself (vLLM with `--enable-auto-tool-choice --tool-call-parser hermes`).
"""

import ast
import json
import operator
import random
import re
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from headstart.base.files import write_text
from headstart.data_pipelines.answers.client import OpenAIClient
from headstart.data_pipelines.answers.conversations import Answer, ChatRequest, Exchange, Failure, SamplingConfig
from headstart.data_pipelines.answers.dispatch import Outcome, by_threads, joining
from headstart.data_pipelines.answers.regenerate import ClientConfig
from headstart.data_pipelines.answers.tool_calls import function_of, json_calls
from headstart.engines.servers.address import Address
from headstart.scripts.data.engine_answers import EngineAnswers
from headstart.targets.chat.messages import Message
from headstart.targets.chat.written_ids import AnswerIds, as_entry
from headstart.targets.dtype import default_dtype
from headstart.targets.loading import default_device
from headstart.targets.target import Target

NUM_TASKS = 100
MOST_CALLS = 4  # messages with calls whose tools run; the one after them ends the trajectory
SAMPLING = SamplingConfig(temperature=0, max_tokens=48)
# with a worked example, in the tags of Qwen's template
SYSTEM = """You answer questions about the products of a shop. You know no price and no stock, so your first answer is \
always a call of search, and nothing else. For example, to "What do 3 orange candles cost?":
<tool_call>
{"name": "search", "arguments": {"query": "orange candle"}}
</tool_call>
When you have read its result, call calculate with the numbers of the question and of the result. When you have read \
the result of calculate, do not call again: answer in one sentence that has this result."""


class Product(NamedTuple):
    name: str
    price: float
    stock: int


TABLE = [  # of made-up prices and stocks
    Product(f"{colour} {item}", (37 * place + 11 * shade) % 150 / 2 + 4, 12 + 7 * place + shade)
    for place, item in enumerate("chair lamp table bag jacket mug blanket clock mirror notebook".split())
    for shade, colour in enumerate("blue red green".split())
]


def search(query: str) -> str:
    """The products that the query names."""
    found = [one for one in TABLE if one.name in query.lower()]
    lines = (f"{one.name}: {one.price} euros each, {one.stock} in stock" for one in found)
    return "\n".join(lines) or "no such product"


SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(expression: str) -> str:
    """The value of a sum, product or quotient of numbers; nothing else is evaluated."""

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.BinOp(left, sign, right) if type(sign) in SIGNS:
                return SIGNS[type(sign)](value(left), value(right))
        raise ValueError(f"not arithmetic: {ast.unparse(node)}")

    return f"{expression} = {value(ast.parse(expression, mode='eval').body):.10g}"


FUNCTIONS = {  # argument, function, what the model is told
    "search": ("query", search, "Find products by name: their price in euros and how many are in stock."),
    "calculate": ("expression", calculate, "Compute an arithmetic expression of numbers with + - * / and brackets."),
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": what, "parameters": schema}}
    for name, (key, _, what) in FUNCTIONS.items()
    for schema in [{"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}]
]


def result_of(call: Any) -> Message:
    """What the tool gives back, whatever else it is told; of a call that cannot be run, why."""
    try:
        argument, function, _ = FUNCTIONS[call["function"]["name"]]
        result = function(call["function"]["arguments"][argument])
    except Exception as error:  # a model may call anything with anything
        result = f"error: {type(error).__name__}: {error}"
    return {"role": "tool", "tool_call_id": call.get("id"), "content": result}


def with_first_call(message: Message) -> Message:
    """The message with the first of its calls alone, which an agent stops at; the call is one also where the model left
    out what its template puts around calls, as small models do."""
    calls = message.get("tool_calls", [])[:1]
    if not calls and (found := next(json_calls(message["content"]), None)):
        message = {**message, "content": re.sub(r"<[^<>]*>\s*$", "", message["content"][: found[0]]).strip()}
        calls = [{"type": "function", "id": "call00000", "function": function_of(found[1])}]
    return {**message, "tool_calls": calls} if calls else message


@dataclass(frozen=True)
class Task(Exchange):
    """A question that is asked until the model answers without a call. expected: the number in the right answer."""

    expected: float = 0.0

    def talk(self) -> Generator[ChatRequest, Answer | Failure, dict[str, Any] | Failure]:
        messages = [message for message in self.script if message is not None]
        written: list[tuple[int, AnswerIds | None]] = []
        while True:
            answer = yield ChatRequest(list(messages), self.tools, self.sampling, self.seed(len(written)))
            if isinstance(answer, Failure):
                return answer
            written.append((len(messages), answer.ids))
            messages.append(with_first_call(answer.message))
            if "tool_calls" not in messages[-1] or len(written) > MOST_CALLS:
                break
            messages.append(result_of(messages[-1]["tool_calls"][0]))
        row = {"id": self.key, "messages": messages, "tools": self.tools, "finish_reason": answer.finish_reason}
        said = re.findall(r"\d+\.?\d*", messages[-1]["content"].replace(",", ""))
        is_right = any(abs(float(number) - self.expected) < 0.01 for number in said)
        return {**row, **as_entry(written), "num_calls": len(written) - 1, "is_right": is_right}


def tasks(count: int, *, seed: int = 0) -> Iterator[Task]:
    """Different questions, the same for the same seed."""
    rng, asked = random.Random(seed), set[str]()
    while len(asked) < count:
        ((name, price, stock), other), number = rng.sample(TABLE, 2), rng.randint(2, 10)
        kinds = [
            (f"What do {number} {name}s cost?", number * price),
            (f"What is our whole stock of {name}s worth?", price * stock),
            (f"How many {name}s are left in stock when we sell {number}?", stock - number),
            (f"What do a {name} and a {other.name} cost together?", price + other.price),
            (f"What do {number} {name}s cost with a discount of 10 percent?", number * price * 0.9),
        ]
        question, expected = rng.choice(kinds)
        if question not in asked:
            asked.add(question)
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
            yield Task(f"task{len(asked):03}", question, [*messages], TOOLS, SAMPLING, 0, expected=expected)


def outcomes(model: str, server: str) -> Iterator[Outcome]:
    """The trajectories, in the order in which they end."""
    asked = tasks(NUM_TASKS)
    if server:
        client = OpenAIClient([Address.of(server, where="SERVER_URL")], model=model, config=ClientConfig())
        return by_threads(asked, answer=client, num_threads=16, is_done=lambda key: False)
    answers = EngineAnswers(Target.load(model, dtype=default_dtype(model, default_device())), batch_size=16)
    return joining(asked, answers=answers.joining, batch_size=16, is_done=lambda key: False)


def main(model: str, output: str, server: str = "") -> None:
    ended = [outcome for _, outcome in sorted(outcomes(model, server), key=lambda pair: pair[0])]
    rows = [outcome for outcome in ended if not isinstance(outcome, Failure)]
    write_text(Path(output), "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    called, right = sum(row["num_calls"] > 0 for row in rows), sum(row["is_right"] for row in rows)
    print(f"{len(rows)} trajectories in {output}: {called} with a call, {right} with the right answer")
    if problems := [str(outcome) for outcome in ended if isinstance(outcome, Failure)]:
        print(f"{len(problems)} left out: {problems[0]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
