"""transformers' attentions with gates: layers on the same inputs, whole models, masks, refusals."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

pytest.importorskip('transformers', '5.20', reason='needs transformers: the extra "transformers"')

import transformers
from conftest import filled
from helpers.hub_models import MODELS, build, feed, largest_difference, moved, outputs
from helpers.replicas import replicated
from transformers import PretrainedConfig

import mmgate
from mmgate.analysis.probes.sampling import record_sampling
from mmgate.hosts.transformers import DEFORMABLE as PREFIXES
from mmgate.listing import attention_modules
from mmgate.transformers import from_pretrained

PLUG = dict(path='**', type='PLuGMultiScaleDeformableAttention')
PADDED = ('detr', 'deformable_detr')  # take masks of pixels
DENSE_GATES: dict[str, dict[str, Any]] = {
    'plug': dict(type='PLuGMultiheadAttention'),
    'sdpa': dict(type='SDPAGatedMultiheadAttention', scale=2.0, init='identity'),
    'sdpa_g5': dict(type='SDPAGatedMultiheadAttention', position='G5', scale=2.0, init='identity'),
}


def rules_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return rules for all attention of a model that is listed with a gate that fits."""
    found = []
    for kind in (PLUG['type'], 'PLuGMultiheadAttention'):
        paths = [one.path for one in mmgate.list_attention(model) if kind in one.gates]
        found += [dict(path=paths, type=kind)] if paths else []
    return found


@pytest.mark.parametrize('name', MODELS)
def test_attention_is_listed_by_the_paths_that_rules_take(name: str) -> None:
    """With sizes, before and after it is gated; and what the list has no gate for is refused."""
    model = build(name)
    listed = {one.path: one for one in mmgate.list_attention(model)}
    assert not [path for path in listed if path.endswith('.attn') and path.removesuffix('.attn') in listed]
    rules = rules_of(model)
    for rule in rules:
        for path in listed.keys() - {path for other in rules for path in other['path']}:
            with pytest.raises(ValueError, match='does not replace'):
                mmgate.swap_attention(model, dict(rule, path=path))
        assert set(mmgate.swap_attention(model, rule)) == set(rule['path'])
    after = {one.path: one for one in mmgate.list_attention(model)}
    kinds = {PLUG['type']: 'PLuGDeformableGate', 'PLuGMultiheadAttention': 'PLuGGate'}
    expected = {path: kinds[rule['type']] for rule in rules for path in rule['path']}
    assert expected and {path: one.gate for path, one in after.items() if one.gate} == expected
    assert [one.class_name for one in after.values()] == [one.class_name for one in listed.values()]
    for one in (*listed.values(), *after.values()):
        assert any('heads' in size for size in one.sizes) or not (one.gates or one.gate)


@pytest.mark.parametrize('name', MODELS)
def test_a_checkpoint_is_loaded_with_gates_that_it_has_not_or_has(name: str, tmp_path: Path) -> None:
    """They start as in a swap, and the model as it was; padding stays masked, and who has no mmgate loads it, too."""
    vanilla, fed = build(name), feed(name, padded=name in PADDED)
    kind, rules = type(vanilla), rules_of(vanilla)
    plain = outputs(vanilla, fed)
    assert name not in PADDED or largest_difference(plain, outputs(vanilla, feed(name))) > 1e-2
    vanilla.save_pretrained(tmp_path / 'vanilla')
    torch.manual_seed(7)
    model, info = from_pretrained(kind, tmp_path / 'vanilla', rules[:1], output_loading_info=True)
    gates = mmgate.gate_parameters(model)
    assert type(model) is kind and not model.training
    assert info['missing_keys'] == gates.keys() and not info['unexpected_keys'] and not info['mismatched_keys']
    torch.manual_seed(7)
    mmgate.swap_attention(vanilla, rules[:1])
    assert all(torch.equal(p, gates[path]) for path, p in mmgate.gate_parameters(vanilla).items())
    assert largest_difference(outputs(model, fed), plain) < 1e-4
    moved(model)
    gated = outputs(model, fed)
    assert largest_difference(gated, plain) > 1e-3
    with mmgate.gates_disabled(model):
        assert largest_difference(outputs(model, fed), plain) < 1e-5
    model.save_pretrained(tmp_path / 'gated')
    again, info = from_pretrained(kind, tmp_path / 'gated', rules[:1], output_loading_info=True)
    assert not info['missing_keys'] and not info['unexpected_keys']
    assert largest_difference(outputs(again, fed), gated) == 0
    assert again.config.architectures == [kind.__name__]
    mmgate.restore_attention(again)
    assert largest_difference(outputs(again, fed), plain) == 0
    assert largest_difference(outputs(kind.from_pretrained(tmp_path / 'gated'), fed), plain) == 0
    half, info = from_pretrained(kind, tmp_path / 'gated', rules, output_loading_info=True, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert all(parameter.isfinite().all() for parameter in half.parameters())
    assert info['missing_keys'] == mmgate.gate_parameters(half).keys() - gates.keys()
    assert bool(info['missing_keys']) == (len(rules) > 1)


def test_a_class_for_several_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match='AutoModelForObjectDetection is no model'):
        from_pretrained(transformers.AutoModelForObjectDetection, tmp_path, PLUG)


# by module, options of its config; those of the second RT-DETR and its successors have boxes of all levels alone
POINTS: list[tuple[str, dict[str, Any]]] = [
    *((module, {}) for module in PREFIXES),
    ('d_fine', dict(decoder_n_points=[3, 3])),
    ('d_fine', dict(decoder_n_points=[3, 6])),  # as it is published, as is DEIMv2
    ('deimv2', dict(decoder_n_points=[3, 6])),
    ('d_fine', dict(decoder_n_points=[6, 1], decoder_offset_scale=0.25)),
    ('rt_detr_v2', dict(decoder_offset_scale=0.25)),
    ('rt_detr_v2', dict(decoder_offset_scale=1.0)),
]
PAIRS = [(*one, columns) for one in POINTS for columns in (2, 4) if columns == 4 or one[0] not in dict(POINTS[-6:])]


def deformable(module: str, **options: Any) -> Any:
    """Return a model of one deformable attention, of one of transformers' modules."""
    path = f'transformers.models.{module}.modeling_{module}'
    there = pytest.importorskip(path, reason=f'this transformers has no {module}')
    kind = getattr(there, f'{PREFIXES[module]}MultiscaleDeformableAttention')
    sizes = dict(d_model=32, num_feature_levels=2, decoder_n_levels=2, decoder_attention_heads=4, decoder_n_points=3)
    sizes.update(decoder_offset_scale=0.5, decoder_method='default', disable_custom_kernels=True)
    config = PretrainedConfig(**{**sizes, **options})
    made = dict(config=config, embed_dim=32, num_heads=4, n_levels=2, n_points=3)
    host = kind(**{name: made[name] for name in inspect.signature(kind).parameters})
    return filled(nn.ModuleDict(dict(attn=host)), 0.3).eval()


def given_to_sampler(host: Any) -> list[Tensor]:
    """Return a list that gets the locations and weights of transformers' own sampler, where it is no mere function."""
    seen: list[Tensor] = []
    if hasattr(host, 'ms_deformable_attn_core'):
        core = host.ms_deformable_attn_core
        host.ms_deformable_attn_core = lambda *args: (seen.extend(args[2:4]), core(*args))[1]
    elif hasattr(host, 'attn'):
        host.attn.register_forward_pre_hook(lambda _, args: seen.extend(args[-3:-1]))
    return seen


@pytest.mark.parametrize('module, options, columns', PAIRS, ids=str)
def test_a_deformable_class_starts_as_the_vanilla_one(module: str, options: dict[str, Any], columns: int) -> None:
    """A mask, a position and one reference for all levels included; a gate that moves changes the output.

    The points and weights that are recorded, with a gate and without, are those of transformers' own sampler.
    """
    model = deformable(module, **options)
    shapes = [(4, 6), (2, 3)]
    fed = dict(
        hidden_states=torch.randn(2, 5, 32),
        position_embeddings=torch.randn(2, 5, 32),
        encoder_hidden_states=torch.randn(2, 30, 32),
        attention_mask=torch.arange(30)[None] < torch.tensor([[30], [25]]),
        reference_points=torch.rand(2, 5, 2 if columns == 2 else 1, columns),
        spatial_shapes=torch.tensor(shapes),
        spatial_shapes_list=shapes,
        level_start_index=torch.tensor([0, 24]),
    )
    taken = inspect.signature(type(model['attn']).forward).parameters
    fed = {name: value for name, value in fed.items() if name in taken}
    if module in ('d_fine', 'deimv2'):  # whose masks fit no values
        del fed['attention_mask']
    with torch.no_grad():
        given = given_to_sampler(model['attn'])
        expected, weights = model['attn'](**fed)
        given = [x.flatten() for x in given] or [None, weights.flatten()]
        for gated in (False, True):
            if gated:
                mmgate.swap_attention(model, dict(PLUG, path='attn'))
            with record_sampling(model) as recording:
                found = model['attn'](**fed)
            torch.testing.assert_close(found, (expected, weights), rtol=1e-4, atol=1e-5)
            noted = recording['attn']
            assert ('gate' in noted) == gated
            for name, wanted in zip(('locations', 'weights'), given, strict=True):
                if wanted is not None:
                    torch.testing.assert_close(noted[name].last.flatten(), wanted, rtol=1e-4, atol=1e-5)
            counts = options.get('decoder_n_points', [3, 3])
            assert noted['num_points'].last.tolist() == counts if 'num_points' in noted else counts[0] == counts[1]
        moved(model)
        assert (model['attn'](**fed)[0] - expected).abs().max() > 1e-4
        with mmgate.gates_disabled(model):
            assert torch.equal(model['attn'](**fed)[0], expected)


@pytest.mark.parametrize('name, points', [('rt_detr_v2', 3), ('d_fine', [3, 6]), ('deimv2', 3)])
def test_points_that_are_rounded_to_pixels_are_refused(name: str, points: Any) -> None:
    with pytest.raises(ValueError, match="decoder_method='discrete'"):
        mmgate.swap_attention(deformable(name, decoder_n_points=points, decoder_method='discrete'), PLUG)


@pytest.mark.parametrize('name, implementation', [('detr', 'eager'), ('deformable_detr', 'mmgate')])
def test_masks_do_not_vanish_with_another_implementation(name: str, implementation: str) -> None:
    model, fed = build(name), feed(name, padded=True)
    before = outputs(model, fed)
    mmgate.swap_attention(model, dict(path='**', type='PLuGMultiheadAttention'))
    model.set_attn_implementation(implementation)
    assert largest_difference(before, outputs(model, fed)) < 1e-4
    with mmgate.gates_disabled(model):
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


@pytest.mark.parametrize('kind', ['SDPAGatedMultiheadAttention', 'DifferentialMultiheadAttention'])
def test_offloaded_gates_are_fetched(kind: str) -> None:
    accelerate = pytest.importorskip('accelerate', reason='needs accelerate, in the environment of transformers')
    model, fed, rule = build('vit'), feed('vit'), dict(path='**', type=kind)
    mmgate.swap_attention(model, rule)
    gated = outputs(model, fed)
    accelerate.cpu_offload(model, execution_device='cpu', preload_module_classes=['GatedViTAttention'])
    assert all(parameter.is_meta for parameter in model.parameters())
    assert largest_difference(outputs(model, fed), gated) == 0
    offloaded = accelerate.cpu_offload(build('vit'), execution_device='cpu')
    with pytest.raises(mmgate.errors.ConfigError, match='offloaded .* before .*preload_module_classes=.*GatedViTAtt'):
        mmgate.swap_attention(offloaded, rule)


class Packed(nn.Module):
    """As packages of quantisation replace a linear layer: integers, a parameter or a buffer, and a scale of float32."""

    def __init__(self, layer: nn.Linear, as_buffer: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        scale = layer.weight.detach().float().abs().amax(1, keepdim=True) / 127
        integers = (layer.weight.detach() / scale).round().to(torch.int8)
        self.weight = nn.Buffer(integers) if as_buffer else nn.Parameter(integers, requires_grad=False)
        self.register_buffer('scale', scale)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, (self.weight * self.scale).to(x.dtype))


# Pruning and torch's older weight norm keep what they compute as an attribute, which torch does not copy.
CHANGED: dict[str, tuple[Callable[[nn.Linear], nn.Module], str, dict[str, Any], torch.dtype]] = {
    'quantised in 16 bits': (Packed, 'vit', DENSE_GATES['plug'], torch.bfloat16),
    'quantised': (partial(Packed, as_buffer=True), 'detr', DENSE_GATES['sdpa_g5'], torch.float32),
    'quantised, deformable': (Packed, 'deformable_detr', PLUG, torch.float32),
    'pruned': (lambda layer: prune.l1_unstructured(layer, 'weight', 0.3), 'vit', DENSE_GATES['plug'], torch.float32),
    'normalised': (nn.utils.weight_norm, 'vit', DENSE_GATES['sdpa'], torch.float32),
}


@pytest.mark.parametrize('case', CHANGED)
def test_gates_fit_around_projections_that_were_changed(case: str) -> None:
    """They act, train and come off, and hooks are called."""
    change, name, gate, dtype = CHANGED[case]
    model = build(name).to(dtype)
    fed = {key: value.to(dtype) for key, value in feed(name).items()}
    lock = threading.Lock()  # which cannot be copied
    called: list[Any] = []
    for _, attention in list(attention_modules(model)):
        for child, layer in list(attention.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(attention, child, change(layer))
        attention.register_forward_hook(lambda *_: called.append(lock.locked()))
    vanilla = outputs(model, fed)
    assert any(gate['type'] in one.gates for one in mmgate.list_attention(model))
    mmgate.swap_attention(model, {'path': '**', **gate})
    called.clear()
    assert largest_difference(outputs(model, fed), vanilla) < (1e-5 if dtype == torch.float32 else 0.1)
    assert called
    moved(model)
    assert largest_difference(outputs(model, fed), vanilla) > 0
    model(**fed)[0].sum().backward()
    assert any(p.grad is not None and p.grad.any() for p in mmgate.gate_parameters(model).values())
    mmgate.restore_attention(model)
    assert largest_difference(outputs(model, fed), vanilla) == 0


@pytest.mark.parametrize('gate', ['plug', 'sdpa_g5'])
def test_copies_of_data_parallel_call_their_gates(gate: str) -> None:
    """At the same time, one in each thread, and the model itself in several."""
    model, fed = build('vit'), feed('vit')
    mmgate.swap_attention(model, {'path': '**', **DENSE_GATES[gate]})
    moved(model)
    inputs = [{name: tensor + shift for name, tensor in fed.items()} for shift in range(3)]
    expected = [outputs(model, given) for given in inputs]
    copies = [replicated(model) for _ in inputs]
    with ThreadPoolExecutor() as threads:
        for models in (copies, [model] * len(inputs)) * 10:
            for found, wanted in zip(threads.map(outputs, models, inputs), expected, strict=True):
                assert largest_difference(found, wanted) < 1e-5
