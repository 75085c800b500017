"""A hook, to be named in a config, with which a resumed run equals one that was never stopped."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.hooks.hook import DATA_BATCH
from mmengine.runner import IterBasedTrainLoop, Runner
from torch import Tensor

from mmgate.errors import ConfigError
from mmgate.registry import HOOKS


@HOOKS.register_module()
class ReproducibleHook(Hook):
    """Hook that seeds random numbers by seed, step and process, so that a resumed run equals an unbroken one.

    mmengine saves no state of the random generators, so that dropout and drop path differ after a resume. The hook
    seeds the generators at every step. A resumed run then ends with the same weights, bit for bit, on the same machine,
    if its loader does not keep its workers (``persistent_workers=False``), whose generators run on from epoch to epoch.
    In an IterBasedTrainLoop the workers read the trained batches once more, to draw the same numbers.

    Raises:
        ConfigError: The config has no ``randomness=dict(seed=...)``, the loader keeps its workers, or an
            IterBasedTrainLoop has no workers or does not read its data again.
    """

    priority = 'VERY_HIGH'

    def before_train(self, runner: Runner) -> None:
        """Check that the config has a seed, and a data loader that starts its workers anew in each epoch."""
        loop = runner.train_loop
        loader = runner.train_dataloader
        iterates = isinstance(loop, IterBasedTrainLoop)
        # Persistent workers have generators whose state a resumed run cannot know. Without workers data and model share
        # the generators.
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
        # mmengine after 0.10.7 skips batches in the sampler, so that the workers would not draw for them.
        if hasattr(batches, 'skip_iter'):

            def read(count: int) -> None:
                for _ in range(count):
                    next(batches)

            batches.skip_iter = read

    def before_train_epoch(self, runner: Runner) -> None:
        """Seed all random generators for the data loader of this epoch."""
        self._seed(runner, runner.epoch, 1)

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: DATA_BATCH = None) -> None:
        """Seed all random generators for the model in this step."""
        self._seed(runner, runner.iter, 0)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: DATA_BATCH = None, outputs: dict[str, Tensor] | None = None
    ) -> None:
        """Seed all random generators for the next batch, which a loader without workers draws in this process."""
        self._seed(runner, runner.iter, 2)

    @staticmethod
    def _seed(runner: Runner, step: int, kind: int) -> None:
        entropy = (int(runner.seed), int(step), kind, get_rank())
        seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
        for draw_from in (random.seed, np.random.seed, torch.manual_seed):
            draw_from(seed)
