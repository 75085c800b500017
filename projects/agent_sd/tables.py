"""Make the images of the paper's Tables 10 to 13 with a Stable Diffusion, and measure their FID, time and memory.

``python -m projects.agent_sd.tables --model FOLDER --reference IMAGENET_VAL``; only missing images are made.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import tomesd
import torch
from diffusers import DiffusionPipeline, PNDMScheduler

from projects.agent_sd.benchmark import timed
from projects.agent_sd.processor import apply_agent_sd, remove_agent_sd

PROMPT = 'A high quality photograph of a {}.'  # of Fig. 6
STATISTICS = '.npz'
logger = logging.getLogger('mmgate')


@dataclass(frozen=True)
class Row:
    """A row of the tables; the values of one that is asked for twice are measured once.

    Attributes:
        method: ``'SD'``, ``'ToMeSD'`` or ``'AgentSD'``, which alone has the options after ``ratio``.
        ratio: r of Table 10; Tables 11 to 13 are at 0.5.
        value_factor: k of Table 11.
        power: The second scale of Table 12 is ``d ** (-0.5 * power)``.
        early: Share of the steps with agents, of Table 13.
    """

    method: str
    ratio: float = 0.5
    value_factor: float = 0.075
    power: float = 0.3
    early: float = 0.4

    @property
    def name(self) -> str:
        """The folder of its images."""
        options = {'SD': 0, 'ToMeSD': 1, 'AgentSD': 4}[self.method]
        return '-'.join(map(str, astuple(self)[: 1 + options]))


RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5)
TABLES: dict[int, dict[Row, float]] = {  # with the paper's FID
    10: {
        Row('SD', 0): 28.84,
        **{Row('ToMeSD', r): fid for r, fid in zip(RATIOS, (28.64, 28.68, 28.82, 28.74, 29.01), strict=True)},
        **{Row('AgentSD', r): fid for r, fid in zip(RATIOS, (27.79, 27.77, 28.03, 28.15, 28.42), strict=True)},
    },
    11: {Row('AgentSD', value_factor=k): fid for k, fid in ((0, 28.80), (0.025, 28.67), (0.075, 28.42), (0.15, 28.61))},
    12: {Row('AgentSD', power=power): fid for power, fid in ((1, 28.86), (0.5, 28.64), (0.3, 28.42), (0.1, 28.60))},
    13: {Row('AgentSD', early=share): fid for share, fid in ((0.2, 28.58), (0.4, 28.42), (0.6, 28.83), (0.8, 29.77))},
}


@contextmanager
def attending(pipe: Any, row: Row) -> Iterator[dict[str, Any]]:
    """Let a pipeline attend as a row does, and yield what it is to be called with."""
    arguments: dict[str, Any] = {}
    if row.method == 'ToMeSD':
        tomesd.apply_patch(pipe, ratio=row.ratio)
    elif row.method == 'AgentSD':
        options = {name: value for name, value in asdict(row).items() if name != 'method'}
        arguments['callback_on_step_end'] = apply_agent_sd(pipe, **options).on_step_end
    try:
        yield arguments
    finally:
        tomesd.remove_patch(pipe)
        remove_agent_sd(pipe)


def generate(
    pipe: Any, row: Row, prompts: Sequence[str], folder: Path, *, batch: int = 1, seed: int = 0, **options: Any
) -> float:
    """Make an image of each prompt that ``folder`` has none of, the same noise for every row.

    Args:
        pipe: A pipeline of diffusers.
        row: How to attend.
        prompts: Of the images ``00000.png``, ``00001.png``, ...
        folder: Of the images and their times.
        batch: Images at a time.
        seed: Of the first image; the others' follow.
        **options: Of the pipeline's call.

    Returns:
        The mean seconds of an image, over all that are there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [number for number in range(len(prompts)) if not (folder / f'{number:05}.png').exists()]
    times = folder / 'seconds.csv'
    with attending(pipe, row) as arguments:
        for start in range(0, len(missing), batch):
            numbers = missing[start : start + batch]
            noise = [torch.Generator().manual_seed(seed + number) for number in numbers]
            begin = time.perf_counter()
            images = pipe([prompts[n] for n in numbers], generator=noise, **arguments, **options).images
            seconds = time.perf_counter() - begin  # the images are on the CPU, so all work is done
            with times.open('a') as file:
                file.write(f'{len(numbers)},{seconds}\n')
            for number, image in zip(numbers, images, strict=True):
                part = folder / f'{number:05}.part'
                image.save(part, 'png')
                part.rename(folder / f'{number:05}.png')
    counts, seconds_each = np.loadtxt(times, delimiter=',', ndmin=2).T
    return float(seconds_each.sum() / counts.sum())


def memory(pipe: Any, row: Row, prompt: str, device: torch.device, **options: Any) -> float:
    """Return the GB by which one more image in a batch raises the most memory in use (CUDA)."""
    with attending(pipe, row) as arguments:
        most = [
            timed(lambda count=count: pipe([prompt] * count, **arguments, **options), device)[1] for count in (1, 2)
        ]
    return (most[1] - most[0]) / 2**10


class FID:
    """The Fréchet distance to reference images, by pytorch-fid.

    Args:
        reference: A folder of images, of any size and in any folders below it, or a ``.npz`` file of pytorch-fid.
        cache: File that the statistics of a folder are kept in.
        device: Where Inception runs.
        dims: Of its features: 2048 in the paper; pytorch-fid has 64, 192 and 768 for few images.

    Raises:
        ModuleNotFoundError: pytorch-fid is not installed.
        ValueError: There is no image.
    """

    def __init__(self, reference: Path, cache: Path, device: torch.device, dims: int = 2048) -> None:
        from pytorch_fid.inception import InceptionV3

        self.device, self.dims = device, dims
        self.model = InceptionV3([InceptionV3.BLOCK_INDEX_BY_DIM[dims]]).to(device)
        if reference.suffix != STATISTICS and not cache.exists():
            logger.warning(f'reading the images of {reference}, once; {cache} keeps what is needed of them')
            mean, covariance = self._statistics(reference, batch=1)  # one by one, as their sizes differ
            np.savez_compressed(cache, mu=mean, sigma=covariance)
        with np.load(reference if reference.suffix == STATISTICS else cache) as file:
            self.reference = file['mu'], file['sigma']

    def __call__(self, folder: Path) -> float:
        """Return the distance of the images of a folder, all of one size."""
        from pytorch_fid.fid_score import calculate_frechet_distance

        return float(calculate_frechet_distance(*self._statistics(folder, batch=50), *self.reference))

    def _statistics(self, folder: Path, batch: int) -> tuple[Any, Any]:
        from pytorch_fid.fid_score import IMAGE_EXTENSIONS, calculate_activation_statistics

        files = sorted(path for path in folder.rglob('*') if path.suffix[1:].lower() in IMAGE_EXTENSIONS)
        if len(files) < 2:
            raise ValueError(f'{folder} has {len(files)} images, and FID compares the spread of many.')
        return calculate_activation_statistics(files, self.model, batch, self.dims, self.device, num_workers=0)


def read_classes(path: str | None) -> list[str]:
    """Return the names in a file, one a line, or those that torchvision has for ImageNet's classes."""
    if path is None:
        from torchvision.models import ResNet50_Weights

        return list(ResNet50_Weights.DEFAULT.meta['categories'])
    return [line.strip() for line in Path(path).read_text().splitlines() if line.strip()]


def main(argv: Sequence[str] | None = None) -> None:
    """Make the images, measure them and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        '--model', required=True, help="folder or name of a Stable Diffusion for diffusers; the paper's is 1.5"
    )
    parser.add_argument(
        '--reference', type=Path, help="ImageNet's validation images, or their .npz of pytorch-fid; no FID without"
    )
    parser.add_argument('--tables', type=int, nargs='+', choices=TABLES, default=list(TABLES))
    parser.add_argument(
        '--classes', help="file of class names, one a line (default: ImageNet's, as torchvision has them)"
    )
    parser.add_argument('--per-class', type=int, default=2, help='images of a class (default 2)')
    parser.add_argument('--steps', type=int, default=50, help='of PLMS (default 50)')
    parser.add_argument('--guidance', type=float, default=7.5, help='classifier-free guidance (default 7.5)')
    parser.add_argument('--size', type=int, default=512, help='side of the images (default 512)')
    parser.add_argument('--batch', type=int, default=1, help='images at a time (default 1)')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--dims', type=int, default=2048, help="features of FID's Inception (default 2048)")
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--dtype', default='float16' if torch.cuda.is_available() else 'float32')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/agent_sd'))
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    prompts = [PROMPT.format(name) for name in read_classes(args.classes) for _ in range(args.per_class)]
    options = dict(num_inference_steps=args.steps, guidance_scale=args.guidance, height=args.size, width=args.size)
    args.out.mkdir(parents=True, exist_ok=True)
    kept = args.out / 'settings.json'
    settings = dict(model=args.model, prompts=prompts, seed=args.seed, dtype=args.dtype, **options)
    former = json.loads(kept.read_text()) if kept.exists() else settings
    other = [name for name, value in settings.items() if former.get(name) != value]
    if other:
        raise SystemExit(f'{args.out} has images of other settings ({", ".join(other)}): give another --out.')
    kept.write_text(json.dumps(settings, indent=1))
    fid = None
    if args.reference:
        fid = FID(args.reference, args.out / f'reference-{args.reference.stem}-{args.dims}.npz', device, args.dims)
    pipe = DiffusionPipeline.from_pretrained(args.model, torch_dtype=getattr(torch, args.dtype)).to(device)
    pipe.scheduler = PNDMScheduler.from_config(pipe.scheduler.config, skip_prk_steps=True)  # PLMS
    pipe.safety_checker = None  # it would hand out black images
    pipe.set_progress_bar_config(disable=True)
    found: dict[Row, list[str]] = {}
    for row in dict.fromkeys(row for table in args.tables for row in TABLES[table]):
        seconds = generate(pipe, row, prompts, args.out / row.name, batch=args.batch, seed=args.seed, **options)
        distance = f'{fid(args.out / row.name):.2f}' if fid else '-'
        gigabytes = f'{memory(pipe, row, prompts[0], device, **options):.2f}' if device.type == 'cuda' else '-'
        found[row] = [distance, f'{seconds:.2f}', gigabytes]
        logger.info('%s: %s', row.name, found[row])
    write(found, args.tables, args.out / 'results.csv')


def write(found: dict[Row, list[str]], tables: Sequence[int], path: Path) -> None:
    """Write what was found of each row to a CSV file, and print it table by table beside the paper's FID."""
    names = [field.name for field in fields(Row)]
    with path.open('w', newline='') as file:
        csv.writer(file).writerows(
            [[*names, 'fid', 's/img', 'GB/img'], *([*astuple(row), *found[row]] for row in found)]
        )
    head = ['method', 'r', 'k', 'power', 'early', 'FID', 's/img', 'GB/img', "paper's FID"]
    for table in tables:
        print(f'\nTable {table}\n', line(head), line(['---'] * len(head)), sep='\n')
        for row, paper in TABLES[table].items():
            options = astuple(row) if row.method == 'AgentSD' else (row.method, row.ratio, '', '', '')
            print(line([*options, *found[row], f'{paper:.2f}']))


def line(cells: Sequence[Any]) -> str:
    """Return cells as a line of a Markdown table."""
    return f'| {" | ".join(map(str, cells))} |'


if __name__ == '__main__':
    logging.basicConfig(level=logging.INFO)
    main()
