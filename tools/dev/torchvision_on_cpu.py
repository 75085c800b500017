"""Let a torchvision that was built for a CUDA torch be imported beside a CPU torch, where no fitting one is to be had.

For development environments alone: ``setup_env.sh`` copies this file and a ``.pth`` that imports it there
if torchvision cannot be imported there. torchvision's compiled operators do not load then, and its Python code fails at
the first of them that it describes; declaring those two is enough for transforms and models, which is what mmpretrain
uses. Calling them fails.
"""

import sys
from importlib.abc import MetaPathFinder

OPERATORS = ('nms', 'qnms')
_kept = []


class _BeforeTorchvision(MetaPathFinder):
    """Finds nothing; declares the operators when torchvision is first looked for."""

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
