"""Recording reads what the layers compute, changes nothing and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmcv.ops import MultiScaleDeformableAttention
from mmdet.models.backbones import PyramidVisionTransformer, SwinTransformer
from torch import Tensor, nn

import mmgate
from mmgate.analysis.probes.recording import readable, record, require
from mmgate.analysis.probes.statistics import Kept, RunningStatistics
from mmgate.errors import ConfigError

SWIN: dict[str, Any] = dict(
    embed_dims=16, depths=(2, 1), num_heads=(2, 4), out_indices=(0, 1), strides=(4, 2), window_size=4
)
PVT: dict[str, Any] = dict(num_stages=2, embed_dims=8)
PVT.update(num_layers=(1, 1), num_heads=(1, 2), patch_sizes=(4, 2), strides=(4, 2), paddings=(0, 0))
PVT.update(sr_ratios=(4, 2), out_indices=(0, 1), mlp_ratios=(2, 2), use_abs_pos_embed=False)
DENSE = ('PLuGMultiheadAttention', 'SDPAGatedMultiheadAttention', 'DifferentialGatedMultiheadAttention')


def backbone(kind: type[nn.Module], sizes: dict[str, Any], gate: str | None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = kind(**sizes)
    model.init_weights()
    if gate:
        mmgate.swap_attention(model, dict(path='**', type=gate, **options))
    return model


def deformable(gated: bool) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.ModuleDict(dict(a=MultiScaleDeformableAttention(16, 2, 2, 3, batch_first=True, dropout=0.1)))
    model.forward = lambda **given: model['a'](**given)  # type: ignore[method-assign]
    if gated:
        mmgate.swap_attention(model, dict(path='a', type='PLuGMultiScaleDeformableAttention', init='paper'))
    nn.init.normal_(model['a'].sampling_offsets.weight)
    nn.init.normal_(model['a'].attention_weights.weight)
    shapes = torch.tensor([[4, 6], [2, 3]])
    given = dict(query=torch.randn(2, 5, 16), value=torch.randn(2, 30, 16), query_pos=torch.randn(2, 5, 16))
    given.update(reference_points=torch.rand(2, 5, 2, 2), spatial_shapes=shapes)
    return model, {**given, 'level_start_index': torch.tensor([0, 24])}


def image_model(kind: type[nn.Module], sizes: dict[str, Any], gate: str | None = None, **options: Any) -> Any:
    return lambda: (backbone(kind, sizes, gate, **options), dict(x=torch.randn(2, 3, 36, 44)))


PVT1 = {**PVT, 'sr_ratios': (1, 1)}
MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, dict[str, Any]]], set[str]]] = {
    'deformable': (lambda: deformable(False), {'locations', 'weights', 'reference_points', 'spatial_shapes'}),
    'deformable-plug': (lambda: deformable(True), {'gate', 'locations', 'weights'}),
    'swin': (image_model(SwinTransformer, SWIN), {'attention', 'geometry'}),
    'pvt': (image_model(PyramidVisionTransformer, PVT), {'attention', 'geometry'}),
    **{f'swin-{g}': (image_model(SwinTransformer, SWIN, g), {'gate', 'attention'}) for g in DENSE},
    **{f'pvt-{g}': (image_model(PyramidVisionTransformer, PVT, g), {'gate', 'attention'}) for g in DENSE},
    'pvt-agent': (
        image_model(PyramidVisionTransformer, PVT1, 'AgentAttention', map_size=(9, 11), agent_num=4),
        {'agents', 'attention'},
    ),
    'pvt-saga': (
        image_model(PyramidVisionTransformer, PVT1, 'SAGAAttention', map_size=(9, 11)),
        {'gate_k', 'gate_v', 'gate_out', 'kv'},
    ),
}


def flat(output: Any) -> Tensor:
    return torch.cat([x.flatten() for x in (output if isinstance(output, (tuple, list)) else [output])])


@pytest.mark.parametrize('training', [False, True], ids=['eval', 'train'])
@pytest.mark.parametrize('case', MODELS)
def test_changes_nothing(case: str, training: bool) -> None:
    """Output, gradients and what random numbers are left are the same bits; every reading arrives; no hook stays."""
    make, names = MODELS[case]
    found = []
    for records in (False, True):
        model, given = make()
        model.train(training)
        torch.manual_seed(1)
        if records:
            assert names <= set(readable(model))
            with record(model, [*readable(model), 'activation']) as recording:
                output = flat(model(**given))
            assert {name for readings in recording.values() for name in readings} >= {*names, 'activation'}
        else:
            output = flat(model(**given))
        output.square().sum().backward()
        grads = flat([p.grad for p in model.parameters() if p.grad is not None])
        found.append((output, grads, torch.rand(3)))
        assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize('case', [case for case, (_, names) in MODELS.items() if 'attention' in names])
def test_attention_is_what_the_layer_uses(case: str) -> None:
    """Rows sum to 1, masked or not, windows or whole maps."""
    model, given = MODELS[case][0]()
    model.eval()  # mmdet's Swin returns None here
    with record(model, ['attention']) as recording:
        model(**given)
    for readings in recording.values():
        for weights in readings['attention'].tensors:
            assert weights.dim() == 4
            if 'Differential' not in case:
                torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


def test_window_weights_give_the_output() -> None:
    model, given = MODELS['swin'][0]()
    path = 'stages.0.blocks.1.attn.w_msa'  # shifted, so masked
    calls: list[tuple[Tensor, Tensor]] = []
    module = model.get_submodule(path)
    nn.init.normal_(module.relative_position_bias_table)
    module.register_forward_hook(lambda m, args, out: calls.append((args[0], out)))
    model.eval()
    with record(model, ['attention'], paths=lambda p: p == path) as recording, torch.no_grad():
        model(**given)
    (x, out), weights = calls[0], recording[path]['attention'].tensors[0]
    value = module.qkv(x).unflatten(-1, (3, module.num_heads, -1))[:, :, 2].transpose(1, 2)
    torch.testing.assert_close(module.proj((weights @ value).transpose(1, 2).flatten(2)), out)


@pytest.mark.parametrize('batch_first', [False, True], ids=['sequence-first', 'batch-first'])
def test_masked_weights_of_mmcvs_attention(batch_first: bool) -> None:
    model = nn.Sequential(MultiheadAttention(8, 2, batch_first=batch_first)).eval()
    x = torch.randn(2, 5, 8) if batch_first else torch.randn(5, 2, 8)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[1, 3:] = True
    with record(model, ['attention']) as recording:
        model[0](x, key_padding_mask=mask)
    weights = recording['0.attn']['attention'].tensors[0]
    assert weights.shape == (2, 2, 5, 5) and not weights[1, ..., 3:].any()


def test_zero_offsets_lie_on_the_reference_points() -> None:
    model, given = deformable(False)
    nn.init.zeros_(model['a'].sampling_offsets.weight)
    nn.init.zeros_(model['a'].sampling_offsets.bias)
    with record(model, ['locations']) as recording:
        model(**given)
    locations = recording['a']['locations'].tensors[0]
    torch.testing.assert_close(locations, given['reference_points'][:, :, None, :, None].expand_as(locations))


def test_refusal_names_what_there_is() -> None:
    with pytest.raises(
        ConfigError, match=r'agent maps needs a model with agent tokens; ModuleDict has.*sampling points \(1'
    ):
        require(deformable(False)[0], ['agents'], 'A picture of agent maps')
    with pytest.raises(ValueError, match='speed cannot be recorded; there are gate, '):
        record(nn.Linear(1, 1), ['speed']).__enter__()


def test_running_statistics_are_numpys() -> None:
    """Over parts of any sizes, with values outside of the histogram and infinite ones."""
    rng = np.random.default_rng(0)
    parts = [rng.normal(0.3, 0.5, size) for size in (1, 100, 7)]
    numbers = np.concatenate(parts)
    statistics = RunningStatistics()
    for part in parts:
        statistics.add(torch.tensor(part))
    statistics.add(torch.tensor([float('nan'), float('inf')]))
    assert statistics.count == 108
    assert statistics.mean == pytest.approx(numbers.mean()) and statistics.deviation == pytest.approx(numbers.std())
    assert statistics.sparsity == pytest.approx((abs(numbers) < 0.1).mean())
    expected, _ = np.histogram(numbers.clip(-1, 1), statistics.edges)
    assert abs(statistics.histogram - expected).sum() <= 2  # a number on an edge, in float32


def test_kept_is_a_copy() -> None:
    kept, doubled, x = Kept(), Kept(lambda x: 2 * x), torch.ones(2)
    for each in (kept, doubled):
        each.add(x)
    x.zero_()
    assert kept.tensors[0].tolist() == [1, 1] and doubled.last.tolist() == [2, 2]
