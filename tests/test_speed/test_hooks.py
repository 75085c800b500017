"""Parts of a model compiled or kept in float32 during training."""

from __future__ import annotations

import pickle
from copy import deepcopy
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

import mmgate.gates.base.deformable as layer_file
from mmgate.errors import ConfigError
from mmgate.rules import path_regex
from mmgate.speed.hooks import CompileHook, Float32Hook, keep_float32


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


@pytest.mark.parametrize(
    ('paths', 'named'),
    [
        (None, 'backbone, encoder.layers.0, encoder.layers.1'),
        ('encoder.layers.*', 'encoder.layers.0, encoder.layers.1'),
        (['backbone', 'backbone.*'], 'backbone'),
        (['**.1'], 'backbone.1, encoder.layers.1'),
        ('again', 'again'),
    ],
    ids=['default', 'one', 'nested', 'anywhere', 'by a second name'],
)
def test_paths_name_the_parts(paths: Any, named: str) -> None:
    assert run(CompileHook(paths), Net()) == [f'CompileHook: {named} are compiled as they are first called.']


@pytest.mark.parametrize(
    ('paths', 'message'),
    [
        (['backbone', 'encodr.*'], r"no module of Net matches 'encodr\.\*'; its parts are .*encoder, head"),
        (['neck', 'x.*'], r"matches 'neck', 'x\.\*';"),
        ([('path', 'x')], 'paths must be a pattern or a list'),
        ([], 'paths must be a pattern or a list'),
    ],
    ids=['one_of_two', 'both', 'no_list', 'empty'],
)
def test_a_pattern_without_a_match_is_refused(paths: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(CompileHook(paths), Net())


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


@pytest.mark.skipif(TORCH >= (2, 2), reason='torch has what the graphs need')
def test_graphs_are_refused_by_an_older_torch() -> None:
    with pytest.raises(ConfigError, match=r'new in torch 2.2, this is torch 2.1.*leave out the mode'):
        CompileHook(mode='reduce-overhead')


@pytest.mark.gpu
@pytest.mark.skipif(TORCH < (2, 2), reason='refused')
def test_a_run_of_graphs_is_the_same_run(tmp_path: Path) -> None:
    expected = train(tmp_path / 'plain', [], 4).model.state_dict()
    hook = dict(type='mmgate.CompileHook', mode='reduce-overhead')
    torch.testing.assert_close(train(tmp_path / 'graphs', [hook], 4).model.state_dict(), expected)


def test_one_of_the_defaults_has_to_match() -> None:
    net = Net()
    del net.encoder
    assert 'CompileHook: backbone are' in run(CompileHook(), net)[0]
    with pytest.raises(ConfigError, match='no module of Linear matches'):
        run(CompileHook(), nn.Linear(2, 2))


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


def test_coordinates_stay_float32_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    model = detector()
    keys = list(model.state_dict())
    expected = losses(model, None)
    seen: list[tuple[torch.dtype, ...]] = []
    operator = layer_file.ms_deform_attn

    def recorded(value: Tensor, shapes: Tensor, start: Tensor, points: Tensor, *rest: Any, **options: Any) -> Tensor:
        seen.append((value.dtype, points.dtype, options['reference_points'].dtype))
        return operator(value, shapes, start, points, *rest, **options)

    predicted: list[torch.dtype] = []
    by_feat = model.bbox_head.loss_by_feat
    monkeypatch.setattr(layer_file, 'ms_deform_attn', recorded)
    monkeypatch.setattr(
        model.bbox_head, 'loss_by_feat', lambda *args: predicted.extend(x.dtype for x in args[:2]) or by_feat(*args)
    )
    losses(model, torch.bfloat16)
    assert (torch.bfloat16, torch.bfloat16, torch.bfloat16) in seen, 'without the hook there is nothing to mend'
    seen.clear(), predicted.clear(), model.zero_grad()
    HOOKS.build(dict(type='mmgate.Float32Hook')).before_run(SimpleNamespace(model=model))
    actual = losses(model, torch.bfloat16)
    assert set(seen) == {(torch.bfloat16, torch.float32, torch.float32)} and len(seen) == 4
    assert predicted == [torch.float32, torch.float32]
    for name, loss in actual.items():
        torch.testing.assert_close(loss, expected[name], rtol=0.05, atol=0.02, msg=lambda m, n=name: f'{n}: {m}')
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert grads and all(g.isfinite().all() and g.dtype == torch.float32 for g in grads)
    assert list(model.state_dict()) == keys


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


def test_float32_changes_nothing_without_autocast() -> None:
    model = detector()
    expected = losses(model, None)
    for _ in range(2):  # a second run of the same model
        Float32Hook().before_run(SimpleNamespace(model=model))
    torch.testing.assert_close(losses(deepcopy(model), None), expected, rtol=0, atol=0)


@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16])
def test_float32_leaves_a_model_of_another_dtype_as_it_is(dtype: torch.dtype) -> None:
    layer, x = nn.Linear(3, 2).to(dtype), torch.randn(1, 3, dtype=dtype)
    expected = layer(x)
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


def test_float32_survives_a_pickle() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    keep_float32(model[0])
    loaded = pickle.loads(pickle.dumps(model))
    keep_float32(loaded[0])
    assert type(loaded[0]) is type(model[0]) and list(loaded.state_dict()) == ['0.weight', '0.bias']
    with torch.autocast('cpu', torch.bfloat16):
        given = torch.randn(1, 3)
        assert loaded(given).dtype == torch.float32
    assert torch.equal(loaded(given), model(given))


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
    assert TORCH < (2, 5) or not counters['graph_break']


def test_each_decoder_layer_of_a_masked_transformer_is_compiled() -> None:
    """Its head goes through the layers, so that a compiled decoder would never be called."""
    layers = nn.ModuleDict(dict(layers=nn.ModuleList([nn.Linear(2, 2)])))
    head = nn.ModuleDict(dict(pixel_decoder=nn.Linear(2, 2), transformer_decoder=layers))
    (line,) = run(CompileHook(), nn.ModuleDict(dict(decode_head=head)))
    assert line.startswith('CompileHook: decode_head.transformer_decoder.layers.0 are')


def test_tf32_is_allowed_during_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_float32_matmul_precision()
    for has_gpu, during in ((False, before), (True, 'high')):
        monkeypatch.setattr(torch.cuda, 'is_available', lambda found=has_gpu: found)
        hook = HOOKS.build(dict(type='mmgate.TF32Hook'))
        hook.before_run(None)
        assert torch.get_float32_matmul_precision() == during
        hook.after_run(None)
        assert torch.get_float32_matmul_precision() == before


def test_channels_last_changes_no_result() -> None:
    model = detector()
    expected = losses(deepcopy(model), None)
    seen: list[bool] = []
    for _ in range(2):
        HOOKS.build(dict(type='mmgate.ChannelsLastHook')).before_run(SimpleNamespace(model=model))
    assert len(model.backbone._forward_pre_hooks) == 1
    model.backbone.layer4.register_forward_hook(
        lambda module, args, y: seen.append(y.is_contiguous(memory_format=torch.channels_last))
    )
    torch.testing.assert_close(losses(deepcopy(model), None), expected, rtol=1e-3, atol=1e-4)
    assert seen == [True]


def test_channels_last_leaves_other_inputs() -> None:
    part = nn.Flatten(0)
    seen: list[Any] = []
    part.forward = lambda *args: seen.extend(args) or args  # type: ignore[method-assign]
    HOOKS.build(dict(type='mmgate.ChannelsLastHook', paths=['part'])).before_run(
        SimpleNamespace(model=nn.ModuleDict(dict(part=part)))
    )
    given = torch.zeros(1, 2, 3), 'tokens', (torch.zeros(1, 2, 3, 3),)  # maps as a neck gets them
    output = part(*given)
    (tokens, text, (maps,)), (out_tokens, out_text, (out_maps,)) = seen, output
    assert tokens is out_tokens is given[0] and text is out_text is given[1]
    assert maps.is_contiguous(memory_format=torch.channels_last) and out_maps.is_contiguous()
