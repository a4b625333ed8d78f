"""The list of a model's decoder layers, and the states that enter them."""

from typing import Any

from torch import Tensor, nn

LAYER_LISTS = ("layers", "h", "blocks")  # names of the list of decoder layers in Hugging Face models


def layer_list(module: Any) -> nn.ModuleList | None:
    """The decoder layers, in the order in which they run; None if there are none under a known name."""
    lists = (getattr(module, name, None) for name in LAYER_LISTS)
    return next((modules for modules in lists if isinstance(modules, nn.ModuleList)), None)


class Entering:
    """The residual streams that enter chosen layers, kept in each forward."""

    def __init__(self, layers: nn.ModuleList):
        self.layers = layers
        self.chosen: set[int] = set()
        self.states: dict[int, Tensor] = {}  # of the last forward

    def choose(self, indices: set[int]) -> None:
        """Keep the states of these layers too, from now on."""
        new = indices - self.chosen
        self.chosen |= indices
        for i in new:

            def keep(module: nn.Module, args: tuple, kwargs: dict, i: int = i) -> None:
                self.states[i] = args[0] if args else kwargs["hidden_states"]

            self.layers[i].register_forward_pre_hook(keep, with_kwargs=True)
