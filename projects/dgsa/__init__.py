"""The M-DGSA paper's classifiers of images and texts; to import this registers what configs of images name."""

from importlib.util import find_spec

# The classifiers of texts need torch and mmgate alone.
if find_spec('mmengine') is not None:
    from projects.dgsa import noise, svhn  # noqa: F401
if find_spec('mmpretrain') is not None:
    from projects.dgsa import dgvit  # noqa: F401
