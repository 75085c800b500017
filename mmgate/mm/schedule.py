"""timm's cosine learning-rate schedule, with which the papers' classifiers were trained."""

from __future__ import annotations

import math

from mmengine.optim import CosineAnnealingLR

from mmgate.registry import PARAM_SCHEDULERS


@PARAM_SCHEDULERS.register_module()
class CosineLR(CosineAnnealingLR):
    """Cosine learning-rate schedule that counts from the start of the training, warm-up included, as timm's does.

    From ``begin`` on, the rate at step t of the training is ``eta_min + (lr - eta_min) (1 + cos(pi t / end)) / 2``.
    mmengine's ``CosineAnnealingLR`` counts t from ``begin``, so that after a warm-up it starts at the full learning
    rate.

    Arguments are those of ``CosineAnnealingLR``; ``convert_to_iter_based=True`` in a config counts iterations.

    Source: timm's ``CosineLRScheduler`` with its defaults, as Agent attention's and DeiT's public code call it.
    """

    def _get_value(self) -> list[float]:
        last = self.begin + self.T_max
        share = (1 + math.cos(math.pi * min(self._global_step, last) / last)) / 2
        values = []
        for full in self.base_values:
            least = self.eta_min if self.eta_min_ratio is None else full * self.eta_min_ratio
            values.append(least + (full - least) * share)
        return values
