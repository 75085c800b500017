"""Write a page on the attention of the demos' models, vanilla and gated: index.html, which needs no network.

A model without a checkpoint below the work dirs is trained first, by tools/train.py; ``make report`` calls this, and
``make report DATA=real`` for the models of configs/real. Models whose images are not there are left out.
"""

import argparse
import base64
import html
import math
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compare_runs import choose_metric, read_run
from mmengine.config import Config

import mmgate  # noqa: F401
from mmgate.analysis.probes.cka import LEAST_IMAGES
from mmgate.errors import ConfigError
from mmgate.train import cli

TOOLS = Path(__file__).resolve().parent
LINES = 15  # of the output of a command that failed
SHAPES = 'shapes'
REAL = 'real'
TITLES = {
    SHAPES: 'Attention in the demos, vanilla and gated',
    REAL: 'Attention on real images, vanilla and gated',
}
DETR = 'Deformable DETR'
MASK2FORMER = 'Mask2Former'
# The first config of a family is vanilla. The last family of each has other backbones.
FAMILIES = {
    SHAPES: {
        DETR: (
            'configs/_base_/deformable-detr-refine_r18_1xb8-12e_shapes.py',
            'configs/plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py',
        ),
        MASK2FORMER: (
            'configs/_base_/mask2former_r18_1xb8-1k_shapes-128x128.py',
            'configs/plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128.py',
        ),
        'Mask R-CNN with PVT': (
            'configs/vanilla/mask_rcnn/mask-rcnn_pvt-demo_1xb8-8e_shapes.py',
            'configs/agent/mask_rcnn/agent-mask-rcnn_pvt-demo_1xb8-8e_shapes.py',
            'configs/saga/mask_rcnn/saga-mask-rcnn_pvt-demo_1xb8-8e_shapes.py',
        ),
    },
    REAL: {
        DETR: (
            'configs/real/bccd/deformable-detr-refine_lite0_1xb4-12e_bccd.py',
            'configs/real/bccd/plug-deformable-detr-refine_lite0_1xb4-12e_bccd.py',
        ),
        MASK2FORMER: (
            'configs/real/camvid/mask2former_lite0_1xb4-1k_camvid-160x128.py',
            'configs/real/camvid/plug-mask2former_lite0_1xb4-1k_camvid-160x128.py',
        ),
        'RetinaNet with PVT': (
            'configs/real/bccd/retinanet_pvt-demo_1xb4-12e_bccd.py',
            'configs/real/bccd/agent-retinanet_pvt-demo_1xb4-12e_bccd.py',
            'configs/real/bccd/saga-retinanet_pvt-demo_1xb4-12e_bccd.py',
        ),
    },
}


@dataclass(frozen=True)
class Picture:
    """A picture of a model, or of two: a tool's name, configs, a text, and further options of the tool."""

    figure: str
    config: str
    against: str | None
    text: str
    options: Sequence[str] = ()


def pictures_of(family: str, configs: Sequence[str]) -> list[Picture]:
    """Return the pictures of a family's models."""
    vanilla, *gated = configs
    if family == DETR:
        points = 'Sampling points of the best queries: size by attention, colour by level.'
        gained = 'Weights that sampling points gain and lose by the gates: the same model with its gates and without.'
        return [
            Picture('sampling_points', gated[0], vanilla, points),
            Picture('sampling_points', gated[0], None, gained, ('--difference', '--top-k', '1')),
            Picture('gates', gated[0], None, "PLuG's gates of deformable attention by head and level."),
        ]
    if family == MASK2FORMER:
        drawn = 'Share of the attention that the most attended query draws.'
        alike = 'Similarity of the attention patterns of every two layers.'
        return [
            Picture('gates', gated[0], None, "PLuG's gates between Mask2Former's queries."),
            Picture('attention_sink', gated[0], vanilla, drawn),
            Picture('cka', gated[0], vanilla, alike),
        ]
    agent, saga = gated
    return [
        Picture('rollout', agent, vanilla, 'Attention of the backbone, rolled out through its layers.'),
        Picture('agents', agent, None, 'Attention of each agent token.'),
        Picture('gates', saga, None, "SAGA's gates of keys, values and outputs."),
        Picture('kv_rank', saga, None, 'Rank of the map K^T V.'),
    ]


STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 72rem; padding: 1rem; }
h2 { border-top: 1px solid #8884; margin-top: 2.5rem; padding-top: 1rem; }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1rem; }
figure { margin: 1rem 0; } figcaption, code { overflow-wrap: anywhere; }
img { background: #fff; height: auto; max-width: 100%; }
.wide { overflow-x: auto; } th, td { padding: .3rem .8rem .3rem 0; text-align: left; white-space: nowrap; }
"""


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        title: Heading.
        text: Paragraphs, with empty lines between them.
        command: Command line that made it; empty if there is none.
        pictures: PNG files.
        table: Rows with the same keys.
        captions: Captions of pictures, by the stem of the file; by default that stem.
        notes: Paragraphs below the table.
    """

    title: str
    text: str
    command: str
    pictures: Sequence[Path]
    table: Sequence[Mapping[str, Any]] = ()
    captions: Mapping[str, str] = field(default_factory=dict)
    notes: str = ''


def main(argv: list[str]) -> None:
    """Parse arguments, train what is missing, draw, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--work-dirs', type=Path, default=Path('work_dirs'), help="the demos' (default %(default)s)")
    on_what = 'images of the models: generated ones (default), or those of configs/real/README.md'
    parser.add_argument('--data', choices=list(FAMILIES), default=SHAPES, help=on_what)
    parser.add_argument('--out', type=Path, help='folder (default work_dirs/report, or work_dirs/report_real)')
    parser.add_argument('--max-images', type=int, default=2, help='of the validation images (default %(default)s)')
    sides = 'sides of images to time backbones at'
    parser.add_argument('--sizes', nargs='+', default=['128', '256', '512'], help=sides)
    parser.add_argument('--train-options', nargs='*', default=[], help='--cfg-options of a training that is missing')
    args = parser.parse_args(argv)
    if not Path('configs/real').is_dir():
        raise ConfigError('configs/real is not here: run this from the root of a checkout of mmgate.')
    args.out = args.out or Path('work_dirs/report' if args.data == SHAPES else f'work_dirs/report_{args.data}')
    if args.data == SHAPES:
        run([str(TOOLS.parent / 'dataset_converters/make_shapes.py'), 'data/shapes', '--num-objects', '0'])
    families = FAMILIES[args.data] if args.data == SHAPES else with_images(FAMILIES[args.data])
    configs = [config for family in families.values() for config in family]
    checkpoints = {config: checkpoint_of(config, args.work_dirs, args.train_options) for config in configs}
    sections = [runs_of(family, of, args) for family, of in families.items()]
    pictures = [picture for family, of in families.items() for picture in pictures_of(family, of)]
    for number, picture in enumerate(pictures):
        config = picture.config
        images = max(args.max_images, LEAST_IMAGES) if picture.figure == 'cka' else args.max_images
        command = [f'plot_{picture.figure}', config, checkpoints[config], '--max-images', str(images)]
        command += ['--against', picture.against, checkpoints[picture.against]] if picture.against else []
        title = f'{picture.figure.replace("_", " ")}, {Path(config).stem}'
        sections.append(drawn(title, picture.text, [*command, *picture.options], args.out / f'{number}'))
    last, backbones = list(FAMILIES[args.data].items())[-1]
    if last in families:
        command = ['plot_efficiency', *backbones, '--sizes', *args.sizes]
        text = 'Throughput and peak memory here.'
        sections.append(drawn('efficiency of the backbones', text, command, args.out / 'efficiency'))
    print(write_page(args.out, TITLES[args.data], sections))


def with_images(families: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the families whose images are there, and say which are not.

    Raises:
        ConfigError: No images are there.
    """
    roots = {
        family: Path(Config.fromfile(configs[0], import_custom_modules=False).data_root)
        for family, configs in families.items()
    }
    missing = sorted({str(root) for root in roots.values() if not root.is_dir()})
    said = f'{" and ".join(missing)} not there: configs/real/README.md says where the images are from.'
    there = {family: configs for family, configs in families.items() if roots[family].is_dir()}
    if not there:
        raise ConfigError(said)
    if missing:
        print(f'The page is without {", ".join(sorted(families.keys() - there))}. {said}')
    return there


def checkpoint_of(config: str, work_dirs: Path, options: list[str]) -> str:
    """Return a config's last checkpoint; train the model first if it is missing or was stopped."""
    work_dir = work_dirs / Path(config).stem
    last = work_dir / 'last_checkpoint'
    if not is_trained(work_dir, Path(config).name):
        extra = ['--resume'] * last.is_file() + ['--cfg-options'] * bool(options) + options
        run(['-m', 'mmgate.tools.train', config, '--work-dir', str(work_dir), *extra])
    return last.read_text().strip()


def is_trained(work_dir: Path, config: str) -> bool:
    """Return True if a work dir's last checkpoint is of the last epoch or iteration of the config in it."""
    last = work_dir / 'last_checkpoint'
    kept = work_dir / config
    if not (last.is_file() and kept.is_file()):
        return False
    loop = Config.fromfile(kept).train_cfg
    number = Path(last.read_text().strip()).stem.rpartition('_')[2]
    return number.isdigit() and int(number) >= (loop.get('max_epochs') or loop.max_iters)


def drawn(
    title: str, text: str, command: list[str], out: Path, *, execute: Callable[[list[str]], None] | None = None
) -> Section:
    """Run a tool of this folder, by :func:`run` unless told otherwise, and return its pictures.

    Those of an earlier report are deleted.
    """
    for old in (*out.glob('*.png'), *out.glob('*.csv')):
        old.unlink()
    (execute or run)([str(TOOLS / f'{command[0]}.py'), *command[1:], '--out', str(out)])
    shown = f'python tools/analysis_tools/{command[0]}.py {shlex.join(command[1:])} --out DIR'
    return Section(title, text, shown, sorted(out.glob('*.png')))


def runs_of(family: str, configs: tuple[str, ...], args: argparse.Namespace) -> Section:
    """Return the table and the curves of a family's runs."""
    folders = {Path(config).stem: args.work_dirs / Path(config).stem for config in configs}
    command = ['compare_runs', *(f'{name}={folder}' for name, folder in folders.items())]
    text = 'One seed each: a difference may be chance.'
    out = args.out / family.replace(' ', '-')
    section = drawn(f'runs of {family}', text, command, out)
    runs = {name: read_run(folder) for name, folder in folders.items()}
    metric = choose_metric(list(runs.values()))
    rows = [{'run': name, metric: float(run.final(metric)), 's a step': run.seconds} for name, run in runs.items()]
    return replace(section, table=rows)


def run(command: list[str]) -> None:
    """Run Python and show its output."""
    code = subprocess.run([sys.executable, '-W', 'ignore', *command], check=False).returncode
    if code:
        raise ConfigError(f'python {" ".join(command)} ended with {code}; see above.')


def run_quietly(command: list[str]) -> None:
    """Run Python and show its output only if it fails.

    Raises:
        ConfigError: It failed.
    """
    call = [sys.executable, '-W', 'ignore', *command]
    done = subprocess.run(call, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        last = '\n'.join(done.stdout.splitlines()[-LINES:])
        raise ConfigError(f'python {" ".join(command)} ended with {done.returncode}:\n{last}')


def write_page(out: Path, title: str, sections: Sequence[Section]) -> Path:
    """Write ``out/index.html`` with every picture inside it, and return the path."""
    links = ''.join(f'<a href="#s{n}">{html.escape(section.title)}</a>' for n, section in enumerate(sections))
    body = '\n'.join(_section(f's{number}', section) for number, section in enumerate(sections))
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f'<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n'
        f'<body><h1>{html.escape(title)}</h1><nav>{links}</nav>\n{body}\n</body></html>\n'
    )
    out.mkdir(parents=True, exist_ok=True)
    path = out / 'index.html'
    path.write_text(page, encoding='utf-8')
    return path


def _section(anchor: str, section: Section) -> str:
    parts = [f'<section id="{anchor}"><h2>{html.escape(section.title)}</h2>', *_paragraphs(section.text)]
    for path in section.pictures:
        data = base64.b64encode(path.read_bytes()).decode()
        caption = html.escape(section.captions.get(path.stem, path.stem))
        picture = f'<img alt="{caption}" src="data:image/png;base64,{data}">'
        parts.append(f'<figure>{picture}<figcaption>{caption}</figcaption></figure>')
    if section.table:
        lines = [''.join(f'<th>{html.escape(str(key))}</th>' for key in section.table[0])]
        for row in section.table:
            lines.append(''.join(f'<td>{html.escape(_shown(value))}</td>' for value in row.values()))
        parts.append(f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>')
    parts += _paragraphs(section.notes)
    if section.command:
        parts.append(f'<p><code>{html.escape(section.command)}</code></p>')
    return '\n'.join([*parts, '</section>'])


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return '-' if math.isnan(value) else f'{value:.4g}'


def _paragraphs(text: str) -> list[str]:
    return [f'<p>{html.escape(part)}</p>' for part in text.split('\n\n') if part]


if __name__ == '__main__':
    sys.exit(cli.main(main))
