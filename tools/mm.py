"""Run a tool that mmdet or mmseg ships, with mmgate imported: ``python tools/mm.py [NAME [ARGUMENTS]]``."""

import sys

from mmgate.tools.mm import main

if __name__ == '__main__':
    sys.exit(main())
