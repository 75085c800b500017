"""The metafiles of the configs, read."""

from __future__ import annotations

from pathlib import Path

import yaml

import mmgate

MIM = Path(mmgate.__file__).parent / '.mim'
INDEX = yaml.safe_load((MIM / 'model-index.yml').read_text())
METAFILES = {path: yaml.safe_load((MIM / path).read_text()) for path in INDEX['Import']}
MODELS = [model for metafile in METAFILES.values() for model in metafile['Models']]
