"""What stands for mmcv's classes where there is no mmcv computes what they do."""

from __future__ import annotations

import pytest
import torch

from mmgate._environment import available
from mmgate.gates.base.without_mmcv import DeformableProjections, DropPath
from mmgate.gates.base.without_mmcv import MultiheadAttention as OURS

pytestmark = pytest.mark.skipif(not available('mmcv'), reason='compares with mmcv')


def test_deformable_has_the_parameters_and_their_start() -> None:
    from mmcv.ops import MultiScaleDeformableAttention

    torch.manual_seed(0)
    theirs = MultiScaleDeformableAttention(24, 6, 2, 3, value_proj_ratio=0.5, batch_first=True).state_dict()
    torch.manual_seed(0)
    ours = DeformableProjections(24, 6, 2, 3, value_proj_ratio=0.5, batch_first=True).state_dict()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, msg=name)


@pytest.mark.parametrize('batch_first', [True, False])
@pytest.mark.parametrize('names', [(), ('query_pos',), ('query_pos', 'key_pos')], ids=str)
@pytest.mark.parametrize('queries', [5, 3])
def test_multihead_computes_the_same(batch_first: bool, names: tuple[str, ...], queries: int) -> None:
    """Keys take the queries' positions where these have their shape."""
    from mmcv.cnn.bricks.transformer import MultiheadAttention

    ours, theirs = (kind(16, 4, batch_first=batch_first).eval() for kind in (OURS, MultiheadAttention))
    theirs.load_state_dict(ours.state_dict())
    query = torch.randn((5, queries, 16) if batch_first else (queries, 5, 16))
    key = torch.randn(5, 5, 16)
    given = {name: torch.randn_like(query if name == 'query_pos' else key) for name in names}
    torch.testing.assert_close(ours(query, key, **given), theirs(query, key, **given))


def test_drop_path_drops_whole_samples_and_keeps_the_mean() -> None:
    x = torch.ones(4000, 3, 2)
    y = DropPath(0.25)(x)
    samples = y.flatten(1)
    assert ((samples == 0).all(1) | (samples == 4 / 3).all(1)).all()
    assert abs(y.mean() - 1) < 0.05 and torch.equal(DropPath(0.25).eval()(x), x)
