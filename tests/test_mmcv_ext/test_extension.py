"""The module in the place of ``mmcv._ext``: mmcv's names and arguments, and deformable attention by our operator."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from conftest import assert_same, values_and_gradients
from helpers.compiled_mmcv import compiled
from helpers.samplings import make

from mmgate.mmcv_ext import extension


@pytest.mark.parametrize('name', extension.__all__)
def test_arguments_are_those_of_the_compiled_function(name: str) -> None:
    signature = getattr(compiled(), name).__doc__.splitlines()[0].partition('->')[0]
    assert list(inspect.signature(getattr(extension, name)).parameters) == re.findall(r'(\w+): ', signature)


def test_every_function_of_the_compiled_module_is_there_or_raises_by_name() -> None:
    for name in dir(compiled()):
        if not name.startswith('_') and name not in extension.__all__:
            with pytest.raises(NotImplementedError, match=f'^{name}: mmcv was installed without'):
                extension.not_compiled(name)()
    with pytest.raises(AttributeError):
        extension.not_compiled('__path__')


CASES: dict[str, dict[str, int]] = {'usual': {}, 'no_queries': dict(queries=0), 'no_images': dict(batch=0)}


@pytest.mark.parametrize('case', CASES)
def test_deformable_attention_with_any_weights(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """By mmcv's function for GPUs, against its sum in Python; no softmax is assumed of the weights."""
    mmcv = pytest.importorskip('mmcv.ops.multi_scale_deform_attn')
    monkeypatch.setattr(mmcv, 'ext_module', extension)
    value, shapes, starts, locations, weights, *_ = make(dtype=torch.float64, **CASES[case])
    found, expected = (
        values_and_gradients(function, [value, locations, weights], range(3))
        for function in (
            lambda v, x, w: mmcv.MultiScaleDeformableAttnFunction.apply(v, shapes, starts, x, w, 64),
            lambda v, x, w: mmcv.multi_scale_deformable_attn_pytorch(v, shapes, x, w),
        )
    )
    assert_same(found, expected, rtol=1e-8, atol=1e-10)
