"""Make a torchvision for CUDA importable with a CPU torch, if there is no torchvision for it.

It is for development environments only: if torchvision cannot be imported, ``setup_env.sh`` copies this file and a
``.pth`` that imports it into the environment. torchvision's compiled operators are not loaded then, and its Python code
fails at the first operator for which it registers a fake. Declaring the two operators is enough for transforms and
models, which mmpretrain uses; calling the operators fails.
"""

import sys
from importlib.abc import MetaPathFinder

OPERATORS = ('nms', 'qnms')
_kept = []


class _BeforeTorchvision(MetaPathFinder):
    """Finder that finds nothing, and declares the operators when torchvision is first imported."""

    def find_spec(self, fullname, path=None, target=None):
        """Declare the operators once."""
        if fullname == 'torchvision':
            sys.meta_path.remove(self)
            from torch.library import Library

            library = Library('torchvision', 'FRAGMENT')
            for name in OPERATORS:
                library.define(f'{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')
            _kept.append(library)  # which takes its operators along when it goes


sys.meta_path.insert(0, _BeforeTorchvision())
