"""The table of what engines know of the families of heads; a family that is not in it is loaded by no engine. A folder
is of the first family here that recognises it."""

from ..layouts.serving import Serving
from .assistant import AssistantServing
from .block import BlockServing
from .draft_lm import DraftLMServing
from .eagle import EagleServing
from .eagle3 import Eagle3Serving
from .medusa import MedusaServing
from .mtp import MtpServing

SERVINGS: dict[str, Serving] = {
    "assistant": AssistantServing(),
    "block": BlockServing(),
    "medusa": MedusaServing(),
    "eagle3": Eagle3Serving(),
    "eagle": EagleServing(),
    "mtp": MtpServing(),
    "draft_lm": DraftLMServing(),  # any causal language model
}
