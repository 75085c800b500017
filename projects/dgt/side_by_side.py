"""Train small models side by side on one GPU: a step of each is one CUDA graph, on a stream of the model's."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

CHUNK = 100  # steps that are queued at once


class Training:
    """Training of one model with data that lie on its device; bfloat16 on a GPU, where a step is replayed as a graph.

    Args:
        model: The model, on its device and in training mode.
        losses: Function that gives the loss of each example of a batch ``(B,)`` from their numbers ``(B,)``.
        batches: Numbers of the examples of each step, ``(steps, B)``; below 0 where a batch is shorter.
        rates: Learning rate of each step.
        groups: Parameter groups of AdamW.
        compiled: Modules to compile. Where that fails they run as they are, with a warning.
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
        compiled: Sequence[nn.Module] = (),
        clip: float | None = None,
        **options: Any,
    ) -> None:
        self.model, self.losses, self.clip = model, losses, clip
        self.parameters = list(model.parameters())
        device = self.parameters[0].device
        self.on_gpu = device.type == 'cuda'
        self.batches = batches.to(device)
        self.rates = torch.tensor(rates, device=device)
        self.number = torch.zeros(1, dtype=torch.long, device=device)
        self.rate = self.rates[:1].clone().squeeze()
        for group in groups:
            group['lr'] = self.rate
        self.optimizer = torch.optim.AdamW(groups, **options, fused=True, capturable=self.on_gpu)
        self.steps, self.done = len(batches), 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.start = [parameter.detach().clone() for parameter in self.parameters]
        if self.on_gpu:
            self.stream = torch.cuda.Stream()
            self.queued: torch.cuda.Event | None = None
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
            self.graph = self._captured()
            self.restart()

    def _warm_up(self) -> None:
        self.optimizer.zero_grad()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                self._step()
        torch.cuda.synchronize()

    def _captured(self) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode='thread_local'):
            self._step()
        return graph

    def _step(self) -> None:
        """Train with the batch and the rate of the step that a counter on the device has; nothing waits for the GPU."""
        rows = self.batches.index_select(0, self.number)[0]
        there = rows >= 0
        self.rate.copy_(self.rates.index_select(0, self.number)[0])
        with torch.autocast('cuda', torch.bfloat16, enabled=self.on_gpu):
            losses = self.losses(rows.clamp(min=0))
        ((losses.float() * there).sum() / there.sum()).backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += 1

    @torch.no_grad()
    def restart(self, rates: Sequence[float] | None = None) -> None:
        """Go back to the start, with as many steps as there are ``rates``, at most as many as before."""
        if self.on_gpu:
            torch.cuda.synchronize()
        for parameter, start in zip(self.parameters, self.start, strict=True):
            parameter.copy_(start)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        self.number.zero_()
        self.done = 0
        if rates is not None:
            self.steps = len(rates)
            self.rates[: self.steps] = torch.tensor(rates, device=self.rates.device)
        if self.on_gpu:
            torch.cuda.synchronize()

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
            self.wait()
        return self.done == self.steps

    def wait(self) -> None:
        """Wait until all queued steps are done."""
        if self.on_gpu:
            self.stream.synchronize()


def train_side_by_side(trainings: Sequence[Training], until: float | None = None) -> Iterator[Training]:
    """Train all; yield each when it is done. At the time ``until`` (as of ``time.time``) the rest is given up."""
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
