"""Configs with smaller numbers: a step on made samples takes seconds, by the same classes, hooks and options."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from mmengine.config import Config
from mmengine.registry import MODELS

import helpers.zoo  # noqa: F401  (it registers a language model)
from mmgate.mm.config_file import innermost

SIZES = ('scale', 'scales', 'crop_size', 'size', 'img_scale', 'stride')  # in pixels
LARGEST = 160  # sizes up to this one stay
RATIO, MULTIPLE, SMALLEST = 8, 32, 64
# Two stages take as many queries from the tokens of an image, and no more boxes than queries x classes are kept.
AT_MOST = dict(nms_pre=100, max_per_img=5, num_queries=50)
NEVER = 10**9
DEMO_CLASSIFIER = 'configs/saga/classification/saga-pvt-demo_1xb32-12e_shapes.py'  # of make demo-pretrain
# Parts of the names of weights that a user fetches.
FETCHED = ('://', 'tf_efficientnet_lite0.pth')
FILES = ('checkpoint', 'load_from', 'work_dir', 'ann_file', 'data_root', 'img_path', 'seg_map_path', 'img', 'seg')


def kind_of(cfg: Config) -> Any:
    """Return what a config is but for its numbers: two of one kind have the same keys, classes, words and switches.

    Lists of numbers count as one number, and names of files and of rows in a table of sizes (``arch``) do not count.
    """
    parts = ('_dataloader', '_evaluator', '_cfg', '_hooks', 'model', 'optim_wrapper', 'param_scheduler', 'load_from')
    return _kind({key: value for key, value in cfg.to_dict().items() if key.endswith(parts)}, '')


def _kind(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return tuple((name, _kind(value[name], name)) for name in sorted(value, key=str))
    if isinstance(value, (list, tuple)):
        entries = [_kind(one, key) for one in value]
        return 'number' if entries and set(entries) == {'number'} else tuple(entries)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return 'number'
    if key in ('arch', *FILES) and isinstance(value, str):
        return 'fetched' if any(mark in value for mark in FETCHED) else 'name'
    return value if isinstance(value, (str, bool, type(None))) else str(value)


def one_of_each_kind(configs: Mapping[str, Config], size: Callable[[str], int]) -> dict[str, list[str]]:
    """Return the smallest config of each kind, with the names of all of that kind."""
    kinds = defaultdict(list)
    for name in sorted(configs, key=lambda name: (size(name), name)):
        kinds[kind_of(configs[name])].append(name)
    return {names[0]: names for names in kinds.values()}


def configs_in(folder: str) -> dict[str, Config]:
    """Return each config in a folder by its path, and each run of a study there that changes one, by both names."""
    configs: dict[str, Config] = {}
    for path in sorted((ROOT / folder).glob('*.py')):
        name, cfg = str(path.relative_to(ROOT)), Config.fromfile(path)
        if 'train_dataloader' in cfg:
            configs[name] = cfg
        for run, config in (cfg.get('runs') or {}).items():
            configs[f'{name} {run}'] = with_options(config, name)
    return configs


def shrunk(cfg: Config, data: Path, images: int = 2) -> Config:
    """Return a config with smaller numbers, so that a step on the samples of ``data`` takes seconds on a CPU.

    What chooses what runs stays, but for what is not at hand: CompileHook takes Dynamo without inductor's compiler,
    float16 becomes the bfloat16 of CPUs, Grounding DINO has a stand-in for BERT and keeps its activations, for which it
    would need fairscale, and panoptic quality, which panopticapi computes, is left out. Weights that a user
    fetches are not loaded.
    """
    cfg = Config(_at(cfg.to_dict(), f'{data}/data'), filename=cfg.filename)
    for split in ('train', 'val', 'test'):
        loader = cfg[f'{split}_dataloader']
        loader.batch_size = min(loader.batch_size, 2)
        loader.num_workers = 0
        loader.persistent_workers = False
        loader.pop('prefetch_factor', None)
        innermost(loader.dataset).indices = images
        if isinstance(cfg.get(f'{split}_evaluator'), list):
            cfg[f'{split}_evaluator'] = [one for one in cfg[f'{split}_evaluator'] if one.type != 'CocoPanopticMetric']
    pixels(cfg, classifies=cfg.get('default_scope') == 'mmpretrain')
    for node in dicts(cfg.model):
        if 'score_thr' in node:  # a model without training is sure of nothing
            node.score_thr = 0.0
        for key, largest in AT_MOST.items():
            if key in node:
                node[key] = min(node[key], largest)
    cfg.train_cfg.val_interval = 1
    # 90 million parameters and two moments of each are a gigabyte
    cfg.default_hooks.checkpoint.interval = NEVER
    cfg.default_hooks.checkpoint.save_last = False
    without_fetched_weights(cfg)
    for hook in cfg.get('custom_hooks') or []:
        if str(hook.type).endswith('CompileHook'):
            hook.backend = 'eager'
        if str(hook.type).endswith('GateStatisticsHook'):
            hook.interval = 1
    if cfg.optim_wrapper.get('type') == 'AmpOptimWrapper':
        cfg.optim_wrapper.dtype = 'bfloat16'
    if 'language_model' in cfg.model:
        cfg.model.language_model = dict(type='mmgate.TinyLanguageModel')
        cfg.model.encoder.num_cp = 0
    return cfg


def dicts(node: Any) -> Any:
    """Yield every dict of a config."""
    if isinstance(node, Mapping):
        yield node
        for value in node.values():
            yield from dicts(value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from dicts(value)


def _at(value: Any, folder: str) -> Any:
    """Return a config whose relative paths of data begin at a folder."""
    if isinstance(value, Mapping):
        return {key: _at(one, folder) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_at(one, folder) for one in value)
    return f'{folder}{value[4:]}' if isinstance(value, str) and value.startswith('data/') else value


def pixels(cfg: Config, *, classifies: bool) -> None:
    """Divide the sizes of images by eight, but for classifiers, whose positions are those of one size."""
    if classifies:
        return
    parts = [cfg[key] for key in cfg if key.endswith(('dataloader', 'pipeline'))]
    parts += [cfg.model.get('data_preprocessor') or {}, cfg.model.get('test_cfg') or {}]
    for node in dicts(parts):
        for key in SIZES:
            if key in node:
                node[key] = _smaller(node[key])


def _smaller(size: Any) -> Any:
    if isinstance(size, (list, tuple)):
        return type(size)(_smaller(one) for one in size)
    if not isinstance(size, int) or size <= LARGEST:
        return size
    return max(SMALLEST, round(size / RATIO / MULTIPLE) * MULTIPLE)


def without_fetched_weights(cfg: Config) -> None:
    """Leave out weights that a user fetches; those that another config makes stay."""
    for node in dicts(cfg._cfg_dict):
        for key in ('checkpoint', 'load_from', 'pretrained'):
            value = node.get(key)
            if isinstance(value, str) and any(mark in value for mark in FETCHED):
                node[key] = None
            elif value is True and key == 'pretrained':
                node[key] = False
    for node in dicts(cfg._cfg_dict):
        start = node.get('init_cfg')
        if isinstance(start, Mapping) and start.get('checkpoint', '') is None:
            node['init_cfg'] = None


def made_by(weights: str) -> tuple[str, str]:
    """Return the config, and the study with its options if there is one, whose training writes a file of weights."""
    name, _, rest = weights.removeprefix('work_dirs/').partition('/')
    if name == 'demo_pretrain':
        return DEMO_CLASSIFIER, ''
    study = ROOT / f'configs/studies/{name}.py'
    if study.is_file():
        return Config.fromfile(study).runs[rest.partition('/')[0]], f'configs/studies/{name}.py'
    (config,) = (ROOT / 'configs').rglob(f'{name}.py')
    return str(config.relative_to(ROOT)), ''


def make_weights(cfg: Config, data: Path) -> None:
    """Write the files of weights that a config starts from, with the start of the model that would be trained."""
    for node in dicts(cfg._cfg_dict):
        for key in ('checkpoint', 'load_from'):
            weights = node.get(key)
            if isinstance(weights, str) and weights.startswith('work_dirs/') and not (data / weights).exists():
                config, study = made_by(weights)
                maker = shrunk(with_options(config, study), data)
                with MODELS.switch_scope_and_registry(maker.default_scope):
                    model = MODELS.build(maker.model)
                model.init_weights()
                (data / weights).parent.mkdir(parents=True)
                # Half the size: a gigabyte for all of them, which a machine may not have.
                state = {key: one.half() if one.is_floating_point() else one for key, one in model.state_dict().items()}
                torch.save(dict(state_dict=state, meta={}), data / weights)


def with_options(config: str, study: str = '') -> Config:
    """Return a config, changed by the options of a study that trains it."""
    cfg = Config.fromfile(ROOT / config)
    cfg.merge_from_dict(dict(Config.fromfile(ROOT / study).get('options') or {}) if study else {})
    return cfg


def add_panopticapi(patch: pytest.MonkeyPatch) -> None:
    """Let mmdet load panoptic segments, for which it asks panopticapi, which no package index has."""
    package, utils = ModuleType('panopticapi'), ModuleType('panopticapi.utils')
    utils.rgb2id = lambda colours: colours.astype(np.int64) @ (1, 256, 65536)
    package.utils = utils
    patch.setitem(sys.modules, 'panopticapi', package)
    patch.setitem(sys.modules, 'panopticapi.utils', utils)
