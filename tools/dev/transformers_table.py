"""Measure mmgate's deformable attention in transformers' detectors: differences of outputs, and speed.

``python tools/dev/transformers_table.py`` prints a table and, with ``--file``, writes it between two markers. Models
have the sizes of transformers' default configs and random weights; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from mmgate.swap import swap_attention

BEGIN = '<!-- transformers_table begins -->\n'
END = '<!-- transformers_table ends -->\n'
RULE = dict(type='MultiScaleDeformableAttention')
SIZE = (480, 640)
# by the name of a model: what its config and class are called, the size of its images, and what the config is given
MODELS: dict[str, tuple[str, tuple[int, int], dict[str, Any]]] = {
    'Deformable DETR R50': ('DeformableDetr', SIZE, dict(with_box_refine=True)),
    'RT-DETR R50': ('RTDetr', (640, 640), {}),
    'RT-DETRv2 R50': ('RTDetrV2', (640, 640), {}),
    # their published points, where the default config has 4 on each level
    'D-FINE': ('DFine', (640, 640), dict(decoder_n_points=[3, 6, 3])),
    'DEIMv2': ('Deimv2', (640, 640), dict(decoder_n_points=[3, 6, 3])),
    'LW-DETR': ('LwDetr', (640, 640), dict(projector_scale_factors=[1.0])),
    'RF-DETR': ('RfDetr', (560, 560), {}),
    'Grounding DINO': ('GroundingDino', SIZE, {}),
    'Mask2Former': ('Mask2Former', SIZE, {}),
    'OneFormer': ('OneFormer', SIZE, dict(is_training=False)),
}


@torch.inference_mode()
def measure(name: str, rounds: int) -> str:
    """Build a model, swap its deformable attention, compare, and return the row of the table.

    Args:
        name: One of :data:`MODELS`.
        rounds: Pairs of forward passes, one of theirs and one of ours, after a first pair that is not counted.
    """
    kind, image, options = MODELS[name]
    torch.manual_seed(0)
    model = build(kind, options)
    fed = _feed(kind, image)
    paths = [path for path, module in model.named_modules() if hasattr(module, 'sampling_offsets')]
    calls: dict[str, dict[str, Any]] = {}
    handles = [
        model.get_submodule(path).register_forward_pre_hook(_noting(calls, path), with_kwargs=True) for path in paths
    ]
    expected = _outputs(model(**fed))
    for handle in handles:
        handle.remove()
    vanilla = deepcopy(model)
    swapped = swap_attention(model, dict(RULE, path=paths))
    theirs, ours = ({path: one.get_submodule(path) for path in calls} for one in (vanilla, model))
    layer_error = max(_error([ours[path](**call)[0]], [theirs[path](**call)[0]]) for path, call in calls.items())
    model_error = _error(_outputs(model(**fed)), expected)
    slowest = max(calls, key=lambda path: calls[path]['hidden_states'].numel())
    speeds = [
        f'{before:.0f} ms, {after:.0f} ms | {before / after:.2f}x'
        for before, after in (
            _pairs(lambda: theirs[slowest](**calls[slowest]), lambda: ours[slowest](**calls[slowest]), rounds),
            _pairs(lambda: vanilla(**fed), lambda: model(**fed), rounds),
        )
    ]
    size = f'{image[0]} x {image[1]} | {len(swapped)}'
    return f'| {name} | {size} | {layer_error:.0e} | {model_error:.0e} | {" | ".join(speeds)} |'


def build(kind: str, options: dict[str, Any]) -> nn.Module:
    """Return a model with random weights whose sampling points are spread around the reference points."""
    if kind == 'DeformableDetr':  # its default backbone is timm's
        stages = transformers.ResNetConfig(out_features=['stage2', 'stage3', 'stage4'])
        options = dict(options, backbone_config=stages)
    config = getattr(transformers, f'{kind}Config')(**options)
    task = 'UniversalSegmentation' if kind.endswith('Former') else 'ObjectDetection'
    model = getattr(transformers, f'{kind}For{task}')(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if 'sampling_offsets' in name or 'attention_weights' in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def _feed(kind: str, image: tuple[int, int]) -> dict[str, Tensor]:
    fed = dict(pixel_values=torch.rand(1, 3, *image))
    if kind == 'OneFormer':
        fed.update(task_inputs=torch.ones(1, 77, dtype=torch.long))
    if kind == 'GroundingDino':  # [CLS] a cat. [SEP]
        fed.update(input_ids=torch.tensor([[101, 1037, 4937, 1012, 102]]))
    return fed


def _noting(calls: dict[str, dict[str, Any]], path: str) -> Any:
    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = dict(hidden_states=args[0]) if args else {}
        calls.setdefault(path, {**first, **kwargs})

    return note


def _outputs(found: Any) -> list[Tensor]:
    flat = [x for part in found.to_tuple() for x in (part if isinstance(part, (tuple, list)) else [part])]
    return [x for x in flat if isinstance(x, Tensor) and x.is_floating_point()]


def _error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    # masked logits are infinite in both
    off = ((a - b).masked_fill(a == b, 0.0).abs().max() / b[b.isfinite()].abs().max() for a, b in pairs)
    return max(float(x) for x in off)


def _pairs(theirs: Callable[[], Any], ours: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Return the medians of CPU milliseconds, on which other work on the machine has little effect."""
    times: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        for run, seconds in zip((theirs, ours), times, strict=True):
            start = time.process_time()
            run()
            if number:
                seconds.append(time.process_time() - start)
    return 1e3 * median(times[0]), 1e3 * median(times[1])


def markdown(rows: Sequence[str], rounds: int) -> str:
    """Return the table, and the environment of the measurement."""
    head = 'model | image | layers | layer error | model error | slowest layer: theirs, ours | | model: theirs, ours | '
    where = f'{platform.machine()}, {torch.get_num_threads()} thread(s), torch {torch.__version__}'
    end = f'transformers {transformers.__version__}; float32, batch 1, medians of {rounds} pairs, CPU time'
    return '\n'.join([f'| {head}|', '|---|---|---|---|---|---|---|---|---|', *rows, '', f'{where}, {end}.', ''])


def main(argv: Sequence[str]) -> int:
    """Parse arguments, measure, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ', '.join(MODELS)
    parser.add_argument('--models', nargs='+', choices=MODELS, default=list(MODELS), metavar='NAME', help=names)
    parser.add_argument('--rounds', type=int, default=3, help='pairs of forward passes (default: 3)')
    parser.add_argument('--file', type=Path, help='page to write the table into, between its markers')
    args = parser.parse_args(argv)
    text = args.file.read_text() if args.file else BEGIN + END
    if BEGIN not in text or END not in text:
        parser.error(f'{args.file} has no lines {BEGIN.strip()} and {END.strip()}')
    transformers.logging.set_verbosity_error()
    rows = []
    for name in args.models:
        rows.append(measure(name, args.rounds))
        print(rows[-1], file=sys.stderr, flush=True)
        if args.file:  # at once, so that an interrupted run leaves what it found
            table = markdown(rows, args.rounds)
            args.file.write_text(text.split(BEGIN)[0] + BEGIN + table + END + text.split(END)[1])
    if not args.file:
        print(markdown(rows, args.rounds), end='')
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
