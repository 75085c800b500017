"""A config trains as its paper says (tables of families; every config belongs to one), and as its partner does."""

from __future__ import annotations

import ast
import re
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import CONFIG_FILES, CONFIGS, ROOT, one_of_each, run_python, skip_unless_readable
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper

import mmgate  # noqa: F401  (mmgate:: and, with the forks, mmseg:: resolve from here on)
from mmgate.adapter import unused_names
from mmgate.analysis.structure import build_structure
from mmgate.mm.config_file import differences
from mmgate.mm.speedups import SPEEDUPS

ONE, THREE = dict(epochs=12, drops=[8, 11]), dict(epochs=36, drops=[27, 33])
SWIN_DETECTOR = dict(lr=1e-4, weight_decay=0.05, warm_up=500)
IMAGENET = dict(lr=1e-3, weight_decay=0.05, epochs=300)
GATED = '(?!plug-|sdpa-gate-)[a-z]+(-[a-z]+)*'  # any gate whose paper trains a host as ours does
MASK2FORMER = dict(lr=1e-4, weight_decay=0.05, power=0.9)

# what the papers and the authors' public configs say, by the pattern of the name; all train with AdamW, in float32
RECIPES: dict[str, dict[str, Any]] = {
    r'([a-z-]+-)?deformable-detr.*_r50_8xb4-50e_coco': dict(lr=2e-4, weight_decay=5e-5, epochs=50, drops=[40]),
    r'[a-z-]+-mask2former.*_8xb2-160k_ade20k-(512x512|640x640)': dict(iterations=160000, **MASK2FORMER),
    r'(plug|ungated)-mask2former_.*_8xb2-lsj-50e_coco(-panoptic)?': dict(
        lr=1e-4, weight_decay=0.05, iterations=368750, drops=[327778, 355092]
    ),
    rf'({GATED}-)?mask-rcnn_pvt-[tsml]_1x_coco': dict(lr=2e-4, weight_decay=1e-4, warm_up=500, **ONE),
    rf'({GATED}-)?retinanet_pvt-[tsml]_1x_coco': dict(lr=1e-4, weight_decay=1e-4, warm_up=500, **ONE),
    rf'({GATED}-)?(cascade-)?mask-rcnn_swin-[tsb]_ms-crop-1x_coco': dict(**SWIN_DETECTOR, **ONE),
    rf'({GATED}-)?(cascade-)?mask-rcnn_swin-[tsb]_ms-crop-3x_coco': dict(**SWIN_DETECTOR, **THREE),
    rf'({GATED}-)?semantic-fpn_pvt-[tsml]_8xb2-40k_ade20k-512x512': dict(
        lr=2e-4, weight_decay=1e-4, iterations=40000, power=0.9
    ),
    r'([a-z-]+-)?upernet_(swin-[tsb]|dinov2-s14)_8xb2-160k_ade20k-512x512': dict(
        lr=6e-5, weight_decay=0.01, iterations=160000, power=1.0, warm_up=1500
    ),
    r'(plug|ungated)-(dino-4scale_r50_8xb2-12e|grounding-dino_swin-t_finetune_16xb2-1x)_coco': dict(  # mmdet's own
        lr=1e-4, weight_decay=1e-4, epochs=12, drops=[11]
    ),
    rf'({GATED}-)?pvt-[tsml](-no-gate)?_8xb128-300e_in1k': dict(**IMAGENET, warm_up=5),
    r'((plug|sdpa-gate|plug-timm)-)?deit-[tsb].*_8xb128-300e_in1k|plug-pvt-t_8xb128-300e_in1k': dict(
        **IMAGENET, warm_up=5
    ),
    r'(deit-s|pvt-m)_8xb64-300e_in1k-(256|416)px': dict(IMAGENET, lr=5e-4, warm_up=5),
    rf'{GATED}-deit-[tsb](-no-gate)?_8xb128-300e_in1k': dict(**IMAGENET, warm_up=20),
    r'(agent-)?cswin-[ts]_8xb128-300e_in1k': dict(**IMAGENET, warm_up=20),
    rf'({GATED}-)?(pvtv2-b[01]|swin-[tsb])_8xb128-300e_in1k': dict(**IMAGENET, warm_up=20),
    rf'{GATED}-swin-t-.*_8xb128-300e_in1k': dict(**IMAGENET, warm_up=20),
    r'(agent-)?cswin-b_8xb128-300e_in1k': dict(IMAGENET, weight_decay=0.1, warm_up=20),
    r'(plug-pvtv2-b1|(plug-)?(visformer-t|gcvit-xxt|tinyvit-5m|xcit-t12|t2t-vit-10))_8xb128-300e_in1k': dict(
        **IMAGENET, warm_up=5
    ),
    r'(plug-)?lvvit-t_8xb128-300e_in1k': dict(IMAGENET, lr=1.6e-3, warm_up=5),
    r'(plug-)?vitae-t_4xb128-300e_in1k': dict(IMAGENET, weight_decay=0.03, warm_up=10),
    r'((agent|saga)-)?swin-[sb]_8xb32-30e_in1k-(256|288|320|352|384)px': dict(
        lr=1e-5, weight_decay=1e-8, epochs=30, warm_up=5
    ),
    r'(agent-)?cswin-b_8xb32-30e_in1k-384px': dict(lr=2.5e-6, weight_decay=1e-8, epochs=30),
    r'(agent-deit|(agent-)?swin)-s_8xb64-300e_in1k-(288|448)px': dict(IMAGENET, lr=5e-4, warm_up=20),
    r'agent-pvt-m_8xb64-300e_in1k-256px': dict(IMAGENET, lr=5e-4, warm_up=5),
    r'(dgvit|vit|diff-vit).*_1xb128-100e_[a-z0-9]+': dict(lr=3e-4, weight_decay=0.01, epochs=100),
    r'(dgvit|(sdpa-gate-)?vit)(-noise)?_1xb64-40e_digits': dict(lr=1e-3, weight_decay=0.01, epochs=40),  # ours
    r'.*_1xb(8|32)-(8e|12e|1k)_shapes(-128x128)?': {},  # the demos: ours, small and fast
    r'.*_1xb4-(12e|2e|1k|2k|150)_(bccd|facemask|camvid(-day)?-160x128)': {},  # ours, small
}
DROP_PATH = {
    r'agent-cswin-[tsb]_8xb128': dict(t=0.2, s=0.4, b=0.5),
    r'agent-cswin-b_8xb32': dict(b=0.7),
    r'((agent|saga)-)?pvt-': dict(t=0.1, s=0.1, m=0.3, l=0.3),
    r'(agent|saga)-swin-': dict(t=0.2, s=0.3, b=0.5),
    r'agent-deit': dict(t=0.0, s=0.1, b=0.3),
    r'saga-deit': dict(t=0.0),
    r'(agent|saga)-mask-rcnn_pvt': dict(t=0.1, s=0.2, m=0.1, l=0.2),
    r'(agent|saga)-retinanet_pvt': dict(t=0.1, s=0.1, m=0.2, l=0.3),
    r'(agent|saga)-semantic-fpn_pvt': dict(t=0.1, s=0.1, m=0.2, l=0.1),
    r'(agent|saga)-(cascade-)?mask-rcnn_swin': dict(t=0.1, s=0.1, b=0.4),
    r'(agent|saga)-upernet_swin': dict(t=0.3, s=0.3, b=0.5),
    r'(plug-)?deit': dict(t=0.1, s=0.1),
    r'flatten-deit': dict(t=0.0),
    r'flatten-swin': dict(t=0.2),
    r'lvvit|vitae': dict(t=0.1),
}
AGENTS = dict(AgentPVT=(144, 256, 784, 784), AgentSwin=(81, 144, 196, 49))


def recipe_of(cfg: Config) -> dict[str, Any]:
    """Return what a config says about its optimiser and schedule, each fact only if it is there."""
    optimizer, length = cfg.optim_wrapper.optimizer, cfg.train_cfg
    facts = dict(
        wrapper=cfg.optim_wrapper.get('type', 'OptimWrapper'),
        type=optimizer.type,
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        epochs=length.get('max_epochs'),
        iterations=length.get('max_iters'),
    )
    schedulers = cfg.param_scheduler
    for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
        if scheduler.type == 'LinearLR':
            facts['warm_up'] = scheduler.end
        elif scheduler.type == 'MultiStepLR':
            facts['drops'] = list(scheduler.milestones)
        elif scheduler.type == 'PolyLR':
            facts['power'] = scheduler.power
    return {name: fact for name, fact in facts.items() if fact is not None}


def recipes_for(path: Path) -> list[str]:
    return [pattern for pattern in RECIPES if re.fullmatch(pattern, path.stem)]


def test_every_config_has_one_recipe() -> None:
    assert {path.stem: recipes_for(path) for path in CONFIGS if len(recipes_for(path)) != 1} == {}


@pytest.mark.parametrize('path', one_of_each(CONFIGS, recipes_for), ids=lambda path: path.stem)
def test_a_config_trains_as_its_paper_says(path: Path) -> None:
    skip_unless_readable(path)
    cfg, name = Config.fromfile(path), path.stem
    wrapper = 'AmpOptimWrapper' if 'bf16' in name else 'OptimWrapper'
    expected = dict(wrapper=wrapper, type='AdamW', **RECIPES[recipes_for(path)[0]])
    found = recipe_of(cfg)
    assert {key: found.get(key) for key in expected} == expected
    if path.parent.parent.name in ('agent', 'saga') and 'shapes' not in name and 'pvtv2' not in name:
        check_backbone(cfg, name)

    before = deepcopy(cfg.to_dict())
    for part in ('groups', 'matcher'):
        SPEEDUPS[part](cfg)
    assert not list(differences(before, cfg.to_dict(), '')), 'it lacks what makes a step faster'


def test_no_config_assigns_a_name_twice() -> None:
    """Python keeps the second value alone; what the first one changes of a base would be lost."""
    for path in CONFIG_FILES:
        assigned = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign)]
        names = [target.id for node in assigned for target in node.targets if isinstance(target, ast.Name)]
        assert len(names) == len(set(names)), path


def check_backbone(cfg: Config, name: str) -> None:
    check_drop_path(cfg, name)
    kind = cfg.model.backbone.type.removeprefix('mmgate.')
    expected = () if cfg.default_scope == 'mmpretrain' else AGENTS.get(kind, ())
    assert tuple(cfg.model.backbone.get('agent_nums', ())) == expected


def check_drop_path(cfg: Config, name: str) -> None:
    (rates,) = (rates for pattern, rates in DROP_PATH.items() if re.match(pattern, name))
    size = re.search(r'(?:pvt|swin|deit|lvvit|vitae)-(\w)[-_]', name)
    default = 0.0 if re.search('deit|lvvit|vitae', name) else 0.1  # mmpretrain's ViT's, mmdet's
    assert size and cfg.model.backbone.get('drop_path_rate', default) == rates[size[1]]


class Theirs(NamedTuple):
    """What the authors' files say of an ImageNet model; rates for 512 images a step."""

    lr: float
    warm_up_lr: float
    min_lr: float
    warm_up: int
    epochs: int
    weight_decay: float
    clip: float | None
    ema: float | None  # what is kept of the average in a step of ours
    test: tuple[int | tuple[int, int], int | None]  # resized to (an integer: the short edge), cropped to
    repeats: int = 1


# DeiT's two low rates are the same for any number of images, here 1024
DEIT = Theirs(5e-4, 1e-6 / 2, 1e-5 / 2, 5, 300, 0.05, None, 0.99996, (256, 224), 3)
DEFAULTS = Theirs(5e-4, 5e-7, 5e-6, 20, 300, 0.05, 5.0, None, ((256, 256), 224))  # config.py of Agent attention
PVT_FILE = DEFAULTS._replace(warm_up_lr=1e-6, min_lr=1e-5, warm_up=5, clip=None)  # 10 epochs of cool-down aside
CSWIN_FILE = PVT_FILE._replace(warm_up=20, ema=0.99984)
# LeapLabTHU/Agent-Attention, agent_transformer/cfgs and README; facebookresearch/deit, main.py and datasets.py
AUTHORS: dict[str, Theirs] = {
    # its Table 5 has the focused attention beside its own
    r'agent-(deit|swin)-[tsb]_8xb128-300e_in1k|flatten-(deit|swin)-t_8xb128-300e_in1k': DEFAULTS,
    r'agent-deit-s_8xb64-300e_in1k-448px': DEFAULTS._replace(test=((512, 512), 448)),
    r'(agent-)?pvt-t_8xb128-300e_in1k|agent-pvt-s_8xb128-300e_in1k': PVT_FILE,
    r'agent-pvt-[ml]_8xb128-300e_in1k': PVT_FILE._replace(clip=1.0),
    r'agent-pvt-m_8xb64-300e_in1k-256px': PVT_FILE._replace(clip=1.0, test=((292, 292), 256)),
    r'agent-swin-s_8xb64-300e_in1k-288px': DEFAULTS._replace(test=((288, 288), None)),
    r'agent-swin-b_8xb32-30e_in1k-384px': Theirs(2e-5, 2e-8, 2e-7, 5, 30, 1e-8, 5.0, None, ((384, 384), None)),
    r'agent-cswin-[ts]_8xb128-300e_in1k': CSWIN_FILE,
    r'agent-cswin-b_8xb128-300e_in1k': CSWIN_FILE._replace(weight_decay=0.1),
    r'agent-cswin-b_8xb32-30e_in1k-384px': Theirs(  # 20 epochs and 10 of cool-down
        5e-6, 5e-6, 5e-7, 0, 30, 1e-8, None, 0.9998, ((438, 438), 384)
    ),
    r'(plug-)?deit-[ts](-no-residual)?_8xb128-300e_in1k': DEIT,
    # zihangJiang/TokenLabeling, main.py and README: rates for 1024 images, here halved, and what S is trained with
    r'lvvit-t_8xb128-300e_in1k': Theirs(8e-4, 5e-7, 5e-6, 5, 300, 0.05, None, 0.99992, (248, 224)),
    # ViTAE-Transformer/ViTAE-Transformer, Image-Classification/main.py and README
    r'vitae-t_4xb128-300e_in1k': Theirs(1e-3, 1e-6, 1e-5, 10, 300, 0.03, None, 0.99996, (248, 224)),
}
FILES = {path.stem: path for path in CONFIGS}


def config(name: str) -> Config:
    skip_unless_readable(FILES[name])
    return Config.fromfile(FILES[name])


@pytest.mark.parametrize('name', [name for name in FILES if re.fullmatch('|'.join(AUTHORS), name)])
def test_classifiers_train_as_the_authors(name: str) -> None:
    """Their values, the rates for our images a step, against the config's; and every pattern has a config."""
    assert all(any(re.fullmatch(pattern, file) for file in FILES) for pattern in AUTHORS)
    (theirs,) = (theirs for pattern, theirs in AUTHORS.items() if re.fullmatch(pattern, name))
    cfg = config(name)
    check_drop_path(cfg, name)
    optim, share = cfg.optim_wrapper, cfg.auto_scale_lr.base_batch_size / 512
    warm_up = [s for s in cfg.param_scheduler if s.type == 'LinearLR']
    (cosine,) = (s for s in cfg.param_scheduler if s.type in ('CosineAnnealingLR', 'mmgate.CosineLR'))
    pipeline = {t.type: t for t in cfg.test_dataloader.dataset.pipeline}
    resize = pipeline.get('Resize') or pipeline['ResizeEdge']
    assert pipeline == {t.type: t for t in cfg.val_dataloader.dataset.pipeline}
    sampler = cfg.train_dataloader.sampler
    ours = Theirs(
        lr=optim.optimizer.lr / share,
        warm_up_lr=optim.optimizer.lr * (warm_up[0].start_factor if warm_up else 1) / share,
        min_lr=cosine.eta_min / share,
        warm_up=warm_up[0].end if warm_up else 0,
        epochs=cfg.train_cfg.max_epochs,
        weight_decay=optim.optimizer.weight_decay,
        clip=optim.get('clip_grad', {}).get('max_norm'),
        ema=next((1 - hook.momentum for hook in cfg.get('custom_hooks', []) if hook.type == 'EMAHook'), None),
        test=(resize.scale, pipeline.get('CenterCrop', {}).get('crop_size')),
        repeats=sampler.num_repeats if sampler.type == 'RepeatAugSampler' else 1,
    )
    for field, expected, found in zip(Theirs._fields, theirs, ours, strict=True):
        assert found == (pytest.approx(expected) if isinstance(expected, float) else expected), field
    if warm_up:  # test_mm/test_schedule.py has what each rate of this schedule is
        end = theirs.epochs
        assert (cosine.type, cosine.begin, cosine.get('end', end)) == ('mmgate.CosineLR', theirs.warm_up, end)
        assert {s.get('convert_to_iter_based', False) for s in (cosine, *warm_up)} == {
            theirs != DEIT
        }  # whose rates step
    else:  # the rest is the cool-down
        assert (cosine.type, cosine.end) == ('CosineAnnealingLR', 20) and cosine.convert_to_iter_based
    augments = cfg.model.data_preprocessor.batch_augments or dict(augments=[])
    mixes = [] if cfg.model.backbone.get('mix_token') else [('Mixup', 0.8), ('CutMix', 1.0)]
    assert [(a.type, a.alpha) for a in augments['augments']] == mixes
    assert cfg.model.head.loss.label_smooth_val == 0.1
    train = {t.type: t for t in cfg.train_dataloader.dataset.pipeline}
    assert (train['RandAugment'].magnitude_level, train['RandAugment'].magnitude_std) == (9, 0.5)
    assert train['RandomErasing'].erase_prob == 0.25


BIASES = {'an_bias', 'na_bias', 'ah_bias', 'aw_bias', 'ha_bias', 'wa_bias'}
CLASS_BIASES = {'ac_bias', 'ca_bias'}
TABLE, POSITIONS = {'relative_position_bias_table'}, {'position_encoding'}


@pytest.mark.parametrize(
    'name, flat, spared, there',
    [
        # the ImageNet code spares one dimension, biases and a few names; agent biases, of four and five, decay
        ('agent-swin-t_8xb128-300e_in1k', True, TABLE, BIASES | TABLE),
        ('agent-deit-t_8xb128-300e_in1k', True, {'cls_token', 'pos_embed'}, BIASES | CLASS_BIASES),
        ('agent-pvt-t_8xb128-300e_in1k', True, set(), BIASES),
        ('agent-cswin-t_8xb128-300e_in1k', True, set(), BIASES),
        # the public files exempt nothing
        ('agent-mask-rcnn_pvt-t_1x_coco', False, None, BIASES),
        ('agent-retinanet_pvt-s_1x_coco', False, None, BIASES),
        ('agent-semantic-fpn_pvt-t_8xb2-40k_ade20k-512x512', False, None, BIASES),
        # norms, position tables and agent attention's six biases; all else decays, convolutions' biases included
        ('agent-mask-rcnn_swin-t_ms-crop-1x_coco', False, BIASES | TABLE, BIASES | TABLE),
        ('agent-cascade-mask-rcnn_swin-t_ms-crop-3x_coco', False, BIASES | TABLE, BIASES | TABLE),
        ('agent-upernet_swin-t_8xb2-160k_ade20k-512x512', False, BIASES | TABLE, BIASES | TABLE),
        ('saga-mask-rcnn_swin-t_ms-crop-1x_coco', False, POSITIONS | TABLE, POSITIONS | TABLE),
        ('saga-upernet_swin-t_8xb2-160k_ade20k-512x512', False, POSITIONS | TABLE, POSITIONS | TABLE),
    ],
    ids=lambda value: value if isinstance(value, str) else '',
)
def test_parameters_decay_as_the_authors_do(name: str, flat: bool, spared: set[str] | None, there: set[str]) -> None:
    """What has one dimension, if ``flat``, and ``spared`` do not (beside norms, but in files that exempt nothing)."""
    cfg = config(name)
    model = build_structure(cfg)
    groups = build_optim_wrapper(model, cfg.optim_wrapper).optimizer.param_groups
    decay = {id(parameter): group['weight_decay'] for group in groups for parameter in group['params']}
    unused = unused_names(model)
    found = set()
    for key, parameter in (model if flat or spared is None else model.backbone).named_parameters():
        leaf = key.rpartition('.')[2]
        free = (flat and (parameter.dim() == 1 or leaf == 'bias')) or (not flat and spared and 'norm' in key)
        free = free or leaf in (spared or ())
        found |= {leaf} & (BIASES | CLASS_BIASES | TABLE | POSITIONS)
        if key in unused or f'backbone.{key}' in unused:
            continue
        assert decay[id(parameter)] == (0.0 if free else cfg.optim_wrapper.optimizer.weight_decay), key
    assert found == there and (flat or cfg.optim_wrapper.get('clip_grad') is None)


MULTI_SCALE = dict(RandomChoice={}, RandomFlip=dict(prob=0.5))
COCO = dict(Resize=dict(scale=(1333, 800), keep_ratio=True), RandomFlip=dict(prob=0.5))
ADE = dict(RandomResize=dict(scale=(2048, 512), ratio_range=(0.5, 2.0)), RandomCrop=dict(crop_size=(512, 512)))


@pytest.mark.parametrize(
    'name, transforms',
    [
        ('agent-mask-rcnn_pvt-t_1x_coco', COCO),
        ('agent-retinanet_pvt-t_1x_coco', COCO),
        ('agent-mask-rcnn_swin-t_ms-crop-1x_coco', MULTI_SCALE),
        ('saga-cascade-mask-rcnn_swin-t_ms-crop-3x_coco', MULTI_SCALE),
        ('agent-semantic-fpn_pvt-t_8xb2-40k_ade20k-512x512', ADE),
        ('saga-upernet_swin-t_8xb2-160k_ade20k-512x512', ADE),
    ],
    ids=lambda value: value if isinstance(value, str) else '',
)
def test_images_are_prepared_as_in_the_paper(name: str, transforms: dict[str, dict[str, Any]]) -> None:
    cfg = config(name)
    found = {transform.type: transform for transform in cfg.train_dataloader.dataset.pipeline}
    for kind, options in transforms.items():
        assert {key: found[kind][key] for key in options} == options
    if transforms is MULTI_SCALE:  # in half of the cases of a crop
        plain, cropped = found['RandomChoice'].transforms
        assert [t.type for t in plain] == ['RandomChoiceResize'] and 'RandomCrop' in [t.type for t in cropped]
    if 'retinanet' in name:
        assert (cfg.model.neck.start_level, cfg.model.neck.add_extra_convs) == (1, 'on_input')


def test_mm_tools_read_configs_that_inherit_mmsegs() -> None:
    """They know nothing of mmgate, and mmengine finds a fork's mmseg only once mmgate is imported."""
    heirs = [path for path in CONFIGS if "'mmseg::" in path.read_text()]
    first = re.compile(r"_base_ = \[\n    '[./]+/(configs/)?_base_/import_mmgate.py',\n    'mmseg::")
    assert [path for path in heirs if not first.search(path.read_text())] == []
    script = 'import sys; from mmengine.config import Config; print(Config.fromfile(sys.argv[1]).model.type)'
    run_python('-c', script, heirs[0])


WEIGHTS = 'model.backbone.init_cfg.checkpoint'
VANILLA = ROOT / 'configs/vanilla/classification'


def partner_of(path: Path) -> Config | None:
    """Return a config's vanilla partner: a classifier's by its name, another's is what it inherits; None if none is."""
    if path.parent.name == 'classification':
        file = VANILLA / path.name.partition('-')[2]
        return Config.fromfile(file) if file.exists() and re.match('c?swin-|pvt', file.name) else None
    base = re.search(r"_base_ = (?:\[\n.*,\n    )?'(.*)'", path.read_text())[1]
    return Config.fromstring(f'_base_ = {base!r}', '.py') if '::' in base else Config.fromfile(path.parent / base)


def changed(theirs: Any, ours: Any) -> set[str]:
    return {text.partition(': ')[0] for text in differences(theirs, ours, '')}


# no partner: mmdet's Swin at the demo's size would be one more model, and one demo starts from another's weights
ALONE = re.compile('_(swin-demo|pvt-demo-pretrained)_')
BACKBONES = [path for path in CONFIGS if {'agent', 'saga'} & {*path.parts[-3:-1]} and not ALONE.search(path.name)]


@pytest.mark.parametrize('path', one_of_each(BACKBONES), ids=lambda path: path.stem)
def test_a_config_differs_from_its_partner_in_the_attention_alone(path: Path) -> None:
    """But among classifiers CSwin has its own depths, SAGA positions of 224 pixels, and Agent another rule of decay."""
    skip_unless_readable(path)
    partner = partner_of(path)
    if partner is None:
        pytest.skip('it has no partner')
    cfg = Config.fromfile(path)
    allowed = ['model.backbone.type', 'model.backbone.arch', 'model.backbone.agent_nums', 'optim_wrapper.constructor']
    if path.parent.name == 'classification':
        allowed += ['model.backbone.depths', 'model.backbone.pretrain_img_size', 'load_from']
        allowed += ['train_pipeline', 'test_pipeline']
    else:
        allowed += ['custom_imports'] + [WEIGHTS] * path.name.startswith('agent')
        # which mmseg leaves out
        allowed += ['auto_scale_lr'] * ('auto_scale_lr' not in partner)
        assert 'demo' in path.name or cfg.model.backbone.init_cfg.checkpoint.startswith('https://')
    assert [key for key in changed(partner.to_dict(), cfg.to_dict()) if not key.startswith(tuple(allowed))] == []


PLUG = [path for path in CONFIGS if {'plug', 'ablations'} <= set(path.parts)]


@pytest.mark.parametrize('path', one_of_each(PLUG), ids=lambda path: path.stem)
def test_an_ablation_of_plug_has_a_partner_of_its_start(path: Path) -> None:
    """It inherits it, and differs from it in one option of the gate."""
    skip_unless_readable(path)
    cfg = Config.fromfile(path)
    partner = Config.fromfile(path.parent / re.search(r"_base_ = '(.*)'", path.read_text())[1])
    ours, theirs = cfg.model.attention, partner.model.attention
    assert len(changed(theirs, ours)) == 1
    if changed(theirs, ours) == {'residual'} or ours.get('gml') == 'none':
        assert ours.init == theirs.init in ('paper', 'vit') and 'paper-init' in partner.filename


@pytest.mark.parametrize('name', ['agent-swin-b', 'agent-cswin-b', 'saga-swin-b', 'swin-b', 'cswin-b'])
def test_what_is_fine_tuned_has_the_tensors_of_its_checkpoint(name: str) -> None:
    tuned = config(f'{name}_8xb32-30e_in1k-384px')
    trained = config(tuned.load_from.split('/')[1])
    found, expected = (set(build_structure(cfg).state_dict()) for cfg in (tuned, trained))
    assert found == expected
