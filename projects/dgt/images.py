"""Train the paper's vision models on CIFAR-10 on one GPU, side by side, without the mm packages.

python -m projects.dgt.images --data FOLDER --out FOLDER     8 minutes on an H100 (estimated)

The models are those of configs/dgsa and configs/vanilla, built from timm's ViT: equal by test.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from timm.layers import GluMlp
from timm.models import VisionTransformer
from torch import Tensor, nn

from mmgate import swap_attention
from mmgate.errors import ConfigError
from projects.dgt.side_by_side import CHUNK, Training, batches_of, train_side_by_side

# Table 3
SIZES = dict(img_size=32, patch_size=4, embed_dim=256, depth=8, num_heads=8, num_classes=10)
EPOCHS, BATCH, RATE, DROP = 100, 128, 3e-4, 0.05
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
FIELDS = ('model', 'seed', 'parameters', 'epochs', 'accuracy', 'seconds', 'device')


def build(name: str, seed: int, **sizes: Any) -> nn.Module:
    """Return a model with the start of its config: shared parameters are equal under one seed.

    Args:
        name: A key of :data:`MODELS`.
        seed: Of the start.
        **sizes: Instead of those of :data:`SIZES`.
    """
    width, gate = MODELS[name]
    model = VisionTransformer(**SIZES | sizes, proj_drop_rate=DROP, pos_drop_rate=DROP)
    dim = model.embed_dim
    model.head = nn.Sequential(nn.Linear(dim, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, model.num_classes))
    for block in model.blocks:
        if isinstance(width, float):
            block.mlp = GluMlp(dim, round(width * dim), act_layer=nn.SiLU, gate_last=False, drop=DROP)
        else:
            fc1, fc2 = nn.Linear(dim, width), nn.Linear(width, dim)
            block.mlp.fc1, block.mlp.fc2 = fc1, fc2
    # mmpretrain's start, each part from a stream of its own
    for path, module in model.named_modules():
        torch.manual_seed(zlib.crc32(f'{seed} {path}'.encode()))
        if isinstance(module, nn.Linear | nn.Conv2d):
            module.reset_parameters()
            if '.mlp.' in path:
                nn.init.xavier_uniform_(module.weight)
                nn.init.normal_(module.bias, std=1e-6)
    nn.init.zeros_(model.cls_token)
    nn.init.trunc_normal_(model.pos_embed, std=0.02)
    nn.init.trunc_normal_(model.head[0].weight, std=math.sqrt(1 / dim))
    for parameter in (model.head[0].bias, *model.head[2].parameters()):
        nn.init.zeros_(parameter)
    if gate is not None:
        swap_attention(model, [dict(path='blocks.*.attn', type=gate)])
    return model


def mm_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the parameters of one of these models to those of its config, such as for ``plot_rollout.py``."""
    glu = state['blocks.0.mlp.fc1.weight'].shape[0] != state['blocks.0.mlp.fc2.weight'].shape[1]
    names = {
        'head.0': 'head.layers.pre_logits',
        'head.2': 'head.layers.head',
        'patch_embed.proj': 'patch_embed.projection',
        'blocks': 'layers',
        'norm1': 'ln1',
        'norm2': 'ln2',
        'norm': 'ln1',
        'mlp.fc1': 'ffn.expand' if glu else 'ffn.layers.0.0',
        'mlp.fc2': 'ffn.project' if glu else 'ffn.layers.1',
    }

    def renamed(key: str) -> str:
        for old, new in names.items():
            key = re.sub(rf'(^|\.){re.escape(old)}\.', rf'\1{new}.', key)
        return key if key.startswith('head') else f'backbone.{key}'

    return {renamed(key): value for key, value in state.items()}


def load(folder: Path, part: str, most: int | None) -> tuple[Tensor, Tensor]:
    """Return images ``(N, 3, 32, 32)`` of bytes and labels ``(N,)``, the first ``most`` of a part."""
    file = folder / f'{part}.npz'
    if not file.exists():
        raise ConfigError(f'{file} is missing; it holds images (N, 32, 32, 3), RGB of uint8, and labels (N,).')
    with np.load(file) as found:
        images, labels = torch.from_numpy(found['images'][:most]), torch.from_numpy(found['labels'][:most])
    return images.permute(0, 3, 1, 2).contiguous(), labels.long()


class Pictures:
    """Images on a device, cropped and flipped at random there, as in the configs.

    Args:
        images: Bytes ``(N, 3, H, W)``.
        device: Device.
    """

    def __init__(self, images: Tensor, device: str) -> None:
        self.padded = F.pad(images.to(device), (PADDING,) * 4)
        self.side = images.shape[-1]
        self.mean, self.std = (torch.tensor(x, device=device)[:, None, None] for x in (MEAN, STD))
        self.along = torch.arange(self.side, device=device)
        self.channels = torch.arange(3, device=device)[:, None, None]

    def drawn(self, rows: Tensor) -> Tensor:
        """Return normalised images ``(B, 3, H, W)`` of these numbers ``(B,)``, each cropped at random, half flipped."""
        start = torch.randint(2 * PADDING + 1, (2, len(rows), 1), device=rows.device)
        flip = torch.rand(len(rows), 1, device=rows.device) < 0.5
        down = start[0] + self.along  # (B, H)
        right = start[1] + torch.where(flip, self.side - 1 - self.along, self.along)  # (B, W)
        return self._normalised(
            self.padded[rows[:, None, None, None], self.channels, down[:, None, :, None], right[:, None, None]]
        )

    def whole(self, first: int, last: int) -> Tensor:
        """Return the normalised images from ``first`` to before ``last``, as they are."""
        inside = slice(PADDING, PADDING + self.side)
        return self._normalised(self.padded[first:last, :, inside, inside])

    def _normalised(self, images: Tensor) -> Tensor:
        return (images.float() - self.mean) / self.std


def rates_of(epochs: int, steps: int) -> list[float]:
    """Return the learning rate of each step: a cosine, by epochs, as in the configs."""
    return [RATE * (1 + math.cos(math.pi * epoch / epochs)) / 2 for epoch in range(epochs) for _ in range(steps)]


def prepared(name: str, arguments: argparse.Namespace, images: Tensor, labels: Tensor, **sizes: Any) -> Training:
    """Return the training of one model with all its epochs."""
    model = build(name, arguments.seed, **sizes).to(arguments.device).train()
    data, classes = Pictures(images, arguments.device), labels.to(arguments.device)
    batches = batches_of(len(classes), BATCH, arguments.epochs, arguments.seed)
    norms = [p for key, p in model.named_parameters() if key.endswith('gate.head_norm.weight')]  # as in the configs
    others = [p for p in model.parameters() if all(p is not norm for norm in norms)]
    groups = [dict(params=others, weight_decay=0.01), *([dict(params=norms, weight_decay=0.0)] if norms else [])]
    return Training(
        model,
        lambda rows: F.cross_entropy(model(data.drawn(rows)), classes[rows], reduction='none'),
        batches,
        rates_of(arguments.epochs, len(batches) // arguments.epochs),
        groups,
        compiled=model.blocks,
    )


def epochs_in_time(trainings: Sequence[Training], epochs: int, until: float, rounds: int = 3) -> int:
    """Return how many of the epochs fit before the time ``until``, by a few hundred steps of all; then start anew."""
    steps = trainings[0].steps // epochs
    for training in trainings:
        training.advance(1)  # the first one takes longer
    start = time.time()
    queued = min(rounds * CHUNK, trainings[0].steps - 1) if trainings[0].on_gpu else 1
    for _ in range(0, queued, CHUNK):
        for training in trainings:
            training.advance(min(CHUNK, queued))
    for training in trainings:
        training.wait()
    pace = (time.time() - start) / queued
    for training in trainings:
        training.restart()
    return min(epochs, int(0.95 * (until - time.time()) / (pace * steps)))


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor, device: str) -> float:
    """Return the share of images, in percent, whose class is found."""
    model.eval()
    data = Pictures(images, device)
    found = [model(data.whole(n, n + 1000)).argmax(-1).cpu() for n in range(0, len(images), 1000)]
    return 100 * (torch.cat(found) == labels).double().mean().item()


def main(argv: Sequence[str] | None = None) -> None:
    """Train the models that the CSV file does not hold, and write a row and the weights of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data', type=Path, required=True, help='folder with train.npz and test.npz')
    parser.add_argument('--out', type=Path, required=True, help='folder for cifar10.csv and weights')
    parser.add_argument('--models', nargs='+', choices=MODELS, default=list(MODELS)[:4])
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--epochs', type=int, default=EPOCHS)
    parser.add_argument(
        '--until', type=float, help='train fewer epochs, all models as many, if this time would be over'
    )
    parser.add_argument('--images', type=int, help='of each part, to try it; default: all')
    parser.add_argument('--depth', type=int, default=SIZES['depth'], help='layers, to try it')
    parser.add_argument('--device', default='cuda')
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    table = arguments.out / 'cifar10.csv'
    rows = list(csv.DictReader(table.read_text().splitlines())) if table.exists() else []
    there = {row['model'] for row in rows if row['seed'] == str(arguments.seed)}
    torch.set_float32_matmul_precision('high')
    images, labels = load(arguments.data, 'train', arguments.images)
    test, classes = load(arguments.data, 'test', arguments.images)
    names = [name for name in arguments.models if name not in there]
    trainings = {prepared(name, arguments, images, labels, depth=arguments.depth): name for name in names}
    epochs = arguments.epochs
    if arguments.until and trainings:
        epochs = epochs_in_time(list(trainings), epochs, arguments.until)
        print(f'{epochs} epochs fit', flush=True)
        if epochs < 1:
            return
        for training in trainings:
            training.restart(rates_of(epochs, training.steps // arguments.epochs))
    start = time.time()
    for training in train_side_by_side(list(trainings), arguments.until):
        name, model = trainings[training], training.model
        with torch.compiler.set_stance('force_eager'):  # to compile for a test does not pay
            share = accuracy(model, test, classes, arguments.device)
        size = sum(p.numel() for p in model.parameters())
        device = torch.cuda.get_device_name() if training.on_gpu else 'cpu'
        values = (name, arguments.seed, size, epochs, round(share, 2), round(time.time() - start, 1), device)
        with table.open('a', newline='') as file:
            writer = csv.writer(file, lineterminator='\n')
            if file.tell() == 0:
                writer.writerow(FIELDS)
            writer.writerow(values)
        print(*values, flush=True)
        state = {key: value.half().cpu() for key, value in mm_names(model.state_dict()).items()}
        torch.save(dict(state_dict=state), arguments.out / f'{name}.pth')


if __name__ == '__main__':
    main()
