"""Classes derived from mixins, in pickles and copies."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mmengine.registry import MODELS, init_default_scope
from torch import nn

from mmgate import gates_disabled, restore_attention, swap_attention
from mmgate.errors import ConfigError
from mmgate.mm.config_file import read_config
from mmgate.speed.derived import derived_class
from mmgate.speed.hooks import MatchOnceHook, keep_float32
from mmgate.speed.matching.head import MatchedOnceHead


class _Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class _Shifted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1 + super().forward(x)


@pytest.mark.parametrize('copied', [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_has_the_mixins_in_their_order(copied: object) -> None:
    layer = nn.Linear(3, 2)
    layer.__class__ = derived_class(_Shifted, derived_class(_Doubled, nn.Linear, ''), 'Shifted')
    found = copied(layer)  # type: ignore[operator]
    assert type(found) is type(layer) and type(found).__name__ == 'ShiftedLinear'
    x = torch.randn(4, 3)
    assert torch.equal(found(x), 1 + 2 * nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize('name', ['dino/dino-4scale_r50_8xb2-12e_coco.py'])
def test_a_model_that_matches_once_goes_into_a_pickle(name: str) -> None:
    cfg = read_config(f'mmdet::{name}')
    cfg.model.backbone.init_cfg = None
    init_default_scope('mmdet')
    model = MODELS.build(cfg.model)
    model.init_weights()
    MatchOnceHook().before_train(SimpleNamespace(model=model, logger=None))
    keep_float32(model.bbox_head.reg_branches[0])
    loaded = pickle.loads(pickle.dumps(model))
    classes = [[type(module) for module in one.modules()] for one in (model, loaded)]
    assert classes[0] == classes[1] and isinstance(loaded.bbox_head, MatchedOnceHead)
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), loaded.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize('copied', [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=['copy', 'pickle'])
def test_a_gate_goes_on_and_off_in_a_module_that_keeps_float32(copied: object) -> None:
    model: Any = nn.ModuleDict(dict(attn=nn.MultiheadAttention(16, 2)))
    swap_attention(model, dict(path='attn', type='PLuGMultiheadAttention', init='paper'))
    keep_float32(model['attn'])
    x = torch.randn(3, 1, 16)
    gated, found = model['attn'](x, x, x)[0], copied(model)  # type: ignore[operator]
    assert torch.equal(found['attn'](x, x, x)[0], gated)
    with gates_disabled(model):
        off = model['attn'](x, x, x)[0]
        with torch.autocast('cpu', torch.bfloat16):
            assert torch.equal(model['attn'](x, x, x)[0], off) and not torch.equal(off, gated)
    with pytest.raises(ConfigError, match='was derived from the gated one after gating'):
        restore_attention(model)


def test_what_is_compiled_stays_out_of_a_copy() -> None:
    layer = nn.Linear(3, 2)
    layer.__class__ = derived_class(_Doubled, nn.Linear, '')
    layer.compile(backend='eager')
    found = pickle.loads(pickle.dumps(layer))
    assert layer._compiled_call_impl is not None and copy.deepcopy(layer)._compiled_call_impl is None
    assert torch.equal(found(torch.ones(1, 3)), layer(torch.ones(1, 3)))
