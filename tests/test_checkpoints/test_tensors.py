"""What is read of a checkpoint: the tensors of the model that is meant, under their own names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmgate.checkpoints.tensors import tensors

ONE, OTHER = torch.ones(1), torch.zeros(1)
PLACES: dict[str, Any] = {
    'top': dict(w=ONE),
    'model': dict(model=dict(w=ONE), epoch=3),
    'averages_first': dict(model=dict(w=OTHER), state_dict=dict(w=OTHER), state_dict_ema=dict(w=ONE)),
    'mmengine_before_model': dict(model=dict(w=OTHER), state_dict=dict(w=ONE)),
    'of_processes': dict(state_dict={'module.w': ONE}),
    'of_a_detector': dict(state_dict={'module.backbone.w': ONE, 'module.neck.w': OTHER}),
}


@pytest.mark.parametrize('checkpoint', PLACES.values(), ids=PLACES)
def test_the_tensors_of_the_model_that_is_meant_are_read(checkpoint: dict[str, Any]) -> None:
    found: dict[str, Tensor] = tensors(checkpoint)
    assert list(found) == ['w'] and found['w'] is ONE


@pytest.mark.parametrize('prefix', ['ema.backbone.', 'ema.backbone', 'module.ema.backbone.'])
def test_a_prefix_names_what_is_read(prefix: str) -> None:
    checkpoint = dict(state_dict={'module.backbone.w': OTHER, 'module.ema.backbone.w': ONE})
    assert tensors(checkpoint, prefix) == {'w': ONE}
    with pytest.raises(ValueError, match=r"begins with prefix='neck\.': backbone\.w, ema\.backbone\.w"):
        tensors(checkpoint, 'neck.')


@pytest.mark.parametrize(
    'checkpoint', [dict(state_dict=3, epoch=1), dict(model=dict(w=3)), dict(epoch=1), [ONE]], ids=str
)
def test_a_checkpoint_without_tensors_is_refused(checkpoint: Any) -> None:
    keys = ', '.join(checkpoint) if isinstance(checkpoint, dict) else 'none'
    with pytest.raises(ValueError, match=f'no tensors under state_dict_ema, state_dict, model .* its keys are {keys}'):
        tensors(checkpoint)
