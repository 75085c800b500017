"""Try gates in a config's model: measure what they cost, train in pairs with the vanilla model, write a page."""

from __future__ import annotations

import argparse
import json
import logging
import re
import shlex
import sys
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.device import get_device
from mmengine.logging import MMLogger

from mmgate.analysis.loading import check_folder, write_csv
from mmgate.analysis.trials.page import write_page
from mmgate.analysis.trials.study import (
    SETTINGS,
    Study,
    alone,
    read_study,
    report_study,
    run_python,
    run_study,
    run_tool,
)
from mmgate.errors import ConfigError, listed
from mmgate.gate import gate_of_type
from mmgate.gates import PLuGDeformableGate, PLuGGate
from mmgate.mm import cli
from mmgate.mm.config_file import check_checkpoint, differences, merge_options, read_config
from mmgate.mm.gate_options import put_rules
from mmgate.mm.trial import first_figure, make_trial
from mmgate.registry import MODELS
from mmgate.rules import check_rules, read_rules

from .costs import costs_table, first_batch, measure_costs, run_seconds

VANILLA = 'vanilla'
# Default rates of gates that join a trained model. At PLuG's identity start only two scalars of a gate get a gradient.
RATES = {PLuGDeformableGate: 20.0, PLuGGate: 20.0}
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
MOVED = 'Gates moved is the mean distance of gates from the value that changes nothing; the largest is in brackets.'
COSTS = 'On the first batch, all models in one process. A figure with a plus is what gates add to the first row.'


def try_gates(args: argparse.Namespace, tools: Path) -> None:
    """Do what the command line of ``try_gates.py`` asks for.

    Args:
        args: The parsed command line.
        tools: Folder of the tools that draw.

    Raises:
        ConfigError: A setting cannot be used, or a command failed.
    """
    cfg = read_config(args.config)
    merge_options(cfg, args.cfg_options or {})
    check_rules([rule for text in args.gate for rule in read_rules(text)])
    if args.checkpoint:
        check_checkpoint(args.checkpoint)
    if args.amp:
        cli.enable_amp(cfg)
    metric = args.metric or first_figure(cfg)
    out = Path(args.out or f'work_dirs/try_{Path(cfg.filename).stem}')
    check_folder(out)
    with alone(out):
        names = names_of(args.gate)
        plan = _plan(args, cfg, names, out)
        config = out / Path(cfg.filename).name
        config.write_text(plan['text'])
        shared = {'config': str(config), **(dict(train=args.train) if args.train else {})}
        runs = {VANILLA: str(config), **{n: dict(shared, gate=g) for n, g in zip(names, args.gate, strict=True)}}
        processes = args.processes or 2 if args.launcher == 'pytorch' else 1
        settings = dict(runs=runs, seeds=list(range(args.seeds)), metric=metric, processes=processes)
        (out / 'study.py').write_text(''.join(f'{key} = {value!r}\n' for key, value in settings.items()))
        study = read_study(out / 'study.py')
        print(f'\n{costs_table(plan["costs"])}\n\n{_said(args, plan, processes)}\n', flush=True)
        if args.plan_only:
            return
        run_study(study, out, execute=partial(run_tool, processes=study.processes, quiet=not args.verbose))
        ratios = {row['name']: dict(time=row['time'], memory=row['memory']) for row in plan['costs']}
        table = report_study(study, out, costs=ratios)
        print(f'\n{table}')
        print(_page(study, out, table, plan['costs'], args, tools))


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


def rates_of(gates: Sequence[str], rate: float | None, *, trained: bool) -> dict[str, float]:
    """Return the learning rate of each class of gates as a multiple of the model's.

    Args:
        gates: Texts of ``--gate``.
        rate: The rate that was asked for, or None for the defaults.
        trained: True if they join a trained model.
    """
    kinds = [gate_of_type(MODELS.get(rule['type'])) for text in gates for rule in read_rules(text)]
    default = RATES if trained else {}
    return {kind.__name__: rate or default.get(kind, 1.0) for kind in kinds if kind is not None}


def _plan(args: argparse.Namespace, cfg: Config, names: Sequence[str], out: Path) -> dict[str, Any]:
    """Return length and costs of the runs and the text of their config, of the same trial begun before if there is one.

    A trial with other seeds keeps its length.

    Raises:
        ConfigError: Runs in the folder are of another trial, which differs by more than its gates.
    """
    kept = out / 'plan.json'
    beside = ('seeds', 'out', 'plan_only', 'verbose', 'metric', 'cfg_options')
    asked = {key: value for key, value in vars(args).items() if key not in beside}
    asked = json.loads(json.dumps({**asked, 'config': cfg.to_dict()}, default=str))
    plan = json.loads(kept.read_text()) if kept.is_file() else {}
    if plan.get('asked') == asked:
        return plan
    begun = list(out.glob(f'*/seed*/{SETTINGS}'))
    changed = [one for one in differences(plan.get('asked', {}), asked, '') if not one.startswith('gate.')]
    if begun and changed:
        raise ConfigError(
            f'{len(begun)} runs in {out} are of another trial: {listed(changed, 4, separator="; ")}. Give this one '
            f'another folder, --out {shlex.quote(f"{out}-2")}, or drop the old: rm -r {shlex.quote(str(out))}'
        )
    print('Measuring what the gates cost, before any training.', flush=True)
    MMLogger.get_current_instance().setLevel(logging.WARNING)
    batch, steps_in_epoch, _ = first_batch(cfg, 'train')
    tested, _, images = first_batch(cfg, 'test')
    length = dict(epochs=args.epochs) if args.epochs else dict(iters=args.iters)
    rates = rates_of(args.gate, args.gate_rate, trained=bool(args.checkpoint))
    trial: dict[str, Any] = dict(checkpoint=args.checkpoint, gate_rate=rates, validations=args.validations)
    cfg = deepcopy(cfg)
    make_trial(cfg, steps_in_epoch=steps_in_epoch, **length, **trial)
    configs = {VANILLA: cfg}
    for name, text in zip(names, args.gate, strict=True):
        configs[name] = deepcopy(cfg)
        put_rules(configs[name], [text], train=args.train)
    costs = measure_costs(configs, batch, tested, checkpoint=cfg.load_from, device=get_device())
    iters = args.epochs * steps_in_epoch if args.epochs else args.iters
    plan = dict(asked=asked, iters=iters, images=images, costs=costs, text=cfg.pretty_text)
    kept.write_text(json.dumps(plan, indent=1))
    write_csv(out / 'costs.csv', costs)
    return plan


def _said(args: argparse.Namespace, plan: dict[str, Any], processes: int) -> str:
    """Return the plan in words."""
    models = len(args.gate) + 1
    of_run = run_seconds(plan['costs'], iters=plan['iters'], images=plan['images'], validations=args.validations)
    minutes = max(of_run * args.seeds * models / 60, 0.1)
    start = f'go on from {args.checkpoint}' if args.checkpoint else 'begin as the config says'
    several = f', in {processes} processes' if processes > 1 else ''
    rates = rates_of(args.gate, args.gate_rate, trained=bool(args.checkpoint))
    learn = ' and '.join(f'{rate:g} ({name})' for name, rate in rates.items())
    if len(set(rates.values())) == 1:
        learn = f'{next(iter(rates.values())):g}'
    seeds = f'{args.seeds} seed{"s" if args.seeds > 1 else ""}'
    return (
        f'{models} models with {seeds} {start}, for {plan["iters"]} iterations each{several}; gates learn at {learn} '
        f"times the model's rate. By the measured steps that takes {minutes:.2g} minutes. Ctrl-C and the same command "
        'again go on.'
    )


def _page(
    study: Study, out: Path, table: str, costs: list[dict[str, Any]], args: argparse.Namespace, tools: Path
) -> Path:
    """Write ``index.html``: the table, the figures, and every gate beside the vanilla model on the same images."""
    command = shlex.join(['python', 'tools/analysis_tools/try_gates.py', *sys.argv[1:]])
    title, rows, *notes = (part.strip() for part in table.partition('\n- ')[0].split('\n\n'))
    said = re.findall(r'^- (.*)$', table, re.M)
    figures = [path for path in (out / 'differences.png', out / 'curves.png') if path.is_file()]
    moved = [MOVED] if 'gates moved' in rows else []
    sections: dict[str, list[str | Path]] = {
        'result': [*said, f'{title}.', *figures, rows, *notes, *moved, command],
        'costs before the training': [COSTS, costs_table(costs)],
    }
    seed = next(s for s in study.seeds if all((out / name / f'seed{s}/result.json').is_file() for name in study.runs))
    checkpoints = {name: (out / name / f'seed{seed}/last_checkpoint').read_text().strip() for name in study.runs}
    for name in names_of(args.gate):
        shared = [study.config(name), checkpoints[name], *study.gated(name), '--max-images', '2']
        pair = [*shared, '--against', study.config(VANILLA), checkpoints[VANILLA]]
        pictures = [([tool, *pair, *options], text) for (tool, *options), text in PICTURES]
        for choices in (pictures, [(['plot_gates', *shared], 'The gates after the training.')]):
            for (tool, *given), text in choices:
                heading = f'{name}, seed {seed}: {tool[5:].replace("_", " ")}'
                print(f'drawing {heading}', flush=True)
                folder = out / 'pictures' / name / tool
                if _draws([str(tools / f'{tool}.py'), *given], folder, verbose=args.verbose):
                    command = f'python tools/analysis_tools/{tool}.py {shlex.join(given)} --out DIR'
                    sections[heading] = [text, *sorted(folder.glob('*.png')), command]
                    break
    return write_page(out / 'index.html', f'{", ".join(names_of(args.gate))} in {Path(args.config).stem}', sections)


def _draws(call: list[str], folder: Path, *, verbose: bool) -> bool:
    """Run a tool that draws into a folder; return False, after a message, if it refuses the models."""
    for old in folder.glob('*'):
        old.unlink()
    try:
        run_python([*call, '--out', str(folder)], None if verbose else folder / 'output.log')
    except ConfigError as error:
        print(f'nothing is drawn: {str(error).splitlines()[-1 if verbose else -2]}', flush=True)
        return False
    return True
