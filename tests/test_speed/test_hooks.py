"""Parts of a model compiled or kept in float32 during training, and copies of modules whose class changed."""

from __future__ import annotations

import pickle
from copy import copy, deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import TORCH
from helpers import zoo
from helpers.small_demo import DEMO
from mmcv.ops import RoIAlign
from mmengine.config import Config
from mmengine.model import BaseModel
from mmengine.registry import HOOKS, MODELS, init_default_scope
from mmengine.runner import Runner
from torch import Tensor, nn
from torch._dynamo.utils import counters

import mmgate
from mmgate import gates_disabled, restore_attention, swap_attention
from mmgate.errors import ConfigError
from mmgate.rules import path_regex
from mmgate.speed.derived import derived_class
from mmgate.speed.hooks import CompileHook, keep_float32


class Net(BaseModel):
    """The parts that the hooks look for, as small as can be."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        self.encoder = nn.ModuleDict(dict(layers=nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])))
        self.head = self.again = nn.Linear(4, 1)

    def forward(self, x: Tensor, mode: str = 'tensor') -> Any:
        x = self.backbone(x)
        for layer in self.encoder['layers']:
            x = layer(x)
        y = self.head(x)
        return dict(loss=y.square().mean()) if mode == 'loss' else y


def train(work_dir: Path, hooks: list[dict[str, Any]], epochs: int, resume: bool = False) -> Runner:
    torch.manual_seed(0)
    data = [dict(x=torch.randn(3, generator=torch.Generator().manual_seed(i))) for i in range(6)]
    runner = Runner(
        Net(),
        str(work_dir),
        train_dataloader=dict(
            dataset=data,
            batch_size=3,
            sampler=dict(type='DefaultSampler', shuffle=False),
            collate_fn=dict(type='default_collate'),
        ),
        train_cfg=dict(by_epoch=True, max_epochs=epochs),
        optim_wrapper=dict(optimizer=dict(type='AdamW', lr=0.1)),
        custom_hooks=hooks,
        resume=resume,
        default_scope='mmengine',
        experiment_name=f'{work_dir.name}{epochs}{len(hooks)}{resume}',
    )
    runner.train()
    return runner


HOOK = dict(type='mmgate.CompileHook', backend='aot_eager')


def test_a_compiled_run_is_the_same_run(tmp_path: Path) -> None:
    expected = train(tmp_path / 'plain', [], 4).model.state_dict()
    compiled = train(tmp_path / 'compiled', [HOOK], 2).model
    inner = [compiled.backbone, *compiled.encoder['layers']]
    assert all(module._compiled_call_impl is not None for module in inner)
    assert compiled._compiled_call_impl is None and compiled.head._compiled_call_impl is None
    saved = torch.load(tmp_path / 'compiled/epoch_2.pth', weights_only=False)['state_dict']
    assert list(saved) == list(expected)
    for hooks in ([HOOK], []):  # the third epoch with it, the fourth without
        resumed = train(tmp_path / 'compiled', hooks, 4 - len(hooks), resume=True).model
    torch.testing.assert_close(resumed.state_dict(), expected)


class DropoutLayer(nn.Module):
    """A layer of a class outside of torch, because torch.compile passes over torch's at the top."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.linear(x), 0.5)


def test_compiled_dropout_draws_what_the_plain_one_draws() -> None:
    layer = DropoutLayer()
    x = torch.randn(64, 64)
    torch.manual_seed(1)
    expected = layer(x)
    run(CompileHook(), nn.ModuleDict(dict(backbone=layer)))
    torch.manual_seed(1)
    torch.testing.assert_close(layer(x), expected)


def run(hook: CompileHook, model: nn.Module) -> list[str]:
    lines: list[str] = []
    hook.before_train(SimpleNamespace(model=model, logger=SimpleNamespace(info=lines.append)))
    return lines


# Mask2Former's head goes through the layers of its decoder: a decoder that is compiled would never be called.
MASKS = nn.ModuleDict(dict(transformer_decoder=nn.ModuleDict(dict(layers=nn.ModuleList([nn.Linear(2, 2)])))))
OF_NET = 'backbone, encoder.layers.0, encoder.layers.1 are compiled as they are first called'


@pytest.mark.parametrize(
    ('model', 'paths', 'said'),
    [
        (Net(), None, OF_NET),
        (nn.ModuleDict(dict(decode_head=MASKS)), None, 'decode_head.transformer_decoder.layers.0 are'),
        (nn.Linear(2, 2), None, 'no module of Linear matches'),
        (Net(), ['backbone', 'backbone.*'], 'backbone are compiled'),
        (Net(), ['**.1'], 'backbone.1, encoder.layers.1 are compiled'),
        (Net(), 'again', 'again are compiled'),
        (Net(), ['backbone', 'encodr.*'], "no module of Net matches 'encodr.*'; its parts are data_preprocessor, back"),
        (Net(), [('path', 'x')], 'paths must be a pattern or a list'),
        (Net(), [], 'paths must be a pattern or a list'),
    ],
    ids=['default', 'masks', 'none', 'nested', 'anywhere', 'a second name', 'one without a match', 'no list', 'empty'],
)
def test_paths_name_the_parts_or_are_refused(model: nn.Module, paths: Any, said: str) -> None:
    try:
        (line,) = run(CompileHook(paths), model)
    except ConfigError as error:
        line = str(error)
    assert line.startswith(f'CompileHook: {said}')


@pytest.mark.skipif(TORCH < (2, 2), reason='refused')
@pytest.mark.parametrize('several', [False, True], ids=['one optimizer', 'two'])
def test_graphs_do_not_add_up_gradients(several: bool) -> None:
    wrapper: Any = SimpleNamespace(_accumulative_counts=2)
    if several:
        wrapper = SimpleNamespace(optim_wrappers=dict(one=SimpleNamespace(_accumulative_counts=1), two=wrapper))
    run = SimpleNamespace(model=Net(), optim_wrapper=wrapper, logger=SimpleNamespace(info=print))
    CompileHook(backend='eager').before_train(run)
    with pytest.raises(ConfigError, match=r'accumulative_counts to 1'):
        CompileHook(mode='reduce-overhead').before_train(run)


@pytest.mark.gpu
@pytest.mark.skipif(TORCH < (2, 2), reason='refused')
def test_a_run_of_graphs_is_the_same_run(tmp_path: Path) -> None:
    expected = train(tmp_path / 'plain', [], 4).model.state_dict()
    hook = dict(type='mmgate.CompileHook', mode='reduce-overhead')
    torch.testing.assert_close(train(tmp_path / 'graphs', [hook], 4).model.state_dict(), expected)


def detector(**head: Any) -> nn.Module:
    cfg = Config.fromfile(DEMO)
    cfg.model.bbox_head.update(head)
    init_default_scope('mmdet')
    torch.manual_seed(0)
    model = MODELS.build(cfg.model)
    model.init_weights()
    return model.train()


def losses(model: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    torch.manual_seed(1)  # of the images and the dropout
    batch = zoo.batch(Config(dict(model={}, default_scope='mmdet')))
    with torch.autocast('cpu', dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        found = model(**batch, mode='loss')
    sum(found.values()).backward()
    return {name: loss.detach().float().reshape(()) for name, loss in found.items()}


def test_coordinates_stay_float32_in_bfloat16() -> None:
    """Of the whole model's losses :func:`test_all_parts_work_together` has the values."""
    model = detector()
    found: list[Tensor] = []
    for name, module in model.named_modules():
        if name == 'bbox_head' or name.endswith('sampling_offsets'):
            module.register_forward_hook(lambda module, args, output: found.extend(output) or None)
    losses(model, torch.bfloat16)
    assert torch.bfloat16 in {x.dtype for x in found}, 'without the hook there is nothing to mend'
    found.clear(), model.zero_grad()
    HOOKS.build(dict(type='mmgate.Float32Hook')).before_run(SimpleNamespace(model=model))
    with mmgate.record(model, ['locations']) as recording:
        losses(model, torch.bfloat16)
    found += [notes['locations'].last for notes in recording.values()]
    assert {x.dtype for x in found} == {torch.float32} and len(recording) == 4
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert grads and all(g.isfinite().all() and g.dtype == torch.float32 for g in grads)


def test_mmcvs_roi_align_runs_in_bfloat16_if_it_is_kept_in_float32() -> None:
    """It has no kernel of bfloat16, which troubleshooting.md says; the hook's path finds it in Mask R-CNN."""
    layer = RoIAlign(2)
    features = torch.rand(1, 3, 8, 8).bfloat16()
    boxes = torch.tensor([[0.0, 1.0, 1.0, 6.0, 6.0]])
    with pytest.raises(RuntimeError, match="not implemented for 'BFloat16'"):
        layer(features, boxes.bfloat16())
    keep_float32(layer)
    with torch.autocast('cpu', torch.bfloat16):
        assert layer(features, boxes).dtype is torch.float32
    assert path_regex('**.roi_layers.*').fullmatch('roi_head.bbox_roi_extractor.roi_layers.0')


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16])
def test_float32_changes_nothing_without_autocast(dtype: torch.dtype) -> None:
    layer, x = nn.Linear(3, 2).to(dtype), torch.randn(1, 3, dtype=dtype)
    expected = layer(x)
    for _ in range(2):  # a second run of the same model
        keep_float32(layer)
    assert torch.equal(layer(x), expected)


def test_a_module_without_parameters_is_where_its_inputs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """RoIAlign on a GPU, where autocast may be on while it is off on the CPU."""
    asked: list[str] = []
    monkeypatch.setattr('mmgate.speed.hooks.autocast_dtype', asked.append)
    for layer in (nn.ReLU(), nn.Linear(2, 2, device='meta')):
        keep_float32(layer)
        layer(torch.empty(2, device='meta'))
    assert asked == ['meta', 'meta']


def test_float32_hands_on_what_is_no_tensor() -> None:
    class Scaled(nn.Module):
        def forward(self, x: list[Tensor], factor: int, *, shift: Tensor | None = None) -> Tensor:
            return x[0] * factor if shift is None else x[0] * factor + shift

    module = Scaled()
    keep_float32(module)
    given = [torch.ones(2, dtype=torch.bfloat16)]
    assert module(given, 3, shift=None).tolist() == [3.0, 3.0]
    assert module(x=given, factor=3, shift=torch.ones(2)).dtype == torch.float32


def test_all_parts_work_together() -> None:
    """As the fast configs have them, on the demo's detector."""
    fast = Config.fromfile(DEMO.with_name('plug-deformable-detr-refine-fast-bf16_r50_8xb4-50e_coco.py'))
    model = detector()
    plain = deepcopy(model)
    lines: list[str] = []
    run = SimpleNamespace(model=model, logger=SimpleNamespace(info=lines.append))
    counters.clear()
    for each in fast.custom_hooks:
        hook = HOOKS.build(dict(each, backend='eager') if each.type == 'mmgate.CompileHook' else each)
        hook.before_run(run)
        hook.before_train(run)
    expected, actual = losses(plain, None), losses(model, torch.bfloat16)
    for name, loss in actual.items():
        torch.testing.assert_close(loss, expected[name], rtol=0.05, atol=0.02, msg=lambda m, n=name: f'{n}: {m}')
    assert list(model.state_dict()) == list(plain.state_dict())
    assert lines == [
        'CompileHook: backbone, encoder.layers.0, encoder.layers.1, decoder are compiled as they are first called.'
    ]
    # The decoder is one graph, with the refinement of its reference points, and so is each other part.
    assert TORCH < (2, 7) or not counters['graph_break']


def test_tf32_is_allowed_during_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_float32_matmul_precision()
    for has_gpu, during in ((False, before), (True, 'high')):
        monkeypatch.setattr(torch.cuda, 'is_available', lambda found=has_gpu: found)
        hook = HOOKS.build(dict(type='mmgate.TF32Hook'))
        hook.before_run(None)
        assert torch.get_float32_matmul_precision() == during
        hook.after_run(None)
        assert torch.get_float32_matmul_precision() == before


def test_channels_last_is_for_maps_and_ends_after_the_part() -> None:
    part = nn.Flatten(0)
    seen: list[Any] = []
    part.forward = lambda *args: seen.extend(args) or args  # type: ignore[method-assign]
    model = nn.ModuleDict(dict(part=part))
    for _ in range(2):  # a second run of the same model
        HOOKS.build(dict(type='mmgate.ChannelsLastHook', paths=['part'])).before_run(SimpleNamespace(model=model))
    assert len(part._forward_pre_hooks) == 1
    given = torch.zeros(1, 2, 3), 'tokens', (torch.zeros(1, 2, 3, 3),)  # maps as a neck gets them
    output = part(*given)
    (tokens, text, (maps,)), (out_tokens, out_text, (out_maps,)) = seen, output
    assert tokens is out_tokens is given[0] and text is out_text is given[1]
    assert maps.is_contiguous(memory_format=torch.channels_last) and out_maps.is_contiguous()


class _Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class _Shifted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1 + super().forward(x)


def pickled(module: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize('copied', [copy, deepcopy, pickled])
def test_a_copy_has_the_mixins_in_their_order_and_is_not_compiled(copied: Any) -> None:
    layer = nn.Linear(3, 2)
    layer.__class__ = derived_class(_Shifted, derived_class(_Doubled, nn.Linear, ''), 'Shifted')
    layer.compile(backend='eager')
    found = copied(layer)
    assert type(found) is type(layer) and type(found).__name__ == 'ShiftedLinear'
    assert layer._compiled_call_impl is not None and found._compiled_call_impl is None
    x = torch.randn(4, 3)
    assert torch.equal(found(x), 1 + 2 * nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize('copied', [deepcopy, pickled])
def test_a_gate_goes_on_and_off_in_a_module_that_keeps_float32(copied: Any) -> None:
    model: Any = nn.ModuleDict(dict(attn=nn.MultiheadAttention(16, 2)))
    swap_attention(model, dict(path='attn', type='PLuGMultiheadAttention', init='paper'))
    keep_float32(model['attn'])
    x = torch.randn(3, 1, 16)
    gated, found = model['attn'](x, x, x)[0], copied(model)
    assert torch.equal(found['attn'](x, x, x)[0], gated)
    with gates_disabled(model):
        off = model['attn'](x, x, x)[0]
        with torch.autocast('cpu', torch.bfloat16):
            assert torch.equal(model['attn'](x, x, x)[0], off) and not torch.equal(off, gated)
    with pytest.raises(ConfigError, match='was derived from the gated one after gating'):
        restore_attention(model)
