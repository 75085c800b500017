"""Models whose gates are trained alone."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from mmengine.registry import MODELS
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import mmgate
from helpers import zoo
from helpers.zoo import ZOO

RULES: dict[str, list[dict[str, Any]]] = {
    'deformable_detr': [
        dict(path='encoder.layers.*.self_attn', type='mmgate.PLuGMultiScaleDeformableAttention'),
        dict(path='decoder.layers.*.self_attn', type='mmgate.SDPAGatedMultiheadAttention'),
    ],
    'retinanet_pvt': [dict(path='backbone.**', type='mmgate.PLuGMultiheadAttention')],
    # parts of the host are left out
    'retinanet_pvtv2': [dict(path='backbone.**', type='mmgate.SAGAAttention', image_size=224)],
    'segformer': [dict(path='backbone.**', type='mmgate.DifferentialGatedMultiheadAttention')],
    'swin': [dict(path='backbone.**', type='mmgate.PLuGMultiheadAttention')],
}
HOSTS = tuple(RULES)


def config(host: str) -> Any:
    return zoo.reduced(ZOO[host][0]).model


def gated(host: str, seed: int = 0, **options: Any) -> nn.Module:
    cfg = copy.deepcopy(config(host))
    name = f'{ZOO[host][0].partition("::")[0]}.{cfg.pop("type")}'
    torch.manual_seed(seed)
    model = MODELS.build(dict(type='mmgate.Gated', host=name, **{'attention': RULES[host], **options}, **cfg))
    model.init_weights()
    return model


def vanilla(host: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS.build(copy.deepcopy(config(host)))
    model.init_weights()
    return model


def train(model: nn.Module, host: str, steps: int = 2) -> None:
    data = zoo.batch(zoo.reduced(ZOO[host][0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    model.train()
    for _ in range(steps):
        losses = zoo.tensors(model(**copy.deepcopy(data), mode='loss'))
        optimizer.zero_grad()
        sum(loss.sum() for loss in losses if loss.requires_grad).backward()
        optimizer.step()
    kept = {id(p) for group in optimizer.param_groups for p in group['params'] if optimizer.state.get(p)}
    assert kept <= {id(p) for p in model.parameters() if p.requires_grad}


def outputs(model: nn.Module, host: str) -> list[Tensor]:
    cfg = zoo.reduced(ZOO[host][0])
    torch.manual_seed(0)
    with torch.no_grad():
        return zoo.tensors(zoo.forward(model.eval(), zoo.batch(cfg), 'tensor'))


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


class Layer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x, x, x, need_weights=False)[0]


PLUG = dict(path='*.attn', type='mmgate.PLuGMultiheadAttention')


def layers(rules: Any = PLUG, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(dropout), Layer(dropout))
    for rule in [rules] if isinstance(rules, dict) else rules:
        mmgate.swap_attention(model, rule)
    for parameter in mmgate.gate_parameters(model).values():
        nn.init.normal_(parameter, std=0.3)
    return model


def describe_anew(path: Path, **changes: Any) -> None:
    with safe_open(path, framework='pt') as opened:
        meta = {**json.loads(opened.metadata()['mmgate.gates']), **changes}
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    described = {key: value for key, value in meta.items() if value is not None}
    save_file(tensors, path, metadata={'mmgate.gates': json.dumps(described)})
