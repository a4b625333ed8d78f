"""What a target is asked as the ids that it reads, and what the ids that it wrote say: of our engine, and of a server
that is asked by ids. So the rows are the same, whichever answers.
"""

from functools import partial

from ...targets.chat.answers import answer_message, answer_text
from ...targets.chat.messages import Message
from ...targets.chat.prompts import ChatTemplate, plain_ids
from ...targets.chat.reasoning import think_markers
from ...targets.chat.rows import UnusableRow
from ...targets.chat.written_ids import AnswerIds, tokenizer_fingerprint
from ...targets.target import Target
from .conversations import Answer, ChatRequest, Failure
from .tool_calls import json_calls, with_tool_calls


class AsIds:
    """A target's prompts and answers as ids; its layers are not needed."""

    def __init__(self, target: Target):
        self.target, self.tokenizer = target, target.tokenizer
        self.markers, self.fingerprint = think_markers(self.tokenizer), tokenizer_fingerprint(self.tokenizer)

    def prompt(self, request: ChatRequest) -> list[int] | Failure:
        """Token ids up to where the assistant answers. Without a chat template a plain prompt is continued as it is."""
        if not self.tokenizer.chat_template:
            if [message["role"] for message in request.messages] != ["user"] or request.tools:
                return Failure("the target's tokenizer has no chat template; give plain `prompt` rows")
            ids = plain_ids(self.tokenizer, request.messages[0]["content"])
        else:
            try:
                ids = self.template(request).prompt(request.messages, "")
            except UnusableRow as error:
                return Failure(error.reason)
        room, wanted, size = self.target.num_positions, request.sampling.max_tokens, self.target.vocab_size
        if len(ids) + wanted > room:
            return Failure(f"{len(ids)} prompt tokens + {wanted} new ones (max_tokens) exceed the context of {room}")
        if max(ids) >= size:
            return Failure(f"the tokenizer gives the id {max(ids)}, outside the target's table of {size}")
        return ids

    def template(self, request: ChatRequest) -> ChatTemplate:
        """The chat template with what the request tells it."""
        return ChatTemplate(self.tokenizer, request.tools, request.variables)

    def answer(self, prompt: list[int], tokens: list[int], request: ChatRequest) -> Answer:
        """The text of an answer and its ids; reasoning stays in the text, where the answer itself opens it.

        Tool calls become structured where the chat template writes them as the target did, see `with_tool_calls`.
        """
        text = answer_text(tokens, self.tokenizer, self.target.eos_token_ids)
        has_ended = bool(tokens) and tokens[-1] in self.target.eos_token_ids
        reason, ids = "stop" if has_ended else "length", AnswerIds(prompt, tokens, self.fingerprint)
        if not self.tokenizer.chat_template:
            return Answer({"role": "assistant", "content": text}, reason, len(prompt), len(tokens), ids, is_plain=True)
        message = answer_message(text, self.markers)
        if has_ended and "reasoning_content" not in message:
            called = with_tool_calls(text, partial(self.rendered, request))
            message, reason = (message, reason) if called is None else (called, "tool_calls")
        elif has_ended and request.tools and any(json_calls(message["content"])):
            reason = "tool_calls"  # which stay in the text, as the template has no trace to prove them behind
        return Answer(message, reason, len(prompt), len(tokens), ids, self.template(request).recorded)

    def rendered(self, request: ChatRequest, answer: list[Message]) -> str:
        """The chat with an answer, as the chat template writes it; without one, up to where it begins."""
        return self.template(request).render_text([*request.messages, *answer], generation_prompt=not answer)
