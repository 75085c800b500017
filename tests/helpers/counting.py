"""Operators of a training step that would start a kernel on a GPU, counted on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from mmgate.benchmarks import training


class Counts(training.Operators):
    """Counts operators, but none of calls that :meth:`without` wraps."""

    paused = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.count
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if Counts.paused:
            self.count = before
        return result

    @staticmethod
    def without(call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose operators are not counted, forward and backward, as if they were one kernel."""

        def run(*args: Any, **kwargs: Any) -> Any:
            leaves, form = tree_flatten((args, kwargs))
            places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            forms = []

            def of_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
                for index, tensor in zip(places, tensors, strict=True):
                    leaves[index] = tensor
                given, options = tree_unflatten(leaves, form)
                results, result_form = tree_flatten(call(*given, **options))
                forms.append(result_form)
                return tuple(results)

            learns = torch.zeros((), requires_grad=torch.is_grad_enabled())
            results = _Uncounted.apply(of_tensors, learns, *(leaves[index] for index in places))
            return tree_unflatten(list(results), forms[0])

        return run


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


class _Uncounted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Callable[..., tuple[Tensor, ...]], learns: Tensor, *tensors: Tensor) -> Any:
        with _paused(), torch.set_grad_enabled(learns.requires_grad):
            ctx.given = [x.detach().requires_grad_() if x.requires_grad else x for x in tensors]
            ctx.results = call(*ctx.given)
            return tuple(x.detach() for x in ctx.results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with _paused():
            pairs = [pair for pair in zip(ctx.results, grads, strict=True) if pair[0].requires_grad]
            torch.autograd.backward(*zip(*pairs, strict=True))
        return None, None, *(x.grad if x.requires_grad else None for x in ctx.given)


@contextmanager
def _paused() -> Iterator[None]:
    Counts.paused += 1
    try:
        yield
    finally:
        Counts.paused -= 1
