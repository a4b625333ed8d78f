"""How many bytes of tensors are alive while code runs: every storage from its making to its end, real or fake.

Real tensors are counted as they are; under torch's FakeTensorMode the same code is counted at sizes that no machine at
hand could hold. What kernels take for themselves while they run is not seen.
"""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Counts within its context. now, peak: bytes; storages that were there before count once `count` is told."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def count(self, *tensors: Tensor) -> None:
        """Take in the storages of tensors, each once."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._known:
                self._known.add(key)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._end, key, size).atexit = False

    def _end(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count(*(one for one in tree_iter(out) if isinstance(one, Tensor)))
        return out
