"""Export detectors and segmentors to files that run without PyTorch, mmcv and mmgate; see tools/deploy/README.md."""
