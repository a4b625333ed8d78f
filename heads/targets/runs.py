"""The layers of a decoder in the order in which they run, some several times, and the states that enter them."""

from typing import Any

import torch
from torch import Tensor, nn

LAYER_LISTS = ("layers", "h", "blocks")  # names of the list of decoder layers in Hugging Face models


def found_layers(base: Any) -> tuple[nn.ModuleList | None, bool]:
    """The layers as they run in one forward, and whether some run several times, in stacks (as HRM's); None if there
    are none."""
    if (layers := layer_list(base)) is not None:
        return layers, False
    stacks = [stack for part in base.children() if (stack := layer_list(part)) is not None]
    if not stacks:
        return None, False
    ran: list[nn.Module] = []
    handles = [
        layer.register_forward_pre_hook(lambda layer, _: ran.append(layer)) for stack in stacks for layer in stack
    ]
    try:
        with torch.no_grad():
            weight = base.get_input_embeddings().weight
            token, mask = weight.new_zeros(1, 1, dtype=torch.long), weight.new_zeros(1, 1, 1, 1)
            base(input_ids=token, attention_mask=mask, use_cache=False)  # the mask, as none can be made without weights
    finally:
        for handle in handles:
            handle.remove()
    return nn.ModuleList(ran), True


def layer_list(module: Any) -> nn.ModuleList | None:
    lists = (getattr(module, name, None) for name in LAYER_LISTS)
    return next((modules for modules in lists if isinstance(modules, nn.ModuleList)), None)


class Entering:
    """The residual streams that enter chosen layers, kept in each forward.

    Where layers run several times, the state that leaves a run is the one before the next, as in HF `hidden_states`:
    between two stacks the model adds to it.
    """

    def __init__(self, base: nn.Module, layers: nn.ModuleList, is_repeated: bool):
        self.layers = layers
        self.chosen: set[int] = set()
        self.states: dict[int, Tensor] = {}  # of the last forward
        self.num_runs = 0  # so far, in a forward through repeated layers
        self.is_repeated = is_repeated
        if is_repeated:
            base.register_forward_pre_hook(self._start)
            for layer in set(layers):
                layer.register_forward_hook(self._count, with_kwargs=True)

    def choose(self, indices: set[int]) -> None:
        """Keep the states of these layers too, from now on."""
        new = set() if self.is_repeated else indices - self.chosen
        self.chosen |= indices
        for i in new:

            def keep(module: nn.Module, args: tuple, kwargs: dict, i: int = i) -> None:
                self.states[i] = args[0] if args else kwargs["hidden_states"]

            self.layers[i].register_forward_pre_hook(keep, with_kwargs=True)

    def _start(self, *_: Any) -> None:
        self.num_runs = 0

    def _count(self, layer: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if self.num_runs == 0:
            self._keep(args[0] if args else kwargs["hidden_states"])
        self.num_runs += 1
        self._keep(output[0] if isinstance(output, tuple) else output)

    def _keep(self, states: Tensor) -> None:
        if self.num_runs in self.chosen:
            self.states[self.num_runs] = states
