"""Train small models side by side on one GPU: a step of each is one CUDA graph, on a stream of the model's."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

CHUNK = 100  # steps that are queued at once


class Training:
    """Training of one model by AdamW with data on its device; on a GPU a step is replayed as a graph.

    Args:
        model: The model, on its device and in training mode.
        losses: Function that gives the loss of each example of a batch ``(B,)`` from their numbers ``(B,)``.
        batches: Numbers of the examples of each step, ``(steps, B)``; below 0 where a batch is shorter.
        rates: Learning rate of each step.
        groups: Parameter groups of AdamW.
        bfloat16: Compute in bfloat16, by autocast.
        compiled: Modules to compile on a GPU. Where that fails they run as they are, with a warning.
        clip: Largest norm of the gradient; None for any.
        **options: Options of AdamW.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Callable[[Tensor], Tensor],
        batches: Tensor,
        rates: Sequence[float],
        groups: list[dict[str, Any]],
        *,
        bfloat16: bool,
        compiled: Iterable[nn.Module] = (),
        clip: float | None = None,
        **options: Any,
    ) -> None:
        self.model, self.losses, self.bfloat16, self.clip = model, losses, bfloat16, clip
        self.parameters = list(model.parameters())
        self.device = self.parameters[0].device
        self.batches = batches.to(self.device)
        self.rates = torch.tensor(rates, device=self.device)
        self.number = torch.zeros(1, dtype=torch.long, device=self.device)
        self.rate = self.rates[0].clone()
        for group in groups:
            group['lr'] = self.rate
        on_gpu = self.device.type == 'cuda'
        self.optimizer = torch.optim.AdamW(groups, **options, fused=True, capturable=on_gpu)
        self.steps, self.done = len(batches), 0
        self.graph: torch.cuda.CUDAGraph | None = None
        start = [parameter.detach().clone() for parameter in self.parameters]
        if on_gpu:
            self.stream = torch.cuda.Stream()
            self.queued: torch.cuda.Event | None = None
            self._capture(list(compiled))
        else:
            self._step()  # the optimizer's state is there after a step
        self.load(start + [torch.zeros_like(tensor) for tensor in self._tensors()[len(start) :]])

    def _capture(self, compiled: list[nn.Module]) -> None:
        for module in compiled:
            module.compile(dynamic=False)
        try:
            # a number that differs from layer to layer, such as the differential transformer's, has its own code
            with torch._dynamo.config.patch(recompile_limit=64):
                self._warm_up()
        except Exception as error:  # whatever a compiler raises
            warnings.warn(f'{type(error).__name__}: {str(error)[:300]}; goes on without compilation', stacklevel=2)
            for module in compiled:
                module._compiled_call_impl = None
            self._warm_up()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode='thread_local'):
            self._step()
        for module in compiled:  # to compile once more for a test does not pay
            module._compiled_call_impl = None

    def _warm_up(self) -> None:
        self.optimizer.zero_grad()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                self._step()
        torch.cuda.synchronize()

    def _step(self) -> None:
        """Train with the batch and the rate of the step that a counter on the device has; nothing waits for the GPU."""
        number = self.number % self.steps  # a warm-up may be longer than the training
        rows = self.batches.index_select(0, number)[0]
        there = rows >= 0
        self.rate.copy_(self.rates.index_select(0, number)[0])
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16):
            losses = self.losses(rows.clamp(min=0))
        ((losses.float() * there).sum() / there.sum()).backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += 1

    def _tensors(self) -> list[Tensor]:
        """Return what a step changes."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.parameters, *states, self.number]

    def state(self) -> list[Tensor]:
        """Return what :meth:`load` goes on from, on the CPU."""
        self.wait()
        return [tensor.detach().clone().cpu() for tensor in self._tensors()]

    @torch.no_grad()
    def load(self, state: Sequence[Tensor]) -> None:
        """Go on from the state of an equal training, that of another process, too."""
        self.wait()
        for tensor, value in zip(self._tensors(), state, strict=True):
            tensor.copy_(value)
        self.done = int(self.number)
        self.wait()

    def advance(self, most: int = CHUNK) -> bool:
        """Queue some steps, wait for those queued before, and return True if none is left."""
        count = min(most, self.steps - self.done)
        self.done += count
        if self.graph is None:
            for _ in range(count):
                self._step()
            return self.done == self.steps
        with torch.cuda.stream(self.stream):
            for _ in range(count):
                self.graph.replay()
            before, self.queued = self.queued, torch.cuda.Event()
            self.queued.record()
        if before is not None:
            before.synchronize()
        if self.done == self.steps:
            self.stream.synchronize()
        return self.done == self.steps

    def wait(self) -> None:
        """Wait until all queued steps are done."""
        if self.device.type == 'cuda':
            torch.cuda.synchronize()


def train_side_by_side(trainings: Iterable[Training], until: float | None = None) -> Iterator[Training]:
    """Train all; yield each when it is done. At the time ``until`` (as of ``time.time``) the rest stays as it is."""
    active = list(trainings)
    while active and (until is None or time.time() < until):
        for training in tuple(active):
            if training.advance():
                active.remove(training)
                yield training


def batches_of(count: int, batch: int, epochs: int, seed: int) -> Tensor:
    """Return the numbers of all examples, reordered in each epoch, ``(steps, batch)``, and -1 where none is left."""
    draw = torch.Generator().manual_seed(seed)
    steps = -(-count // batch)
    rows = torch.full((epochs, steps * batch), -1)
    for row in rows:
        row[:count] = torch.randperm(count, generator=draw)
    return rows.view(-1, batch)


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Iterable[Tensor], labels: Tensor) -> float:
    """Return the share, in percent, of examples whose class ``(N,)`` is found, from batches of inputs."""
    model.eval()
    found = torch.cat([model(x).argmax(-1).cpu() for x in inputs])
    return 100 * (found == labels).double().mean().item()
