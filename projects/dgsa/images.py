"""Train DGViT and its partners on CIFAR-10 without the mm packages, all of a seed side by side on one GPU.

python -m projects.dgsa.images --data FOLDER        40 minutes on an H100 (estimated)

The folder has train.npz and test.npz, each with images (N, 32, 32, 3), RGB of uint8, and labels (N,). The models are
those of configs and configs/vanilla, built from timm's ViT: equal by test.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from timm.layers import GluMlp, Mlp
from timm.models import VisionTransformer
from torch import Tensor, nn

from mmgate import ConfigError, swap_attention
from projects.dgsa.side_by_side import Training, accuracy, batches_of, train_side_by_side
from projects.dgsa.study import read, write

# Table 3
SIZES = dict(img_size=32, patch_size=4, embed_dim=256, depth=8, num_heads=8, num_classes=10)
EPOCHS, BATCH, RATE, DECAY, DROP = 100, 128, 3e-4, 0.01, 0.05
HIDDEN = 128  # of the head: with it Table 5's sizes come out
# Width between the layers of a GELU network, or expansion of SwiGLU; and the gate
MODELS: dict[str, tuple[int | float, str | None]] = {
    'vit': (1024, None),
    'vit_matched': (773, None),
    'dgvit_x2': (2.0, 'DifferentialGatedMultiheadAttention'),
    'dgvit_x4': (4.0, 'DifferentialGatedMultiheadAttention'),
    'vanilla_x4': (4.0, None),
}
MEAN, STD = (125.307, 122.961, 113.8575), (51.5865, 50.847, 51.255)
PADDING = 4


def build(name: str, seed: int, **sizes: Any) -> nn.Module:
    """Return a model with the start of its config: shared parameters are equal under one seed.

    Args:
        name: A key of :data:`MODELS`.
        seed: Of the start.
        **sizes: Instead of those of :data:`SIZES`.
    """
    width, gate = MODELS[name]
    torch.manual_seed(seed)
    # What differs between models is drawn last.
    model = VisionTransformer(**SIZES | sizes, proj_drop_rate=DROP, pos_drop_rate=DROP, weight_init='skip')
    dim = model.embed_dim
    nn.init.trunc_normal_(model.pos_embed, std=0.02)
    model.head = nn.Sequential(nn.Linear(dim, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, model.num_classes))
    nn.init.trunc_normal_(model.head[0].weight, std=math.sqrt(1 / dim))
    for zero in (model.cls_token, model.head[0].bias, *model.head[2].parameters()):
        nn.init.zeros_(zero)
    for block in model.blocks:
        if isinstance(width, float):
            block.mlp = GluMlp(dim, round(width * dim), act_layer=nn.SiLU, gate_last=False, drop=DROP)
        else:
            block.mlp = Mlp(dim, width, drop=DROP)
        for layer in (block.mlp.fc1, block.mlp.fc2):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.normal_(layer.bias, std=1e-6)
    if gate is not None:
        swap_attention(model, dict(path='blocks.*.attn', type=gate))
    return model


def load(folder: Path, part: str, device: str) -> tuple[Tensor, Tensor]:
    """Return images ``(N, 3, 32, 32)`` of bytes and labels ``(N,)`` of a part."""
    file = folder / f'{part}.npz'
    if not file.exists():
        raise ConfigError(f'{file} is missing; it holds images (N, 32, 32, 3), RGB of uint8, and labels (N,).')
    with np.load(file) as found:
        images, labels = torch.from_numpy(found['images']), torch.from_numpy(found['labels'])
    return images.permute(0, 3, 1, 2).contiguous().to(device), labels.long().to(device)


def scales(device: str | torch.device) -> Tensor:
    """Return mean and deviation of the colours, ``(2, 3, 1, 1)``; made once, as a graph copies nothing to the GPU."""
    return torch.tensor((MEAN, STD), device=device)[..., None, None]


def cropped(images: Tensor) -> Tensor:
    """Return images ``(B, 3, H, W)``, padded and cropped at random, and half of them flipped, as in the configs."""
    count, channels, side = images.shape[:3]
    along = torch.arange(side, device=images.device)
    start = torch.randint(2 * PADDING + 1, (2, count, 1), device=images.device)
    flip = torch.rand(count, 1, device=images.device) < 0.5
    down = start[0] + along  # (B, H)
    right = start[1] + torch.where(flip, side - 1 - along, along)  # (B, W)
    image = torch.arange(count, device=images.device)[:, None, None, None]
    channel = torch.arange(channels, device=images.device)[:, None, None]
    return F.pad(images, (PADDING,) * 4)[image, channel, down[:, None, :, None], right[:, None, None]]


def prepared(model: nn.Module, images: Tensor, labels: Tensor, *, seed: int, epochs: int, crop: bool) -> Training:
    """Return the training of one model: a cosine by epochs, and no decay of the gates' norms, as in the configs."""
    model.to(images.device).train()
    batches = batches_of(len(labels), BATCH, epochs, seed)
    cosine = [RATE * (1 + math.cos(math.pi * epoch / epochs)) / 2 for epoch in range(epochs)]
    rates = [rate for rate in cosine for _ in range(len(batches) // epochs)]
    groups: list[dict[str, Any]] = [dict(params=[], weight_decay=DECAY), dict(params=[], weight_decay=0.0)]
    for name, parameter in model.named_parameters():
        groups[name.endswith('gate.head_norm.weight')]['params'].append(parameter)
    mean, std = scales(images.device)

    def losses(rows: Tensor) -> Tensor:
        shown = cropped(images[rows]) if crop else images[rows]
        return F.cross_entropy(model((shown - mean) / std), labels[rows], reduction='none')

    bfloat16 = images.device.type == 'cuda'
    return Training(model, losses, batches, rates, groups, bfloat16=bfloat16, compiled=model.blocks)


def run_seed(arguments: argparse.Namespace, seed: int, until: float) -> None:
    """Train the models of a seed that the CSV file lacks, all at once, and add a row when one is trained."""
    table, device = arguments.out / 'cifar10.csv', arguments.device
    key = dict(seed=seed, epochs=arguments.epochs, images='cropped' if arguments.crop else 'plain')
    done = {row['model'] for row in read(table) if all(row[name] == str(value) for name, value in key.items())}
    names = [name for name in arguments.models if name not in done]
    images, labels = load(arguments.data, 'train', device)
    trainings: dict[Training, tuple[str, Path]] = {}
    for name in names:
        model = build(name, seed, depth=arguments.depth)
        training = prepared(model, images, labels, seed=seed, epochs=arguments.epochs, crop=arguments.crop)
        kept = arguments.out / f'{"-".join(map(str, (name, *key.values())))}.pt'
        if kept.exists():
            training.load(torch.load(kept))
        trainings[training] = name, kept
    test, classes = load(arguments.data, 'test', device)
    mean, std = scales(device)
    torch.manual_seed(seed)  # dropout and crops
    start = time.time()
    for training in train_side_by_side(trainings, until):
        name, kept = trainings.pop(training)
        share = accuracy(training.model, ((x - mean) / std for x in test.split(1000)), classes.cpu())
        size = sum(p.numel() for p in training.model.parameters())
        row = dict(model=name, **key, parameters=size, accuracy=round(share, 2), seconds=round(time.time() - start, 1))
        row['device'] = torch.cuda.get_device_name() if device.startswith('cuda') else device
        write(table, [row])
        print(*row.values(), flush=True)
        kept.unlink(missing_ok=True)
    for training, (_, kept) in trainings.items():
        torch.save(training.state(), kept)


def main(argv: Sequence[str] | None = None) -> None:
    """Train the models that the CSV file does not hold, seed by seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data', type=Path, required=True, help='folder with train.npz and test.npz')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/dgsa'), help='folder for cifar10.csv')
    parser.add_argument('--models', nargs='+', choices=MODELS, default=list(MODELS)[:4])
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2, 3, 4])
    parser.add_argument('--epochs', type=int, default=EPOCHS)
    parser.add_argument('--crop', action='store_true', help='crop and flip images at random, as dgvit-crop does')
    parser.add_argument('--minutes', type=float, default=math.inf, help='stop then; the same command goes on')
    parser.add_argument('--depth', type=int, default=SIZES['depth'], help='layers, to try it')
    parser.add_argument('--device', default='cuda')
    arguments = parser.parse_args(argv)
    until = time.time() + 60 * arguments.minutes
    for seed in arguments.seeds:
        if time.time() < until:
            run_seed(arguments, seed, until)


if __name__ == '__main__':
    main()
