"""The cosine of timm, with which the authors of the papers' classifiers train."""

from __future__ import annotations

import math

from mmengine.optim import CosineAnnealingLR

from mmgate.registry import PARAM_SCHEDULERS


@PARAM_SCHEDULERS.register_module()
class CosineLR(CosineAnnealingLR):
    """A cosine over the whole training, the beginning of which a warm-up takes.

    At step t of the training, from ``begin`` on, the rate is ``eta_min + (lr - eta_min) (1 + cos(pi t / end)) / 2``.
    mmengine's ``CosineAnnealingLR`` counts t from ``begin``: after a warm-up it starts anew, at the full rate.

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
