"""Models inside of wrappers: found, saved and loaded by the names that they have by themselves."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from helpers.finetuned import layers
from mmengine.model import BaseTTAModel, ExponentialMovingAverage
from torch import nn
from torch.optim.swa_utils import AveragedModel

import mmgate
from mmgate.errors import ConfigError
from mmgate.wrappers import unwrap_model


class Augmented(BaseTTAModel):
    merge_preds = test_step = None


WRAPS = {
    'data parallel': nn.DataParallel,
    'average': AveragedModel,
    "mmengine's average": ExponentialMovingAverage,
    'compiled': torch.compile,
    'augmented': Augmented,
    'several': lambda model: nn.DataParallel(Augmented(torch.compile(model))),
    'sharded': lambda model: nn.ModuleDict(dict(_fsdp_wrapped_module=model)),
}


@pytest.mark.parametrize('wrap', WRAPS)
def test_the_model_in_its_wrappers(wrap: str, tmp_path: Path) -> None:
    model, file = layers(), tmp_path / 'g.safetensors'
    model.test_step = None
    wrapped = WRAPS[wrap](model)
    own = unwrap_model(wrapped)  # averages copy it
    assert type(own) is type(model) and own.state_dict().keys() == model.state_dict().keys()
    with pytest.raises(ConfigError, match='a sharded model') if wrap == 'sharded' else nullcontext():
        mmgate.save_gates(wrapped, file)
        assert set(mmgate.load_gates(layers(()), file)) == mmgate.gate_parameters(model).keys()
