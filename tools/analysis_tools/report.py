"""Write a page on the attention of the demos' models, vanilla and gated: index.html, which needs no network.

A model without a checkpoint below the work dirs is trained first, by tools/train.py; ``make report`` calls this.
"""

import argparse
import base64
import html
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compare_runs import choose_metric, read_run
from mmengine.config import Config

import mmgate  # noqa: F401
from mmgate.analysis.probes.cka import LEAST_IMAGES
from mmgate.errors import ConfigError
from mmgate.train import cli

TOOLS = Path(__file__).resolve().parent
VANILLA_DETR = 'configs/_base_/deformable-detr-refine_r18_1xb8-12e_shapes.py'
DETR = 'configs/plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py'
VANILLA_MASK2FORMER = 'configs/_base_/mask2former_r18_1xb8-1k_shapes-128x128.py'
MASK2FORMER = 'configs/plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128.py'
PVT = 'configs/vanilla/mask_rcnn/mask-rcnn_pvt-demo_1xb8-8e_shapes.py'
AGENT = 'configs/agent/mask_rcnn/agent-mask-rcnn_pvt-demo_1xb8-8e_shapes.py'
SAGA = 'configs/saga/mask_rcnn/saga-mask-rcnn_pvt-demo_1xb8-8e_shapes.py'
FAMILIES = {'Deformable DETR': (VANILLA_DETR, DETR), 'Mask2Former': (VANILLA_MASK2FORMER, MASK2FORMER)} | {
    'Mask R-CNN with PVT': (PVT, AGENT, SAGA)
}
PICTURES = (  # tool, model, second model, text
    ('sampling_points', DETR, VANILLA_DETR, 'Sampling points of the best queries: size by attention, colour by level.'),
    ('gates', DETR, None, "PLuG's gates of deformable attention by head and level."),
    ('gates', MASK2FORMER, None, "PLuG's gates between Mask2Former's queries."),
    ('attention_sink', MASK2FORMER, VANILLA_MASK2FORMER, 'Share of the attention that the most attended query draws.'),
    ('cka', MASK2FORMER, VANILLA_MASK2FORMER, 'Similarity of the attention patterns of every two layers.'),
    ('rollout', AGENT, PVT, 'Attention of the backbone, rolled out through its layers.'),
    ('agents', AGENT, None, 'Attention of each agent token.'),
    ('gates', SAGA, None, "SAGA's gates of keys, values and outputs."),
    ('kv_rank', SAGA, None, 'Rank of the map K^T V.'),
)

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
    """A part of the page: heading, text, commands, PNG files, and the rows of a table, which have the same keys."""

    title: str
    text: str
    command: str
    pictures: Sequence[Path]
    table: Sequence[Mapping[str, Any]] = ()


def main(argv: list[str]) -> None:
    """Parse arguments, train what is missing, draw, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--work-dirs', type=Path, default=Path('work_dirs'), help="the demos' (default %(default)s)")
    parser.add_argument('--out', type=Path, default=Path('work_dirs/report'), help='folder (default %(default)s)')
    parser.add_argument('--max-images', type=int, default=2, help='of the validation images (default %(default)s)')
    sides = 'sides of images to time backbones at'
    parser.add_argument('--sizes', nargs='+', default=['128', '256', '512'], help=sides)
    parser.add_argument('--train-options', nargs='*', default=[], help='--cfg-options of a training that is missing')
    args = parser.parse_args(argv)
    if not Path(DETR).is_file():
        raise ConfigError(f'{DETR} is not here: run this from the root of a checkout of mmgate.')
    run([str(TOOLS.parent / 'dataset_converters/make_shapes.py'), 'data/shapes', '--num-objects', '0'])
    configs = [config for family in FAMILIES.values() for config in family]
    checkpoints = {config: checkpoint_of(config, args.work_dirs, args.train_options) for config in configs}
    sections = [runs_of(family, of, args) for family, of in FAMILIES.items()]
    for number, (figure, config, against, text) in enumerate(PICTURES):
        images = max(args.max_images, LEAST_IMAGES) if figure == 'cka' else args.max_images
        command = [f'plot_{figure}', config, checkpoints[config], '--max-images', str(images)]
        command += ['--against', against, checkpoints[against]] if against else []
        title = f'{figure.replace("_", " ")}, {Path(config).stem}'
        sections.append(drawn(title, text, command, args.out / f'{number}'))
    command = ['plot_efficiency', PVT, AGENT, SAGA, '--sizes', *args.sizes]
    text = 'Throughput and peak memory here.'
    sections.append(drawn('efficiency of the backbones', text, command, args.out / 'efficiency'))
    print(write_page(args.out, 'Attention in the demos, vanilla and gated', sections))


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


def drawn(title: str, text: str, command: list[str], out: Path) -> Section:
    """Run a tool of this folder and return its pictures; delete those of an earlier report."""
    for old in (*out.glob('*.png'), *out.glob('*.csv')):
        old.unlink()
    run([str(TOOLS / f'{command[0]}.py'), *command[1:], '--out', str(out)])
    shown = f'python tools/analysis_tools/{command[0]}.py {" ".join(command[1:])} --out DIR'
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
    parts = [f'<section id="{anchor}"><h2>{html.escape(section.title)}</h2>', f'<p>{html.escape(section.text)}</p>']
    for path in section.pictures:
        data = base64.b64encode(path.read_bytes()).decode()
        caption = html.escape(path.stem)
        picture = f'<img alt="{caption}" src="data:image/png;base64,{data}">'
        parts.append(f'<figure>{picture}<figcaption>{caption}</figcaption></figure>')
    if section.table:
        lines = [''.join(f'<th>{html.escape(str(key))}</th>' for key in section.table[0])]
        for row in section.table:
            shown = (f'{x:.4g}' if isinstance(x, float) else html.escape(str(x)) for x in row.values())
            lines.append(''.join(f'<td>{cell}</td>' for cell in shown))
        parts.append(f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>')
    return '\n'.join([*parts, f'<p><code>{html.escape(section.command)}</code></p></section>'])


if __name__ == '__main__':
    sys.exit(cli.main(main))
