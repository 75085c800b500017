"""Whole training steps: the same losses in fewer operators, and with few waits for the device."""

from __future__ import annotations

import traceback
from collections import Counter
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import TORCH
from helpers.counting import Counts
from helpers.matching import objects
from mmcv.ops import multi_scale_deform_attn
from mmdet.models.dense_heads import DETRHead
from mmdet.models.detectors import DeformableDETR
from mmdet.models.layers import CdnQueryGenerator, DeformableDetrTransformerEncoder
from mmdet.models.task_modules.assigners import HungarianAssigner
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.model import BaseModel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from mmgate.benchmarks import training
from mmgate.gates import plug
from mmgate.mm.config_file import read_config
from mmgate.speed.derived import derived_class
from mmgate.speed.hooks import CompileHook, MatchOnceHook
from mmgate.speed.matching import model as models

PEERS = {
    'deformable_detr': 'mmdet::deformable_detr/deformable-detr-refine_r50_16xb2-50e_coco.py',
    'dino': 'mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py',
    'mask2former': 'mmseg::mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py',
}
OURS = {
    'deformable_detr': 'plug/deformable_detr/plug-deformable-detr-refine_r50_8xb4-50e_coco.py',
    'dino': 'plug/dino/plug-dino-4scale_r50_8xb2-12e_coco.py',
    'mask2former': 'plug/mask2former/plug-mask2former_r50_8xb2-160k_ade20k-512x512.py',
}
SIZE = (64, 96)
WAITS = ('_local_scalar_dense', 'nonzero', '_unique2', 'masked_select', 'equal')
# Functions that wait on a CPU only (one-hot labels of focal loss, among others), or read what is on the host anyway.
# The class of mmcv 2.1's deformable attention checks its sizes in each layer: its own wait, where no rule replaces it.
FILES = ('focal_loss.py', 'multi_scale_deform_attn.py')
ON_HOST = ('stack_batch', '_get_value', 'multi_scale_deformable_attn_pytorch')


def config(name: str) -> Config:
    cfg = read_config(name if '::' in name else f'configs/{name}')
    if 'dino' in name:
        cfg.model.num_queries = 50
    if 'decode_head' in cfg.model:
        cfg.model.data_preprocessor.size = SIZE
        cfg.model.decode_head.train_cfg.num_points = 64
    return cfg


class Waits(Counts):
    """Counts operators that start a kernel, and those that wait for the GPU by where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix('aten::') in WAITS:
            frames = [frame for frame in traceback.extract_stack() if 'torch' not in frame.filename]
            callers = [frame.name for frame in frames]
            if not set(ON_HOST) & set(callers) and not any(frame.filename.endswith(FILES) for frame in frames):
                self.waits[' > '.join(callers[-4:-1])] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


class Copies(TorchFunctionMode):
    """Counts copies to the host."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.Tensor.cpu
        return func(*args, **(kwargs or {}))


def operators(cfg: Config, *, fused: bool = False) -> tuple[int, Counter[str]]:
    """Return the number of operators of a training step, and its waits by where they are.

    Args:
        cfg: The config.
        fused: True counts no operator of an optimizer that torch fuses on GPUs alone, as below 2.4.
    """
    whole = torch.optim.AdamW.step

    def one_kernel(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return whole(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if fused and TORCH < (2, 4):
            patch.setattr(torch.optim.AdamW, 'step', one_kernel)
        step = training._step(cfg, SIZE, 2, 'cpu', None)
        step(torch.zeros(()))
        with Waits() as counted, Copies() as copies:
            step(torch.zeros(()))
    return counted.count, counted.waits + Counter(copies=copies.count)


# The most operators of a step as configured, over mmdet's or mmseg's. Deformable DETR has 2,671, where mmdet has 7,800.
MOST = {'deformable_detr': 0.35, 'dino': 0.3, 'mask2former': 0.51}
# The most waits. mmdet's pixel decoder waits nine times for the sizes of its three levels, one after the other; the
# gradients' norm is one more with torch 2.1.
MOST_WAITS = {'deformable_detr': 3, 'dino': 3, 'mask2former': 13}


@pytest.fixture
def _one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count neither side's attention, which is a kernel on a GPU and many operators on a CPU."""
    for module, name in (
        (multi_scale_deform_attn, 'multi_scale_deformable_attn_pytorch'),
        (plug, 'plug_attention'),
    ):
        monkeypatch.setattr(module, name, Counts.without(getattr(module, name)))


@pytest.mark.usefixtures('_one_kernel')
@pytest.mark.parametrize('name', PEERS)
def test_a_step_has_few_operators_and_waits(name: str) -> None:
    peer, _ = operators(config(PEERS[name]))
    ours, waits = operators(config(OURS[name]), fused=True)
    assert ours <= MOST[name] * peer, f'{ours} of {peer}'
    assert waits.total() <= MOST_WAITS[name], waits


def test_a_compiled_step_has_few_operators_outside_of_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def before_train(self: CompileHook, runner: Any) -> None:
        for module in self.modules(runner).values():
            module.forward = Counts.without(module.forward)

    monkeypatch.setattr(CompileHook, 'before_train', before_train)
    count, waits = operators(config(OURS['deformable_detr'].replace('-refine_', '-refine-fast_')), fused=True)
    assert count <= 1000
    assert waits.total() <= 3, waits


def draw_boxes_anew(generator: Any) -> None:
    """Seed the noise of boxes. Before it mmdet draws as many numbers as labels are replaced, ours one a label."""
    boxes = generator.generate_dn_bbox_query
    generator.generate_dn_bbox_query = lambda *args: (torch.manual_seed(1), boxes(*args))[1]


def detection_samples(counts: tuple[int, ...]) -> list[DetDataSample]:
    generator = torch.Generator().manual_seed(0)
    meta = dict(img_shape=(64, 96))
    return [DetDataSample(gt_instances=objects(generator, count), metainfo=meta) for count in counts]


@pytest.mark.parametrize('counts', [(3, 0, 5), (1,), (0, 0)], ids=str)
def test_denoising_queries_are_mmdets(counts: tuple[int, ...]) -> None:
    """All but the random labels, which are drawn in other numbers: here from one class."""
    results = []
    for kind in (CdnQueryGenerator, derived_class(models.DenoisingWithoutWaits, CdnQueryGenerator, '')):
        torch.manual_seed(0)
        generator = kind(1, 8, 12, group_cfg=dict(num_dn_queries=20))
        samples = detection_samples(counts)
        for sample in samples:
            sample.gt_instances.labels.zero_()
        draw_boxes_anew(generator)
        results.append(generator(samples))
    torch.testing.assert_close(results[1][:3], results[0][:3])
    assert results[1][3] == results[0][3]


@pytest.mark.parametrize(
    ('base', 'own', 'changed'),
    [
        (CdnQueryGenerator, 'get_num_groups', True),
        (CdnQueryGenerator, 'generate_dn_mask', False),
        (DeformableDETR, 'gen_encoder_output_proposals', False),
        (DeformableDetrTransformerEncoder, 'get_encoder_reference_points', False),
    ],
)
def test_what_a_class_overrides_is_left(base: type, own: str, changed: bool) -> None:
    """It may need the sizes of feature maps as a tensor."""
    kind: Any = type('Another', (base,), {own: None})
    assert any(fits(kind.__new__(kind)) for mixin, fits in models.MIXINS.items() if issubclass(mixin, base)) is changed


def test_labels_of_denoising_queries_are_as_noisy_as_mmdets() -> None:
    kind = derived_class(models.DenoisingWithoutWaits, CdnQueryGenerator, '')
    generator = kind(50, 1, 12, label_noise_scale=0.5)
    generator.label_embedding.weight.data = torch.arange(50.0)[:, None]
    labels = torch.full((500,), 7)
    noisy = generator.generate_dn_label_query(labels, 10)[:, 0]
    assert len(noisy) == 10_000 and 0.23 < (noisy != 7).float().mean() < 0.26
    assert len(noisy.unique()) == 50


@pytest.mark.parametrize('name', PEERS)
def test_a_step_has_mmdets_losses(name: str) -> None:
    """Names, order and values, in images of unequal size; denoising's random labels are left out."""
    cfg = config(PEERS[name])
    if name == 'dino':
        cfg.model.dn_cfg.label_noise_scale = 1e-9
    training.init_default_scope(cfg.default_scope)
    torch.manual_seed(0)
    training._drop_pretrained(cfg.model)
    model = training.MODELS.build(deepcopy(cfg.model))
    model.init_weights()
    if name == 'dino':
        draw_boxes_anew(model.dn_query_generator)
    model.eval()
    for module in model.modules():
        module.training = module is model
    data = training.random_batch(cfg, SIZE, 2)
    if name != 'mask2former':
        data['inputs'][1] = data['inputs'][1][:, :50, :70].contiguous()
        data['data_samples'][1].set_metainfo(dict(img_shape=(50, 70)))
    results = []
    for _ in range(2):
        batch = model.data_preprocessor(deepcopy(data), True)
        torch.manual_seed(0)
        results.append(model.parse_losses(model(**batch, mode='loss')))
        MatchOnceHook().before_train(SimpleNamespace(model=model))
    (total, log), (our_total, our_log) = results
    assert list(our_log) == list(log)
    torch.testing.assert_close(our_total, total, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dict(our_log), {k: v.reshape(()) for k, v in log.items()}, rtol=1e-4, atol=1e-4)


class Model(BaseModel):
    def forward(self) -> None: ...


class OtherAssigner(HungarianAssigner):
    def assign(self, *args: Any, **kwargs: Any) -> Any: ...


def test_a_head_that_assigns_otherwise_is_left() -> None:
    training.init_default_scope('mmdet')
    model = Model()
    model.head = DETRHead(3, 16)
    model.head.assigner.__class__ = OtherAssigner
    lines: list[str] = []
    run = SimpleNamespace(model=model, logger=SimpleNamespace(info=lines.append))
    MatchOnceHook().before_train(run)
    assert type(model.head) is DETRHead
    assert len(lines) == 1 and 'a head stays as it is: MatchedOnce: DETRHead has targets, losses or costs' in lines[0]


def test_proposals_in_bfloat16_are_mmdets() -> None:
    """In a map of more than 256 columns, which bfloat16 would round."""
    size = (2, 267)
    shapes = torch.tensor([size])
    memory = torch.zeros(1, 2 * 267, 8, dtype=torch.bfloat16)
    results = []
    for kind in (DeformableDETR, derived_class(models.KnownSizesDetector, DeformableDETR, '')):
        detector = kind.__new__(kind)
        torch.nn.Module.__init__(detector)
        detector.memory_trans_fc = detector.memory_trans_norm = torch.nn.Identity()
        results.append(detector.gen_encoder_output_proposals(memory, None, shapes))
        shapes.on_cpu = [size]
    torch.testing.assert_close(results[1], results[0])


def test_a_model_without_such_a_head_trains_as_it_is() -> None:
    """A config may have inherited the hook, and name another head."""
    model, said = Model(), []
    MatchOnceHook().before_train(SimpleNamespace(model=model, logger=SimpleNamespace(info=said.append)))
    assert said == ['MatchOnceHook: Model has no head that derives from mmdet.DETRHead or mmdet.Mask2FormerHead.']
