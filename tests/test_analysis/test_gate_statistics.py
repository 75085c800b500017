"""Gates over a model: what their maps are, and that an identity's is 0."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mmgate
from mmgate.analysis.figures.gates import _apart, draw_gates
from mmgate.analysis.figures.style import layer_labels
from mmgate.analysis.hooks import GateStatisticsHook
from mmgate.analysis.probes.gates import gate_statistics, mean_maps
from mmgate.errors import ConfigError

HEADS, TOKENS = 2, 6
PLUG, SDPA = dict(type='PLuGMultiheadAttention'), dict(type='SDPAGatedMultiheadAttention')
# options of the gate, what its map is of, the map's shape for two layers, and the gate that changes nothing
GATES: dict[str, tuple[dict[str, Any], str, tuple[int, int], int | None]] = {
    'plug': (PLUG, 'pairs', (TOKENS, TOKENS), 0),
    'plug_per_head': (dict(PLUG, heads='per_head'), 'pairs', (TOKENS, TOKENS), 0),
    'plug_without_residual': (dict(PLUG, residual=False, activation='none'), 'pairs', (TOKENS, TOKENS), 1),
    'sdpa': (SDPA, 'heads', (2, HEADS), 1),
    'sdpa_headwise': (dict(SDPA, granularity='headwise'), 'heads', (2, HEADS), 1),
    'sdpa_additive': (dict(SDPA, form='additive'), 'heads', (2, HEADS), 0),
    'dgsa': (dict(type='DifferentialGatedMultiheadAttention'), 'heads', (2, HEADS), None),
}


class Model(nn.ModuleList):
    """Two layers of attention that take a batch as detectors do."""

    def test_step(self, batch: Tensor) -> list[Tensor]:
        for layer in self:
            batch = layer(batch, batch, batch)[0]
        return [batch]


def gated(options: dict[str, Any]) -> tuple[nn.Module, list[Tensor]]:
    model = Model(nn.MultiheadAttention(8, HEADS, batch_first=True) for _ in range(2))
    mmgate.swap_attention(model, dict(options, path='*'))
    return model.eval(), [torch.randn(1, TOKENS, 8) for _ in range(3)]


@pytest.mark.parametrize('name', GATES)
def test_maps(name: str) -> None:
    options, kind, shape, unchanged = GATES[name]
    gates = gate_statistics(*gated(options))
    assert [gate.path for gate in gates] == ['0', '1'] and {gate.kind for gate in gates} == {kind}
    (found,) = mean_maps(gates)
    assert found.values.shape == shape and found.kind == kind and list(found.gates) == gates
    assert {gate.unchanged for gate in gates} == {unchanged} == {found.unchanged}
    if 'plug' in name:
        assert (found.values == unchanged).all()  # an identity's
    else:
        np.testing.assert_allclose(found.values.mean(1), [gate.statistics.mean for gate in gates], atol=1e-5)


def test_a_map_of_pairs_keeps_each_pair_and_the_class_token_apart() -> None:
    """A self-interaction of -1 stays one, beside a class token of 0.5, in the values, the rows and the picture."""
    model, _ = gated(PLUG)
    model.cls_token = nn.Parameter(torch.zeros(1))
    gate = torch.zeros(1, 1, 1 + TOKENS, 1 + TOKENS)
    gate[..., range(1, 7), range(1, 7)] = -1
    gate[:, :, 0] = 0.5
    for layer in model:
        layer.gate.read_gate = lambda name, *inputs: gate[..., : inputs[0].shape[1], : inputs[0].shape[1]]
    images = [torch.randn(1, tokens, 8) for tokens in (1 + TOKENS, 1 + TOKENS, 4)]  # the last has other pairs
    (found,) = mean_maps(gate_statistics(model, images))
    np.testing.assert_array_equal(found.values, gate[0, 0])
    assert found.class_tokens == 1
    rows = {(row['row'], row['column']): row['gate'] for row in found.rows()}
    assert rows['class', 3] == 0.5 and rows[2, 2] == -1 and rows[2, 3] == rows[2, 'class'] == 0
    shown = _apart(found)
    np.testing.assert_array_equal(shown[2:, 2:], gate[0, 0, 1:, 1:])
    assert (shown[0, 2:] == 0.5).all() and np.isnan(shown[1]).all() and np.isnan(shown[:, 1]).all()


def test_a_gate_shared_by_the_heads_has_no_map() -> None:
    gates = gate_statistics(*gated(dict(type='SDPAGatedMultiheadAttention', head_shared='average')))
    assert len(gates) == 2 and mean_maps(gates) == []


def test_a_picture_has_every_layer_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates of pairs around 0 and of heads around 1 have a map each, centred there; so has a gate of fewer heads."""
    figures: list[Any] = []
    monkeypatch.setattr('mmgate.analysis.figures.style.save', lambda figure, out: figures.append(figure))
    long = 'a_part_of_the_model_with_a_long_name'
    model = Model([*(nn.MultiheadAttention(8, HEADS, batch_first=True) for _ in range(4))])
    model.append(nn.MultiheadAttention(8, 4, batch_first=True))
    rules = [dict(PLUG, path=['0', '2']), dict(SDPA, path=['1', '3', '4'])]
    mmgate.swap_attention(model, rules)
    listed = gate_statistics(model.eval(), [torch.randn(1, TOKENS, 8)])
    for gate in listed:
        gate.path = f'{long}.{gate.path}.{long}' if gate.path in '02' else f'{long}.{gate.path}'
    draw_gates([('both', listed), ('one', listed[:1])], tmp_path / 'x.png')
    rows = figures[0].axes[:10]
    maps = [axis for axis in rows if axis.images]
    found = [(sum(axis.images[0].get_clim()) / 2, axis.get_title().split('\n')[-1]) for axis in maps]
    assert found == [
        (0, 'mean gate of 2 layers'),
        (1, 'mean gate of 2 layers'),
        (1, 'mean gate of 1 layer'),
        (0, found[3][1]),
    ]
    names = [label.get_text() for label in rows[3].get_yticklabels()]
    assert names == [f'0.{long}', '1', f'2.{long}', '3', '4']
    assert [label.get_text() for label in rows[1].get_yticklabels()] == ['1', '3']


class Runner(SimpleNamespace):
    """What the hook asks a runner for; notes what is logged and warned of."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model=model, rank=0, iter=0, max_iters=1000, optim_wrapper=None)
        self.scalars: dict[str, float] = {}
        self.warnings: list[str] = []
        self.lines: list[str] = []
        self.images: dict[str, np.ndarray] = {}
        self.logger = SimpleNamespace(warning=self.warnings.append, info=self.lines.append)
        self.visualizer = SimpleNamespace(
            add_scalars=lambda scalars, step: self.scalars.update(scalars),
            add_image=lambda name, image, step: self.images.update({name: image}),
        )


AT_REST = {
    'plug': (PLUG, 0.0, True),
    'plug_barely_moved': (PLUG, 0.009, True),
    'plug_moved': (PLUG, 0.02, False),
    'sdpa_around_1': (dict(SDPA, init='identity', scale=2.0), 0.0, True),
    'sdpa_moved': (dict(SDPA, init='identity', scale=2.0), 0.1, False),
    'sdpa_from_a_half': (SDPA, 0.0, False),
    'dgsa_which_has_no_rest': (dict(type='DifferentialGatedMultiheadAttention'), 0.0, False),
}


@pytest.mark.parametrize('name', AT_REST)
def test_a_hook_warns_of_gates_that_do_not_move(name: str) -> None:
    """After an epoch, and at a validation in a loop of iterations; one layer that moved is enough."""
    options, moved, warns = AT_REST[name]
    model, batches = gated(options)
    bias = next((p for n, p in model.named_parameters() if n in ('1.gate.gml.bias', '1.gate.gate_bias')), None)
    assert (bias is None) == ('dgsa' in name)
    if bias is not None:
        bias.data[: len(bias) // 2] += moved
    hook, runner = GateStatisticsHook(interval=1), Runner(model)
    for look in (hook.after_train_epoch, hook.before_val_epoch):
        hook.before_train_iter(runner, 0)
        model.test_step(batches[0])
        hook.after_train_iter(runner, 0)
        look(runner)
        look(runner)  # nothing was seen since
    assert len(runner.warnings) == 2 * warns
    assert all("custom_keys={'mmgate.gates': dict(lr_mult=20.0)}" in warning for warning in runner.warnings)
    if 'dgsa' in name:
        assert not any('moved' in tag for tag in runner.scalars)
    elif 'plug' in name:
        for path, expected in ('0', 0.0), ('1', moved):
            for key in ('moved', 'moved_most'):
                assert runner.scalars[f'gate/{path}/{key}'] == pytest.approx(expected, abs=1e-5)  # G is a tanh


def step(hook: GateStatisticsHook, runner: Runner, batch: Tensor) -> None:
    """Run the model's step between the hook's calls, with a backward pass."""
    hook.before_train_iter(runner, 0)
    (output,) = runner.model.test_step(batch)
    output.square().sum().backward()
    hook.after_train_iter(runner, 0)


def test_one_record_for_each_type() -> None:
    """Means over layers, the largest distance, the norm over all, a line each; the sizes of layers do not count."""
    model = Model(nn.MultiheadAttention(8, HEADS, batch_first=True) for _ in range(4))
    options = dict(init='identity', scale=2.0)
    mmgate.swap_attention(model, [dict(PLUG, path=['0', '1', '3']), dict(SDPA, path='2', **options)])
    model[1].gate.gml.bias.data[:1] += 0.2
    by_layer, by_type = Runner(model.eval()), Runner(model)
    for runner, per in ((by_layer, 'layer'), (by_type, 'type')):
        model.zero_grad()
        step(GateStatisticsHook(interval=1, per=per), runner, torch.ones(1, TOKENS, 8))
    layers, types = by_layer.scalars, by_type.scalars
    plugs = [f'gate/{layer}' for layer in '013']
    assert {tag.split('/')[1] for tag in types} == {'PLuGGate', 'SDPAGate'} and not by_layer.lines
    for key in ('mean', 'std', 'sparsity', 'moved'):
        assert types[f'gate/PLuGGate/{key}'] == pytest.approx(np.mean([layers[f'{tag}/{key}'] for tag in plugs]))
    assert types['gate/PLuGGate/moved_most'] == max(layers[f'{tag}/moved_most'] for tag in plugs) > 0.1
    norm = np.linalg.norm([layers[f'{tag}/grad_norm'] for tag in plugs])
    assert types['gate/PLuGGate/grad_norm'] == pytest.approx(norm, rel=1e-5) and norm > 0
    assert types['gate/SDPAGate/mean'] == pytest.approx(1, abs=1e-5)
    assert [line.partition(': mean')[0] for line in by_type.lines] == [
        'gates: PLuGGate in 3 layers', 'gates: SDPAGate in 1 layer'
    ]  # fmt: skip
    picture = by_type.images['gates']
    assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2] == 3 and picture.std() > 10
    with pytest.raises(ConfigError, match="per='head': it is one of 'layer', 'type'"):
        GateStatisticsHook(per='head')


def test_the_last_iteration_is_recorded_and_nothing_to_see_is_said_once() -> None:
    model, (batch, *_) = gated(PLUG)
    runner = Runner(model)
    hook = GateStatisticsHook(interval=500)
    step(hook, runner, batch)
    assert not runner.scalars
    runner.iter = 999
    step(hook, runner, batch)
    assert runner.scalars
    vanilla = Runner(Model([nn.MultiheadAttention(8, HEADS, batch_first=True)]))
    hook = GateStatisticsHook(interval=1)
    for _ in range(2):
        step(hook, vanilla, batch.clone().requires_grad_())
    assert len(vanilla.warnings) == 1 and not vanilla.images


@pytest.mark.parametrize(
    ('paths', 'labels'),
    [
        (['backbone.layers.0.attn', 'backbone.layers.1.attn'], ['0', '1']),
        (['encoder.0.self_attn', 'decoder.0.attn'], ['encoder.0.self_attn', 'decoder.0.attn']),
        (['layers.0.self_attn.attn', 'layers.0.cross_attn.attn'], ['0.self_attn', '0.cross_attn']),
        (['a.attn'], ['a.attn']),
    ],
)  # fmt: skip
def test_labels_leave_out_what_all_share(paths: list[str], labels: list[str]) -> None:
    assert layer_labels(paths) == labels
