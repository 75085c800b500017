"""Memory of a computation, counted from its operators."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class Memory(TorchDispatchMode):
    """Sums the bytes of the tensors that operators make, as long as they live; ``peak`` is the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.live = {key: one for key, one in self.live.items() if not one[0].expired()}
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result
