"""``mmgate.Gated`` in a config builds a host by its type, with gates in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mmdet.models import SwinTransformer
from mmengine.registry import MODELS, init_default_scope
from torch import nn

from mmgate import gate_parameters
from mmgate.errors import ConfigError

RULE = dict(type='PLuGMultiScaleDeformableAttention', path='encoder.layers.*.self_attn')


@pytest.fixture(autouse=True)
def _scope() -> Iterator[None]:
    init_default_scope('mmdet')
    yield
    init_default_scope('mmdet')


def test_a_gated_model_needs_its_host() -> None:
    with pytest.raises(ConfigError, match=r"mmgate.Gated needs host, .* such as host='mmdet.DeformableDETR'"):
        MODELS.build(dict(type='mmgate.Gated', attention=RULE))


@pytest.mark.parametrize('host', ['mmdet.DeformablDETR', 'DeformablDETR', 'mmdet.OwnSwin'])
def test_an_unknown_host_is_told_with_the_remedy(host: str) -> None:
    with pytest.raises(ConfigError, match='Give the name with its scope'):
        MODELS.build(dict(type='mmgate.Gated', host=host, attention=RULE))


@MODELS.register_module()
class OwnSwin(SwinTransformer):
    """A host that mmengine's own registry knows."""


@pytest.mark.parametrize('host', ['mmdet.SwinTransformer', 'SwinTransformer', SwinTransformer, 'OwnSwin', OwnSwin])
@pytest.mark.parametrize('scope', [{}, dict(_scope_='mmdet')], ids=['default scope', 'scope of its own'])
def test_a_host_is_named_as_a_type(host: str | type[nn.Module], scope: dict[str, str]) -> None:
    init_default_scope('mmengine' if scope else 'mmdet')
    rule = dict(type='mmgate.PLuGMultiheadAttention', path='**')
    sizes = dict(embed_dims=8, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1), **scope)
    model = MODELS.build(dict(type='mmgate.Gated', host=host, attention=rule, **sizes))
    assert type(model) is type(MODELS.build(dict(type=host, **sizes))) and gate_parameters(model)
