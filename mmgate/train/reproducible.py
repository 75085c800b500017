"""An opt-in hook for runs that go on exactly where they were."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.runner import IterBasedTrainLoop

from mmgate.errors import ConfigError
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
        loop, loader = runner.train_loop, runner.train_dataloader
        iterates = isinstance(loop, IterBasedTrainLoop)
        # kept workers go on with random numbers that a resumed run cannot know; without any, data and model share them
        wanted = {
            'randomness.seed=0': runner._randomness_cfg.get('seed') is not None,
            'train_dataloader.persistent_workers=False': not getattr(loader, 'persistent_workers', False),
            'train_dataloader.num_workers=1': not iterates or loader.num_workers,
            'train_cfg.fast_forward_on_resume=False': not getattr(loop, 'fast_forward_on_resume', False),
        }
        lacking = [option for option, holds in wanted.items() if not holds]
        if lacking:
            raise ConfigError(f'mmgate.ReproducibleHook needs --cfg-options {" ".join(lacking)}.')
        batches: Any = loop.dataloader_iterator if iterates else None
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
        for draw_from in (random.seed, np.random.seed, torch.manual_seed):
            draw_from(seed)
