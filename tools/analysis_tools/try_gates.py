"""Try gates in a config's model: for each seed train the vanilla model and each gate, and compare them.

Example:
try_gates.py CONFIG --checkpoint vanilla.pth --gate 'encoder.layers.*.self_attn=PLuGMultiheadAttention' --iters 500
"""

import argparse
import json
import logging
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from children import alone
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.logging import MMLogger
from page import Section, draw, write_page
from study import LOCK, Study, add_processes, report_study, run_study, run_tool, write_study

import mmgate  # noqa: F401
from mmgate.analysis.loading import check_folder, positive, write_csv
from mmgate.benchmarks.costs import costs_table, first_batch, measure_costs, run_seconds
from mmgate.errors import ConfigError
from mmgate.gate import gate_of_type
from mmgate.gates import PLuGDeformableGate, PLuGGate
from mmgate.mm import cli
from mmgate.mm.config_file import (
    add_trust_option,
    check_checkpoint,
    config_parser,
    differences,
    merge_options,
    read_config,
)
from mmgate.mm.gate_options import put_gates
from mmgate.mm.trial import first_figure, make_trial
from mmgate.registry import MODELS
from mmgate.rules import FORM, check_rules, read_rules
from mmgate.training import TRAINS

VANILLA = 'vanilla'
# Default rates of gates that join a trained model. At PLuG's identity start only two scalars of a gate get a gradient.
RATES = {PLuGDeformableGate: 20.0, PLuGGate: 20.0}
PLAN = 'plan.json'
SHORTENED = ('MultiScaleDeformableAttention', 'MultiheadAttention', 'Attention')
# Pictures of a pair of models, the first that both can be drawn by.
PICTURES = (
    (
        ['plot_sampling_points', '--difference', '--top-k', '1'],
        'Points that the best query of the gated model looks at, and the weight that each has gained or lost against '
        'the vanilla model, which was trained on the same images.',
    ),
    (['plot_rollout'], 'Attention on the image, of the gated model and the vanilla one.'),
    (['plot_attention_sink'], 'Share of attention on the most attended key, of the gated model and the vanilla one.'),
)
CAPTIONS = dict(
    differences='Differences between runs of the same seed',
    curves='Validations of the runs and, thicker, their means; points if each run has a single validation',
)
MOVED = 'Gates moved is the mean distance of gates from the value that changes nothing; the largest is in brackets.'
COSTS = 'On the first batch, all models in one process. A figure with a plus is what gates add to the first row.'
OPERATOR = (
    "A gate of deformable attention also replaces the host's operator by mmgate's, so that a part of its time and "
    'memory is that of the operator. The type MultiScaleDeformableAttention, which has no gate, shows this part.'
)


def main(argv: list[str]) -> None:
    """Parse arguments, measure what gates cost, train what is missing, compare."""
    args = _parse(argv)
    names = [VANILLA, *names_of(args.gate)]
    original = read_config(args.config)
    merge_options(original, args.cfg_options or {})
    check_rules([rule for text in args.gate for rule in read_rules(text)])
    out = Path(args.out or f'work_dirs/try_{Path(original.filename).stem}')
    check_folder(out)
    with alone(out / LOCK):
        _try(args, names, original, out)


def _try(args: argparse.Namespace, names: list[str], original: Config, out: Path) -> None:
    if args.checkpoint:
        check_checkpoint(args.checkpoint)
        original.load_from = args.checkpoint
    if args.amp:
        cli.enable_amp(original)
    metric = args.metric or first_figure(original)
    gated = {name: _gated(args, text) for name, text in zip(names[1:], args.gate, strict=True)}
    plan = _plan(args, original, gated, out)
    config = out / Path(original.filename).name
    _write_config(plan.pop('text'), config, out)
    processes = args.processes or 2 if args.launcher == 'pytorch' else 1
    study = Study(
        path=out / 'study.py',
        runs=dict.fromkeys(names, str(config)),
        seeds=list(range(args.seeds)),
        metric=metric,
        options={},
        budgets={},
        starts=dict.fromkeys(names, args.checkpoint) if args.checkpoint else {},
        gated=gated,
        processes=processes,
    )
    write_study(study, study.path)
    print('\n'.join(['', costs_table(plan['costs']), '', *filter(None, [_on_operator(study)]), '']))
    print(f'{_said(args, plan, names, processes)}\n', flush=True)
    if args.plan_only:
        return
    expected = run_seconds(plan['costs'], iters=plan['iters'], images=plan['images'], validations=args.validations)
    run_study(study, out, execute=partial(run_tool, processes, quiet=not args.verbose), expected=expected)
    ratios = {row['name']: dict(time=row['time'], memory=row['memory']) for row in plan['costs']}
    table = report_study(study, out, costs=ratios)
    print(f'\n{table}')
    print(page(study, out, table, plan['costs'], args))


def names_of(gates: Sequence[str]) -> list[str]:
    """Return a short name for each text of ``--gate``, by its types and options; equal ones are numbered."""
    names: list[str] = []
    for text in gates:
        parts = []
        for rule in read_rules(text):
            kind = str(rule['type']).rpartition('.')[2]
            for ending in SHORTENED:
                kind = kind.removesuffix(ending)
            options = [f'{key}-{value}' for key, value in rule.items() if key not in ('path', 'type')]
            parts.append('-'.join([kind or 'operator', *options]))
        name = re.sub(r'[^a-z0-9.]+', '-', '_'.join(dict.fromkeys(parts)).lower()).strip('-')
        taken = sum(other.partition('__')[0] == name for other in names)
        names.append(f'{name}__{taken + 1}' if taken else name)
    return names


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = config_parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument('--checkpoint', help='vanilla checkpoint that all runs go on from (default: from the start)')
    parser.add_argument(
        '--gate',
        action='append',
        required=True,
        metavar=f"'{FORM}'",
        help='a gate to try, by one rule, or by several with ; between them; give it again for another one',
    )
    parser.add_argument('--train', choices=TRAINS, help='what of the gated models trains (default: all)')
    parser.add_argument('--seeds', type=positive, default=3, help='runs of each model (default %(default)s)')
    length = parser.add_mutually_exclusive_group()
    length.add_argument('--iters', type=positive, help='length of a run in iterations (default 500)')
    length.add_argument('--epochs', type=positive, help='in epochs instead')
    parser.add_argument('--validations', type=positive, default=4, help='of a run, evenly spaced (default %(default)s)')
    parser.add_argument(
        '--gate-rate',
        type=float,
        help="learning rate of gates, times the model's (default 1; with --checkpoint 20 for PLuG's)",
    )
    parser.add_argument('--metric', help="figure to compare, by its name in the test's log (default: the evaluator's)")
    parser.add_argument('--max-images', type=positive, default=2, help='images on the page (default %(default)s)')
    parser.add_argument('--repetitions', type=positive, default=5, help='steps that are timed (default %(default)s)')
    parser.add_argument('--amp', action='store_true', help='automatic mixed precision (on a GPU)')
    add_processes(parser)
    parser.add_argument('--out', help='folder of the trial (default: work_dirs/try_NAME)')
    parser.add_argument('--plan-only', action='store_true', help='stop after the costs and the plan')
    parser.add_argument('--verbose', action='store_true', help='show the output of the runs, else in their folders')
    add_trust_option(parser)
    args = parser.parse_args(argv)
    if not (args.iters or args.epochs):
        args.iters = 500
    return args


def rates_of(gates: Sequence[str], rate: float | None, *, trained: bool) -> float | dict[str, float]:
    """Return the learning rate of gates as a multiple of the model's: one for all, or one by the class of a gate.

    Args:
        gates: Texts of ``--gate``.
        rate: The rate that was asked for, or None for the defaults.
        trained: True if they join a trained model.
    """
    if rate is not None:
        return rate
    kinds = (gate_of_type(MODELS.get(rule['type'])) for text in gates for rule in read_rules(text))
    return {kind.__name__: RATES.get(kind, 1.0) for kind in kinds if kind is not None} if trained else 1.0


def _gated(args: argparse.Namespace, text: str) -> list[str]:
    return ['--gate', text, *(['--train', args.train] if args.train else [])]


def _plan(args: argparse.Namespace, original: Config, gated: Mapping[str, list[str]], out: Path) -> dict[str, Any]:
    """Return length and costs of the runs and the text of their config, of the same trial begun before if there is one.

    A trial with other seeds keeps its length.
    """
    beside = ('seeds', 'out', 'plan_only', 'verbose', 'max_images')
    asked = {key: value for key, value in vars(args).items() if key not in beside}
    asked = json.loads(json.dumps({**asked, 'config': original.pretty_text}, default=str))
    kept = json.loads((out / PLAN).read_text()) if (out / PLAN).is_file() else {}
    if kept.get('asked') == asked:
        return {key: value for key, value in kept.items() if key != 'asked'}
    print('Measuring what the gates cost, before any training.', flush=True)
    MMLogger.get_current_instance().setLevel(logging.WARNING)
    batch, steps_in_epoch, _ = first_batch(original, 'train')
    tested, _, images = first_batch(original, 'test')
    rates = rates_of(args.gate, args.gate_rate, trained=bool(args.checkpoint))
    of_trial: dict[str, Any] = dict(steps_in_epoch=steps_in_epoch, checkpoint=args.checkpoint, gate_rate=rates)
    of_trial['validations'] = args.validations
    cfg = deepcopy(original)
    make_trial(cfg, iters=args.iters or 100, **of_trial)
    configs = {VANILLA: cfg}
    for name, arguments in gated.items():
        configs[name] = deepcopy(cfg)
        put_gates(configs[name], [arguments[1]], train=args.train)
    found = dict(checkpoint=original.get('load_from'), repetitions=args.repetitions, device=get_device())
    costs = measure_costs(configs, batch, tested, **found)
    iters = args.iters or args.epochs * steps_in_epoch
    cfg = deepcopy(original)
    length = dict(epochs=args.epochs) if args.epochs else dict(iters=iters)
    make_trial(cfg, **length, **of_trial)
    plan = dict(iters=iters, images=images, costs=costs, text=cfg.pretty_text)
    (out / PLAN).write_text(json.dumps(dict(plan, asked=asked), indent=1))
    write_csv(out / 'costs.csv', costs)
    return plan


def _write_config(text: str, path: Path, out: Path) -> None:
    """Write the config of the runs; refuse another one than that of runs that have begun.

    Raises:
        ConfigError: Runs in the folder are of another config.
    """
    begun = list(out.glob('*/seed*/settings.json'))
    if path.is_file() and path.read_text() != text:
        changed = path.with_name('changed.py')
        changed.write_text(text)
        both = [Config.fromfile(str(one), import_custom_modules=False).to_dict() for one in (path, changed)]
        changed.unlink()
        found = '; '.join(list(differences(*both, ''))[:4])
        if begun and found:
            beside = shlex.quote(f'{out}-2')
            raise ConfigError(
                f'{len(begun)} runs in {out} are of another trial: {found}. Give this one another folder, --out '
                f'{beside}, or drop the old: rm -r {shlex.quote(str(out))}'
            )
    path.write_text(text)


def _said(args: argparse.Namespace, plan: Mapping[str, Any], names: Sequence[str], processes: int) -> str:
    """Return the plan in words."""
    of_run = run_seconds(plan['costs'], iters=plan['iters'], images=plan['images'], validations=args.validations)
    minutes = of_run * args.seeds * len(names) / 60
    start = f'go on from {args.checkpoint}' if args.checkpoint else 'begin as the config says'
    several = f', in {processes} processes' if processes > 1 else ''
    seeds = f'{args.seeds} seed{"s" if args.seeds > 1 else ""}'
    return (
        f'{len(names)} models with {seeds} {start}, for {plan["iters"]} iterations each{several}; '
        f'{_rates_in_words(args)}. '
        f'By the measured steps that takes {max(minutes, 0.1):.2g} minutes. Ctrl-C and the same command again go on.'
    )


def _rates_in_words(args: argparse.Namespace) -> str:
    rates = rates_of(args.gate, args.gate_rate, trained=bool(args.checkpoint))
    by_class = rates if isinstance(rates, dict) else {'': rates}
    if len(set(by_class.values())) == 1:
        return f"gates learn at {next(iter(by_class.values())):g} times the model's rate"
    listed = ' and '.join(f'{rate:g} ({name})' for name, rate in by_class.items())
    return f"gates learn at {listed} times the model's rate"


def page(study: Study, out: Path, table: str, costs: list[dict[str, Any]], args: argparse.Namespace) -> Path:
    """Write ``index.html``: the table, the figures, and every gate beside the vanilla model on the same images."""
    command = shlex.join(['python', 'tools/analysis_tools/try_gates.py', *sys.argv[1:]])
    figures = [path for path in (out / 'differences.png', out / 'curves.png') if path.is_file()]
    sentences = re.findall(r'^- (.*)$', table, re.M)
    beside = [line for line in table.splitlines() if line and not line.startswith(('|', '- '))]
    text = '\n\n'.join([*sentences, f'{beside[0]}.'])
    notes = [*beside[1:], *([MOVED] if 'gates moved' in table else [])]
    sections = [
        Section('result', text, command, figures, _rows(table), CAPTIONS, '\n\n'.join(notes)),
        Section('costs before the training', COSTS, '', (), _rows(costs_table(costs)), notes=_on_operator(study)),
    ]
    seed = next(s for s in study.seeds if all((out / name / f'seed{s}/result.json').is_file() for name in study.runs))
    checkpoints = {name: (out / name / f'seed{seed}/last_checkpoint').read_text().strip() for name in study.runs}
    for name, gated in study.gated.items():
        config = study.runs[name]
        shared = [config, checkpoints[name], *gated, '--max-images', str(args.max_images)]
        against = ['--against', study.runs[VANILLA], checkpoints[VANILLA]]
        for (tool, *options), text in PICTURES:
            title = f'{name}, seed {seed}: {tool[5:].replace("_", " ")}'
            section = _drawn(title, text, [tool, *shared, *against, *options], out, args.verbose)
            if section is not None:
                sections.append(section)
                break
        command = ['plot_gates', *shared]
        gates = _drawn(f'{name}, seed {seed}: gates', 'The gates after the training.', command, out, args.verbose)
        sections += [gates] if gates is not None else []
    return write_page(out, f'{", ".join(study.gated)} in {Path(args.config).stem}', sections)


def _on_operator(study: Study) -> str:
    """Return the sentences on the operator of deformable attention, if a gate of the trial is of that."""
    types = [rule['type'] for arguments in study.gated.values() for rule in read_rules(arguments[1])]
    return OPERATOR if any(str(kind).endswith('MultiScaleDeformableAttention') for kind in types) else ''


def _drawn(title: str, text: str, command: list[str], out: Path, verbose: bool) -> Section | None:
    """Return the pictures of a tool, or None, said in a line, where the tool refuses the models."""
    print(f'drawing {title}', flush=True)
    folder = out / 'pictures' / re.sub(r'[^\w.-]+', '_', title)
    try:
        return draw(title, text, command, folder, verbose=verbose)
    except ConfigError as error:
        print(f'{command[0]} draws nothing of these models: {str(error).splitlines()[-1]}', flush=True)
        return None


def _rows(table: str) -> list[dict[str, str]]:
    """Return the rows of a Markdown table in a text."""
    lines = [line.strip('|').split('|') for line in table.splitlines() if line.startswith('|')]
    titles = [title.strip() for title in lines[0]]
    return [dict(zip(titles, map(str.strip, line), strict=True)) for line in lines[2:]]


if __name__ == '__main__':
    sys.exit(cli.main(main))
