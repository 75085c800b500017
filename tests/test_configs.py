"""Every config builds, and is in the wheel."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import mmdet
import pytest
import torch
from conftest import CONFIG_FILES, CONFIGS, ROOT, one_of_each, skip_unless_readable
from helpers.metafiles import MODELS
from mmengine import registry
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from torch import nn

from mmgate import restore_attention
from mmgate.adapter import gated_modules
from mmgate.analysis.structure import build_structure
from mmgate.gate import Gate, named_gate_parameters, undecayed_parameters

NAMES = [str(path.relative_to(ROOT)) for path in CONFIGS]
METADATA = {model['Config']: model['Metadata'] for model in MODELS}
PARAMETERS = {name: metadata['Parameters'] for name, metadata in METADATA.items()}
if mmdet.__version__ >= '3.5':  # the fork's DINO encodes boxes in twice the channels
    PARAMETERS['configs/plug/dino/plug-dino-4scale_r50_8xb2-12e_coco.py'] += 2 * 256 * 256
    PARAMETERS['configs/vanilla/dino/ungated-dino-4scale_r50_8xb2-12e_coco.py'] += 2 * 256 * 256
PYRAMID = [(56, 56), (28, 28), (14, 14), (7, 7)]
# By a small config of each kind, the maps of the stages whose gates have position terms.
MAPS = {
    'configs/agent/classification/agent-pvt-t_8xb128-300e_in1k.py': PYRAMID,
    'configs/agent/classification/agent-pvt-m_8xb64-300e_in1k-256px.py': [(64, 64), (32, 32), (16, 16), (8, 8)],
    'configs/agent/classification/agent-swin-t_8xb128-300e_in1k.py': PYRAMID[:3],
    'configs/agent/classification/agent-swin-s_8xb32-30e_in1k-352px.py': [(88, 88), (44, 44)],
    'configs/agent/classification/agent-cswin-t_8xb128-300e_in1k.py': PYRAMID[:2],
    'configs/agent/classification/agent-cswin-b_8xb32-30e_in1k-384px.py': [(96, 96), (48, 48)],
    'configs/agent/classification/agent-deit-t_8xb128-300e_in1k.py': [(14, 14)],
    'configs/agent/classification/agent-deit-s_8xb64-300e_in1k-448px.py': [(28, 28)],
    'configs/agent/mask_rcnn/agent-mask-rcnn_pvt-demo_1xb8-8e_shapes.py': [(32, 32), (16, 16), (8, 8), (4, 4)],
    'configs/agent/semantic_fpn/agent-semantic-fpn_pvt-t_8xb2-40k_ade20k-512x512.py': PYRAMID,
    'configs/saga/classification/saga-pvtv2-b0_8xb128-300e_in1k.py': PYRAMID,
    'configs/saga/classification/saga-swin-t_8xb128-300e_in1k.py': PYRAMID[:3],
    'configs/saga/mask_rcnn/saga-mask-rcnn_swin-demo_1xb8-8e_shapes.py': [(32, 32), (16, 16), (8, 8)],
    'projects/linear_attention/configs/classification/flatten-pvt-t_8xb128-300e_in1k.py': PYRAMID,
    'projects/linear_attention/configs/classification/flatten-swin-t_8xb128-300e_in1k.py': PYRAMID[:2],
    'projects/linear_attention/configs/classification/flatten-deit-t_8xb128-300e_in1k.py': [(14, 14)],
    'projects/linear_attention/configs/classification/polaformer-pvtv2-b0_8xb128-300e_in1k.py': PYRAMID,
    'projects/linear_attention/configs/classification/polaformer-deit-t_8xb128-300e_in1k.py': [(14, 14)],
}


def method_and_gate(name: str) -> tuple[str, str]:
    """Return the folder of a config and the first word of its name; of a vanilla one, that is the host."""
    return name.split('/')[1], Path(name).name.split('-')[0]


def method_and_host(name: str) -> list[str]:
    return name.split('/')[1:3]


@pytest.mark.parametrize('name', one_of_each(NAMES, method_and_gate, method_and_host))
def test_every_config_builds(name: str) -> None:
    """And has as many trainable parameters, and images a step, as its metafile says."""
    skip_unless_readable(name)
    logging.getLogger('mmengine').setLevel(logging.WARNING)
    cfg = Config.fromfile(ROOT / name)
    model = build_structure(cfg)
    registry.MODELS.build(cfg.model.data_preprocessor)  # which a structure goes without
    # a gate may have no parameters, and replace a vanilla model's operator then
    gated = any(True for _ in named_gate_parameters(model))
    assert gated == any('gate' in key.split('.') for key, _ in model.named_parameters())
    assert not gated if is_vanilla(name) else any(isinstance(module, Gate) for module in model.modules())
    if gated:
        amp = ('type', 'dtype', 'loss_scale')  # which needs a GPU
        wrapper = {key: value for key, value in cfg.optim_wrapper.items() if key not in amp}
        of_names = settings(model, wrapper)
        decayed = {id(parameter) for key, parameter in model.named_parameters() if of_names.get(key, (0, 0))[1]}
        # the authors of Agent attention decay its biases, but in detectors and segmentors with Swin
        published = Path(name).name.startswith('agent-') and ('in1k' in name or re.search('_pvt-[tsml]_', name))
        spared = [n for n, parameter in undecayed_parameters(model) if (id(parameter) in decayed) != bool(published)]
        assert decayed and spared == []
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert PARAMETERS.get(name) == trainable, f'the metafile of {Path(name).parts[1]} should say {trainable}'
    check_steps(cfg, name)
    if gated and restore_attention(model):
        vanilla = settings(model, wrapper)
        shared = of_names.keys() & vanilla.keys()
        # what a config says for names, as in custom_keys, reaches what is shared as in the vanilla model
        assert shared and {key: of_names[key] for key in shared} == {key: vanilla[key] for key in shared}


@pytest.mark.parametrize('name', MAPS)
def test_gates_have_the_map_of_the_images_in_pre_training(name: str) -> None:
    """As a pass of the backbone shows it."""
    skip_unless_readable(name)
    cfg = Config.fromfile(ROOT / name)
    backbone: Any = build_structure(cfg).backbone.to('meta')
    of_images = cfg.model.backbone
    side = of_images.get('pretrain_img_size', of_images.get('img_size', 224))
    seen: dict[str, Any] = {}

    def see(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x, *others = (*args, *kwargs.values())
        seen[path] = next((tuple(one) for one in others if isinstance(one, (tuple, list))), x.shape[1])

    gated = dict(gated_modules(backbone))
    for path, module in gated.items():
        hook = partial(lambda path, _, args, kwargs: see(path, args, kwargs), path)
        module.register_forward_pre_hook(hook, with_kwargs=True)
    backbone.eval()  # returns nothing
    with torch.no_grad():
        backbone(torch.empty(1, 3, side, side, device='meta'))
    maps = {path: module.gate.map_size for path, module in gated.items()}
    assert [*dict.fromkeys(maps.values())] == MAPS[name]
    # A ViT's call names the tokens alone, of which the first is the class token.
    assert seen == {path: size if 'deit' not in name else 1 + size[0] * size[1] for path, size in maps.items()}


def is_vanilla(name: str) -> bool:
    """Return whether a config is a vanilla partner, by its folder, or as the ending of other names in its folder."""
    path = Path(name)
    names = {other.stem for other in (ROOT / path).parent.glob('*.py')}
    partner = path.parts[1] == 'real' and not any(path.stem.endswith(f'-{other}') for other in names)
    return partner or 'vanilla' in path.parts


def check_steps(cfg: Config, name: str) -> None:
    """Batch and length are those of the metafile, and the batch is that at every step."""
    batch = re.search(r'_(\d+)xb(\d+)-', name)  # GPUs and images of each
    length = ('Epochs', 'max_epochs') if 'max_epochs' in cfg.train_cfg else ('Iterations', 'max_iters')
    assert METADATA[name][length[0]] == cfg.train_cfg[length[1]]
    assert METADATA[name]['Batch Size'] == cfg.auto_scale_lr.base_batch_size
    assert cfg.train_dataloader.batch_size == (int(batch[2]) if batch else 2)
    assert not cfg.auto_scale_lr.get('enable', False) and 'accumulative_counts' not in cfg.optim_wrapper


def settings(model: nn.Module, wrapper: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Return rate and weight decay of every parameter that is trained, by its name."""
    groups = build_optim_wrapper(model, wrapper).optimizer.param_groups
    found = {id(parameter): (group['lr'], group['weight_decay']) for group in groups for parameter in group['params']}
    return {key: found[id(parameter)] for key, parameter in model.named_parameters() if id(parameter) in found}


@pytest.mark.slow
def test_the_wheel_has_every_config_and_what_reads_them(tmp_path: Path) -> None:
    dist = [sys.executable, str(ROOT / 'tools/dev/dist.py'), '--out', str(tmp_path)]
    subprocess.run(dist, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob('*.whl'))) as wheel:
        packed = set(wheel.namelist())
    files = ['tools/train.py', 'tools/dist_train.sh', 'tools/analysis_tools/list_attention.py', 'model-index.yml']
    files += [str(path.relative_to(ROOT)) for path in CONFIG_FILES if 'projects' not in path.relative_to(ROOT).parts]
    assert {'mmgate/py.typed', *(f'mmgate/.mim/{name}' for name in files)} <= packed
