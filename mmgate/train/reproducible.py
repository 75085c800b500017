"""Opt-in hooks for runs that must go on exactly where they were, and stop where they break."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.runner import IterBasedTrainLoop
from torch import Tensor, nn

from mmgate.errors import ConfigError
from mmgate.paths import own_model
from mmgate.registry import HOOKS


@HOOKS.register_module()
class ReproducibleHook(Hook):
    """Makes a resumed run equal to one that was never stopped: random numbers follow from seed, step and process.

    mmengine saves no state of the random generators, so that dropout and drop path go on differently after a resume.
    The hook seeds them at every step. A resumed run then ends with the same weights, bit for bit, on the same machine,
    if its loader does not keep its workers (``persistent_workers=False``): kept ones draw on from epoch to epoch. In a
    loop of iterations the workers read what was trained once more, to draw what they drew.

    Raises:
        ConfigError: The config has no ``randomness=dict(seed=...)``, the loader keeps its workers, or a loop of
            iterations has none or does not go through its data again.
    """

    priority = 'VERY_HIGH'

    def before_train(self, runner: Any) -> None:
        """Check that there is a seed and a loader that starts anew."""
        if runner._randomness_cfg.get('seed') is None:
            raise ConfigError('mmgate.ReproducibleHook needs a seed: --cfg-options randomness.seed=0.')
        if getattr(runner.train_dataloader, 'persistent_workers', False):
            raise ConfigError(
                'mmgate.ReproducibleHook: workers that are kept go on with their random numbers from epoch to epoch, '
                'which a resumed run cannot know: --cfg-options train_dataloader.persistent_workers=False.'
            )
        loop = runner.train_loop
        if not isinstance(loop, IterBasedTrainLoop):
            return
        if not runner.train_dataloader.num_workers:
            raise ConfigError(
                'mmgate.ReproducibleHook: in a loop of iterations the data must come from workers, or its random '
                "numbers mix with the model's: --cfg-options train_dataloader.num_workers=1."
            )
        if getattr(loop, 'fast_forward_on_resume', False):
            raise ConfigError(
                'mmgate.ReproducibleHook: the data must go on where it was: --cfg-options '
                'train_cfg.fast_forward_on_resume=False.'
            )
        batches = loop.dataloader_iterator
        if hasattr(batches, 'skip_iter'):  # newer than 0.10.7, it leaves out in the sampler what workers drew for

            def read(count: int) -> None:
                for _ in range(count):
                    next(batches)

            batches.skip_iter = read

    def before_train_epoch(self, runner: Any) -> None:
        """Seed what the loader draws from."""
        self._seed(runner, runner.epoch, 1)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Seed what the model draws from."""
        self._seed(runner, runner.iter, 0)

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Seed what a loader without workers draws the next batch from."""
        self._seed(runner, runner.iter, 2)

    def after_left_out(self, runner: Any) -> None:
        """Seed as after the last batch that an interrupted run has trained."""
        self._seed(runner, runner.iter - 1, 2)

    @staticmethod
    def _seed(runner: Any, step: int, kind: int) -> None:
        entropy = (int(runner.seed), int(step), kind, get_rank())
        seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)


@HOOKS.register_module()
class FiniteHook(Hook):
    """Stops a run at the first loss that is not finite, and names the step and the first layer that was not.

    Every layer's output is looked at on the device, and the answers are read once a step.

    Raises:
        ConfigError: A loss is NaN or infinite (from :meth:`after_train_iter`).
    """

    def __init__(self) -> None:
        self._finite: list[tuple[str, Tensor]] | None = None  # outside of steps nothing is noted
        self._handles: list[Any] = []

    def before_train(self, runner: Any) -> None:
        """Watch every module that has no children."""
        for name, module in own_model(runner.model).named_modules():
            if not any(module.children()):
                self._handles.append(module.register_forward_hook(self._watch(name)))

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Forget the step before."""
        self._finite = []

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Look at the losses."""
        seen, self._finite = self._finite or [], None
        bad = [name for name, value in (outputs or {}).items() if not all(t.isfinite().all() for t in _tensors(value))]
        if not bad:
            return
        first = next((name for name, finite in seen if not finite), None)
        where = f'the first layer whose output was not finite is {first}' if first else 'every layer was finite'
        raise ConfigError(
            f'{", ".join(bad)} is not finite at iteration {runner.iter + 1}; {where}. The last checkpoint is '
            'from before. A smaller learning rate, gradient clipping or float32 are what helps most often.'
        )

    def after_train(self, runner: Any) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _watch(self, name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._finite is not None:
                self._finite += [(name, tensor.detach().isfinite().all()) for tensor in _tensors(output)]

        return look


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
