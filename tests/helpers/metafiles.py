"""The metafiles of the configs, read; those of projects are not in the index, which wheels have, too."""

from __future__ import annotations

from pathlib import Path

import yaml

import mmgate

ROOT = Path(__file__).parents[2]
MIM = Path(mmgate.__file__).parent / '.mim'
INDEX = yaml.safe_load((MIM / 'model-index.yml').read_text())
PROJECTS = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob('projects/*/metafile.yml'))]
METAFILES = {path: yaml.safe_load((ROOT / path).read_text()) for path in (*INDEX['Import'], *PROJECTS)}
SHIPPED = [model for path in INDEX['Import'] for model in METAFILES[path]['Models']]
MODELS = [model for metafile in METAFILES.values() for model in metafile['Models']]
