# Every target sets up what it needs; a second call costs a checksum.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
PY := $(VENV)/bin/python
DEMO := configs/plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py

.PHONY: setup demo test lint bench
export PYTHON VENV

setup:
	@tools/dev/setup_env.sh

demo: setup
	@$(PY) tools/dev/demo.py $(DEMO)

test: setup lint
	@$(PY) -m pytest -m "not slow"

lint: setup
	@$(PY) -m ruff check .
	@$(PY) -m mypy

bench: setup
	@$(PY) tools/analysis_tools/benchmark_ops.py --op ms_deform_attn --device cpu
