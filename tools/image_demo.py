"""Draw what a model sees in images: ``python tools/image_demo.py IMAGES CONFIG CHECKPOINT --help``."""

import sys

from mmgate.tools.image_demo import main

if __name__ == '__main__':
    sys.exit(main())
