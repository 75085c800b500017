"""transformers' attentions with gates: layers on the same inputs, whole models, masks, refusals."""

from __future__ import annotations

import copy
import inspect
import io
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

pytest.importorskip('transformers', '5.20', reason='needs transformers: the extra "transformers"')

from helpers.hub_models import DEFORMABLE, build, feed, largest_difference, moved, outputs
from helpers.replicas import replicated
from transformers import PretrainedConfig

import mmgate
from mmgate.adapter import Adapter
from mmgate.gate import Gate
from mmgate.hosts.transformers import DEFORMABLE as PREFIXES
from mmgate.listing import attention_modules

PLUG = dict(path='**', type='PLuGMultiScaleDeformableAttention')
SUFFIX = 'MultiscaleDeformableAttention'
DENSE_GATES: dict[str, dict[str, Any]] = {
    'plug': dict(type='PLuGMultiheadAttention'),
    'sdpa': dict(type='SDPAGatedMultiheadAttention', scale=2.0, init='identity'),
    'sdpa_g5': dict(type='SDPAGatedMultiheadAttention', position='G5', scale=2.0, init='identity'),
}


def calls(model: nn.Module, names: list[str], fed: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return by name what the modules were called with and returned, with states of a size that shows everything."""
    found: dict[str, dict[str, Any]] = {}

    def note(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        given.update(given.pop('kwargs', {}))
        for key in ('hidden_states', 'encoder_hidden_states', 'key_value_states'):
            if isinstance(given.get(key), torch.Tensor):
                given[key] = torch.randn_like(given[key])
        found.setdefault(name, given)

    modules = {name: model.get_submodule(name) for name in names}
    hooks = [m.register_forward_pre_hook(partial(note, name), with_kwargs=True) for name, m in modules.items()]
    outputs(model, fed)
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        return {name: (given, modules[name](**given)) for name, given in found.items()}


def check_layers(model: nn.Module, rule: dict[str, Any], fed: dict[str, Any]) -> None:
    """Every swapped layer computes the vanilla one's outputs from its inputs, and others when its gate has moved."""
    vanilla = copy.deepcopy(model)
    names = mmgate.swap_attention(model, rule)
    ran = calls(vanilla, names, fed)
    assert ran
    for name, (given, expected) in ran.items():
        gated, host = model.get_submodule(name), vanilla.get_submodule(name)
        assert isinstance(gated, type(host)) and set(host.state_dict()) <= set(gated.state_dict())
        with torch.no_grad():
            found = gated(**given)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f'{n}: {m}')
        if isinstance(found[1], torch.Tensor) and isinstance(expected[1], torch.Tensor):
            torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5)
    moved(model)
    with torch.no_grad():
        apart = [(model.get_submodule(n)(**given)[0] - out[0]).abs().max() for n, (given, out) in ran.items()]
    assert min(apart) > 1e-4
    with mmgate.gates_disabled(model), torch.no_grad():
        for name, (given, expected) in ran.items():
            assert torch.equal(model.get_submodule(name)(**given)[0], expected[0])


PUBLISHED = ('d_fine', 'deimv2')  # with another number of points on each level
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in DEFORMABLE),
    ('d_fine', dict(decoder_n_points=[3, 3, 3])),
    *((name, dict(decoder_n_points=[3, 6, 3])) for name in PUBLISHED),
    ('d_fine', dict(decoder_n_points=[1, 2, 6], decoder_offset_scale=0.25)),
    *(('rt_detr_v2', dict(decoder_offset_scale=scale)) for scale in (0.25, 1.0)),
]


@pytest.mark.parametrize('name, options', OPTIONS, ids=str)
def test_a_deformable_layer_starts_as_the_vanilla_one(name: str, options: dict[str, Any]) -> None:
    check_layers(build(name, **options), PLUG, feed(name))


@pytest.mark.parametrize('name, granularity', [('d_fine', 'head_level_point'), ('deimv2', 'level')])
def test_a_published_detector_starts_as_the_vanilla_one_and_trains(name: str, granularity: str) -> None:
    """With 3, 6 and 3 points on its levels; D-FINE s to x, DEIM and DEIMv2 have them."""
    fed = feed(name)
    model = build(name, decoder_n_points=[3, 6, 3])
    expected = outputs(model, fed)
    names = mmgate.swap_attention(model, dict(PLUG, granularity=granularity))
    assert len(names) == 2
    found = outputs(model, fed)
    largest = max(float(x[x.isfinite()].abs().max()) for x in expected)
    assert largest_difference(found, expected) < 1e-6 * largest
    before = {key: parameter.detach().clone() for key, parameter in mmgate.gate_parameters(model).items()}
    optimizer = torch.optim.SGD(mmgate.gate_parameters(model).values(), lr=0.1)
    boxes = dict(class_labels=torch.tensor([0, 2]), boxes=torch.tensor([[0.5, 0.5, 0.3, 0.4], [0.3, 0.6, 0.2, 0.2]]))
    model.train()
    for _ in range(2):  # one step moves one factor of a product, from then on the other moves as well
        optimizer.zero_grad()
        loss = model(**fed, labels=[boxes, boxes]).loss
        loss.backward()
        optimizer.step()
        assert loss.isfinite()
    for key, parameter in mmgate.gate_parameters(model).items():
        assert parameter.isfinite().all() and not torch.equal(parameter, before[key]), key
    model.eval()
    mmgate.restore_attention(model)
    assert not mmgate.gate_parameters(model)


# one of each way to hold attention; the others are gated by paths in the tests of layers
LISTED = ('vit', 'swin', 'segformer', 'mask2former', 'deformable_detr', 'd_fine', 'grounding_dino', 'rf_detr')


@pytest.mark.parametrize('name', LISTED)
def test_attention_is_listed_by_the_paths_that_rules_take(name: str) -> None:
    """With sizes, before and after it is gated; and what the list has no gate for is refused."""
    model = build(name)
    listed = {one.path: one for one in mmgate.list_attention(model)}
    assert all(any('heads' in size for size in one.sizes) for one in listed.values() if one.gates)
    assert not [path for path in listed if path.endswith('.attn') and path.removesuffix('.attn') in listed]
    expected: dict[str, str] = {}
    for kind, gate in ((PLUG['type'], 'PLuGDeformableGate'), ('PLuGMultiheadAttention', 'PLuGGate')):
        fits = [path for path, one in listed.items() if kind in one.gates]
        for path in listed.keys() - expected.keys() - set(fits):
            with pytest.raises(ValueError, match='does not replace'):
                mmgate.swap_attention(model, dict(path=path, type=kind))
        if fits:
            assert set(mmgate.swap_attention(model, dict(path=fits, type=kind))) == set(fits)
        expected.update(dict.fromkeys(fits, gate))
    assert expected
    after = {one.path: one for one in mmgate.list_attention(model)}
    assert {path: one.gate for path, one in after.items() if one.gate} == expected
    assert {path: one.class_name for path, one in after.items()} == {
        path: one.class_name for path, one in listed.items()
    }
    assert all(any('heads' in size for size in one.sizes) for one in after.values() if one.gate)


# of models that are too large for a test, by themselves
CLASSES = [(module, prefix) for module, prefix in PREFIXES.items() if module not in DEFORMABLE]


@pytest.mark.parametrize('columns', [2, 4])
@pytest.mark.parametrize('module, prefix', CLASSES)
def test_deformable_classes(module: str, prefix: str, columns: int) -> None:
    """A mask, a position and one reference for all levels included; a gate that moves changes the output."""
    path = f'transformers.models.{module}.modeling_{module}'
    kind = getattr(pytest.importorskip(path, reason=f'this transformers has no {prefix}'), f'{prefix}{SUFFIX}')
    config = PretrainedConfig(d_model=32, num_feature_levels=2, disable_custom_kernels=True)
    model: Any = nn.ModuleDict(dict(attn=kind(config, num_heads=4, n_points=3))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    shapes = [(4, 6), (2, 3)]
    given = dict(
        hidden_states=torch.randn(2, 5, 32),
        position_embeddings=torch.randn(2, 5, 32),
        encoder_hidden_states=torch.randn(2, 30, 32),
        attention_mask=torch.arange(30)[None] < torch.tensor([[30], [25]]),
        reference_points=torch.rand(2, 5, 2 if columns == 2 else 1, columns),
        spatial_shapes=torch.tensor(shapes),
        spatial_shapes_list=shapes,
        level_start_index=torch.tensor([0, 24]),
    )
    with torch.no_grad():
        expected, weights = model['attn'](**given)
        mmgate.swap_attention(model, dict(PLUG, path='attn'))
        found, gated = model['attn'](**given)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gated, weights, rtol=1e-4, atol=1e-6)
        moved(model)
        assert (model['attn'](**given)[0] - expected).abs().max() > 1e-4


@pytest.mark.parametrize('implementation', ['default', 'eager', 'mmgate'])
@pytest.mark.parametrize('name', ['detr', 'deformable_detr'])
def test_masks_do_not_vanish(name: str, implementation: str) -> None:
    model = build(name)
    if implementation == 'eager':
        model.set_attn_implementation('eager')
    fed = feed(name, padded=True)
    before, unpadded = outputs(model, fed), outputs(model, feed(name))
    mmgate.swap_attention(model, dict(path='**', type='PLuGMultiheadAttention'))
    if implementation == 'mmgate':
        model.set_attn_implementation('mmgate')
    assert largest_difference(before, outputs(model, fed)) < 1e-4 < 1e-2 < largest_difference(before, unpadded)
    with mmgate.gates_disabled(model):  # modules without a gate attend as with 'sdpa'
        assert largest_difference(before, outputs(model, fed)) < 1e-5


def test_rows_that_may_attend_to_nothing_get_zeros() -> None:
    model = build('detr')
    name = mmgate.swap_attention(model, dict(path='model.encoder.layers.0.self_attn', type='PLuGMultiheadAttention'))[0]
    module = model.get_submodule(name)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[1, :, 2] = False
    out = module(torch.randn(2, 5, 32), attention_mask=mask)[0]
    assert torch.equal(out[1, 2], module.o_proj.bias) and out.isfinite().all()
    with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
        module(torch.randn(2, 5, 32), attention_mask=torch.ones(2, 5))


def test_projected_queries_are_added_as_they_are() -> None:
    """By M-DGSA, in a host with another scale than 1 / sqrt(d), which is the logits' alone."""
    vanilla, x = build('detr'), torch.randn(2, 5, 32)
    outs = []
    for residual in ('query', 'none'):
        model = copy.deepcopy(vanilla)
        rule = dict(type='DifferentialGatedMultiheadAttention', residual=residual)
        (name,) = mmgate.swap_attention(model, dict(path='model.encoder.layers.0.self_attn', **rule))
        module = model.get_submodule(name)
        module.scaling = 1.0
        outs.append(module(x)[0])
    torch.testing.assert_close(outs[0] - outs[1], module.q_proj(x))


@pytest.mark.parametrize('name, options, kind, words', [
    ('rt_detr_v2', dict(decoder_method='discrete'), PLUG['type'], "decoder_method='discrete'"),
    ('d_fine', dict(decoder_n_points=[3, 6, 3], decoder_method='discrete'), PLUG['type'], "decoder_method='discrete'"),
    ('deimv2', dict(decoder_method='discrete'), PLUG['type'], "decoder_method='discrete'"),
])  # fmt: skip
def test_a_gate_refuses_what_it_does_not_fit(name: str, options: dict[str, Any], kind: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mmgate.swap_attention(build(name, **options), dict(path='**', type=kind))


@pytest.mark.parametrize('name, kind', [
    ('deformable_detr', PLUG['type']),
    ('swin', 'PLuGMultiheadAttention'),
    ('vit', 'DifferentialMultiheadAttention'),
])  # fmt: skip
def test_a_gated_model_is_copied_and_pickled(name: str, kind: str) -> None:
    model, fed = build(name), feed(name)
    mmgate.swap_attention(model, dict(path='**', type=kind))
    moved(model)
    expected, file = outputs(model, fed), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert largest_difference(expected, outputs(twin, fed)) == 0
        assert isinstance(next(m for m in twin.modules() if isinstance(m, Adapter)).gate, Gate)


def test_recorders_of_attention_weights_go_on() -> None:
    model, fed = build('deformable_detr'), feed('deformable_detr')
    vanilla = model(**fed, output_attentions=True)
    mmgate.swap_attention(model, PLUG)
    found = model(**fed, output_attentions=True)
    for name in ('encoder_attentions', 'cross_attentions'):
        assert len(vanilla[name]) == 2
        for ours, theirs in zip(found[name], vanilla[name], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('name, kind', [('deformable_detr', PLUG['type']), ('detr', 'PLuGMultiheadAttention')])
def test_under_autocast_and_gradient_checkpointing(name: str, kind: str) -> None:
    model, fed = build(name), feed(name)
    mmgate.swap_attention(model, dict(path='**', type=kind))
    with torch.autocast('cpu', torch.bfloat16):
        assert model(**fed).logits.isfinite().all()
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        torch.manual_seed(0)
        model(**fed).logits.square().sum().backward()
        gradients.append([p.grad.clone() for p in mmgate.gate_parameters(model).values() if p.grad is not None])
    assert gradients[0]
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize('name', ['vit', 'deformable_detr'])
def test_hooks_of_accelerate_call_the_gate(name: str) -> None:
    """Put on after the gates, they stay with the gates off; they come off before the gates do."""
    hooks = pytest.importorskip('accelerate.hooks', reason='needs accelerate, in the environment of transformers')
    rule = dict(path='**', type='PLuGMultiheadAttention', init='paper')
    fed = feed(name)
    vanilla = build(name).eval()
    gated, model = copy.deepcopy(vanilla), copy.deepcopy(vanilla)
    for one in (gated, model):
        mmgate.swap_attention(one, rule)
    moved(gated)
    for one in (*model.modules(),):
        hooks.add_hook_to_module(one, hooks.AlignDevicesHook(execution_device='cpu'))
    model.load_state_dict(gated.state_dict())
    assert largest_difference(outputs(gated, fed), outputs(vanilla, fed)) > 0
    assert largest_difference(outputs(model, fed), outputs(gated, fed)) == 0
    with mmgate.gates_disabled(model):
        assert largest_difference(outputs(model, fed), outputs(vanilla, fed)) == 0
    with pytest.raises(mmgate.errors.ConfigError, match='its method forward was replaced'):
        mmgate.restore_attention(model)
    hooks.remove_hook_from_module(model, recurse=True)
    for one in model.modules():
        vars(one).pop('forward', None)
    mmgate.restore_attention(model)
    assert largest_difference(outputs(model, fed), outputs(vanilla, fed)) == 0


@pytest.mark.parametrize('kind', ['SDPAGatedMultiheadAttention', 'DifferentialMultiheadAttention'])
def test_offloaded_gates_are_fetched(kind: str) -> None:
    accelerate = pytest.importorskip('accelerate', reason='needs accelerate, in the environment of transformers')
    model, fed = build('vit').eval(), feed('vit')
    mmgate.swap_attention(model, dict(path='**', type=kind))
    gated = outputs(model, fed)
    name = type(next(module for _, module in attention_modules(model))).__name__
    accelerate.cpu_offload(model, execution_device='cpu', preload_module_classes=[name])
    assert all(parameter.is_meta for parameter in model.parameters())
    assert largest_difference(outputs(model, fed), gated) == 0
    offloaded = accelerate.cpu_offload(build('vit'), execution_device='cpu')
    with pytest.raises(mmgate.errors.ConfigError, match=f"has offloaded .* before .*preload_module_classes=.'{name}'"):
        mmgate.swap_attention(offloaded, dict(path='**', type=kind))


class _Packed(nn.Module):
    """As packages of quantisation replace a linear layer: integers, a parameter or a buffer, and a float32 scale."""

    def __init__(self, layer: nn.Linear, as_parameter: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight = layer.weight.detach().float()
        scale = weight.abs().amax(1, keepdim=True) / 127
        integers = (weight / scale).round().to(torch.int8)
        if as_parameter:
            self.weight = nn.Parameter(integers, requires_grad=False)
        else:
            self.register_buffer('weight', integers)
        self.register_buffer('scale', scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, (self.weight * self.scale).to(x.dtype))


class _Counts:
    """A hook that holds what cannot be copied."""

    def __init__(self) -> None:
        self.lock, self.calls = threading.Lock(), 0

    def __call__(self, *_: Any) -> None:
        with self.lock:
            self.calls += 1


@pytest.mark.parametrize(
    ('name', 'gate', 'dtype', 'as_parameter'),
    [
        ('vit', DENSE_GATES['plug'], torch.bfloat16, True),
        ('detr', DENSE_GATES['sdpa_g5'], torch.float32, False),
        ('deformable_detr', PLUG, torch.float32, True),
    ],
    ids=['vit', 'detr', 'deformable_detr'],
)
def test_quantised_projections_with_hooks(
    name: str, gate: dict[str, Any], dtype: torch.dtype, as_parameter: bool
) -> None:
    """Gates fit around them, act, train and come off, and the hooks are called."""
    model = build(name).eval().to(dtype)
    fed = {key: value.to(dtype) if value.is_floating_point() else value for key, value in feed(name).items()}
    count = _Counts()
    for _, attention in list(attention_modules(model)):
        for child, layer in list(attention.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(attention, child, _Packed(layer, as_parameter))
        attention.register_forward_hook(count)
    vanilla = outputs(model, fed)
    assert any(gate['type'] in one.gates for one in mmgate.list_attention(model))
    mmgate.swap_attention(model, {'path': '**', **gate})
    before = count.calls
    assert largest_difference(outputs(model, fed), vanilla) < (1e-5 if dtype == torch.float32 else 0.1)
    assert count.calls > before
    moved(model)
    assert largest_difference(outputs(model, fed), vanilla) > 0
    model(**fed)[0].sum().backward()
    assert any(p.grad is not None and p.grad.any() for p in mmgate.gate_parameters(model).values())
    mmgate.restore_attention(model)
    assert largest_difference(outputs(model, fed), vanilla) == 0


def test_weights_that_a_hook_computes(tmp_path: Path) -> None:
    """Pruning and torch's older weight norm keep the computed weight as an attribute, which torch does not copy."""
    model, fed = build('vit').eval(), feed('vit')
    first, second = (attention for _, attention in attention_modules(model))
    prune.l1_unstructured(first.q_proj, 'weight', 0.3)
    nn.utils.weight_norm(second.k_proj)
    vanilla = outputs(model, fed)
    mmgate.swap_attention(model, dict(path='**', **DENSE_GATES['plug']))
    assert len(mmgate.gate_parameters(model)) > 0 and largest_difference(outputs(model, fed), vanilla) < 1e-5
    moved(model)
    mmgate.save_gates(model, tmp_path / 'gates.safetensors')
    assert largest_difference(outputs(model, fed), vanilla) > 0


@pytest.mark.parametrize('gate', ['plug', 'sdpa_g5'])
def test_copies_of_data_parallel_call_their_gates(gate: str) -> None:
    """At the same time, one in each thread, and the model itself in several; its own hooks stay.

    Projections may be inside of other layers since, as of PEFT.
    """
    model, fed = build('vit').eval(), feed('vit')
    mmgate.swap_attention(model, {'path': '**', **DENSE_GATES[gate]})
    moved(model)
    for _, attention in attention_modules(model):
        q_proj = attention.q_proj
        attention.q_proj = nn.Sequential(q_proj)
        vars(attention.q_proj).update(in_features=q_proj.in_features, out_features=q_proj.out_features)
    inputs = [{name: tensor + shift for name, tensor in fed.items()} for shift in range(3)]
    expected = [outputs(model, given) for given in inputs]
    copies = [replicated(model) for _ in inputs]
    hooks = {name: list(module._forward_pre_hooks) for name, module in model.named_modules()}
    with ThreadPoolExecutor() as threads:
        for _ in range(10):
            for models in (copies, [model] * len(inputs)):
                for found, wanted in zip(threads.map(outputs, models, inputs), expected, strict=True):
                    assert largest_difference(found, wanted) < 1e-5
    assert {name: list(module._forward_pre_hooks) for name, module in model.named_modules()} == hooks
    assert largest_difference(outputs(model, fed), expected[0]) == 0
