"""The table of what engines know of the families of heads; a family that is not in it is loaded by no engine."""

from ..layouts.serving import Serving
from .block import BlockServing
from .draft_lm import DraftLMServing
from .eagle import EagleServing
from .eagle3 import Eagle3Serving
from .medusa import MedusaServing
from .mtp import MtpServing

SERVINGS: dict[str, Serving] = {
    "medusa": MedusaServing(),
    "eagle": EagleServing(),
    "eagle3": Eagle3Serving(),
    "mtp": MtpServing(),
    "draft_lm": DraftLMServing(),
    "block": BlockServing(),
}
