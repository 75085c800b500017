"""Command lines for use without a checkout of the repository: ``python -m mmgate.tools.train CONFIG``."""

import sys
from importlib.util import find_spec

if find_spec('mmengine') is None:
    needed = 'need mmengine, mmcv, and mmdet or mmseg: pip install torch==2.13.0 && pip install "mmgate[mm]"'
    print(f'error: the command lines of mmgate {needed}', file=sys.stderr)
    sys.exit(2)
