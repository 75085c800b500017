"""Logs of runs that never ran."""

from __future__ import annotations

import json
from pathlib import Path


def write_log(folder: Path, values: dict[int, float], *, seed: int = 0, stamp: str = '20260101_000000') -> Path:
    """Write what mmengine leaves of a run that was validated, and killed as it wrote."""
    log = folder / stamp / 'vis_data/scalars.json'
    log.parent.mkdir(parents=True)
    rows = [dict(loss=1.0, time=0.5, memory=100, step=1), dict(loss=0.5, time=0.7, memory=120, step=2)]
    rows += [{'coco/bbox_mAP': value, 'time': 9.0, 'step': step} for step, value in values.items()]
    rows.append({'gate/neck/mean': 0.5, 'step': 3})  # of GateStatisticsHook
    log.write_text('\n'.join(json.dumps(row) for row in rows) + '\n{"loss": 0.')
    log.with_name('config.py').write_text(f'seeds = 3\nrandomness = dict(seed={seed})\nmodel = dict(type="X")\n')
    return folder
