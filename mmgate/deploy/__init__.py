"""Whole detectors and segmentors as files that run without PyTorch, mmcv and mmgate: see tools/deploy/README.md."""
