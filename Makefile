# Every target sets up what it needs; a second call costs a checksum.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
JOBS ?= 2
PY := $(VENV)/bin/python
DEMO_SEG := configs/plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128.py
DEMO := configs/plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py

DEMO_BACKBONES := configs/agent/mask_rcnn/agent-mask-rcnn_pvt-demo_1xb8-8e_shapes.py \
	configs/saga/mask_rcnn/saga-mask-rcnn_swin-demo_1xb8-8e_shapes.py

.PHONY: setup setup-demo sanitize demo demo-seg demo-backbones demo-pretrain test test-slow test-originals test-transformers test-torch mutants lint docs bench gpu dist
export PYTHON VENV

setup:
	@tools/dev/setup_env.sh

# What the demos need, without a compiler: mmcv's operators are torch's then.
setup-demo:
	@tools/dev/setup_env.sh demo

demo: setup-demo
	@$(PY) tools/dev/demo.py $(DEMO)

demo-seg: setup-demo
	@$(PY) tools/dev/demo.py $(DEMO_SEG)

demo-backbones: setup-demo
	@$(PY) tools/dev/demo.py $(DEMO_BACKBONES)

demo-pretrain: setup
	@$(PY) tools/dev/demo.py

test: setup lint
	@$(PY) -m pytest -n $(JOBS) --dist loadfile -m "not slow"

# SUITE=... takes a part of the two below, and more of pytest's arguments.
SUITE ?= tests

# The longer tests: every architecture of the zoos, files of every family, a wheel elsewhere.
test-slow: setup
	@$(PY) -m pytest -n $(JOBS) --dist worksteal -m slow $(strip $(SUITE))

# The suite beside OpenMMLab's own packages, in a separate environment.
test-originals:
	@VENV=$(VENV)-originals tools/dev/setup_env.sh originals
	@$(VENV)-originals/bin/python -m pytest -n $(JOBS) --dist loadfile -m "not slow" $(strip $(SUITE))

# transformers' models, and the projects beside them, in a separate environment without mm packages.
test-transformers: SUITE = tests/test_transformers $(wildcard projects)
# A core for each process, as tests/conftest.py says, which projects alone do not read.
test-transformers: export OMP_NUM_THREADS ?= 1
test-transformers:
	@VENV=$(VENV)-transformers tools/dev/setup_env.sh transformers
	@$(VENV)-transformers/bin/python -m pytest -n $(JOBS) --dist loadfile -m "not slow" $(strip $(SUITE))

# Operators, layers and gates beside torch alone, of any version: make test-torch TORCH=2.11.0
test-torch: SUITE = tests/test_ops tests/test_gates \
	tests/test_fake_tensors.py tests/test_transformers/test_torch_alone.py
test-torch: export TORCH ?= 2.11.0
test-torch: VENV := .venv-torch-$(TORCH)
test-torch:
	@tools/dev/setup_env.sh torch
	@$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile -m "not slow" $(strip $(SUITE))

# A sample of small changes, each against the tests that concern it; SEED=1 for another. tests/README.md has the score.
SEED ?= 0
mutants: setup
	@$(PY) tools/dev/mutants.py --seed $(SEED)

# The CPU kernel's tests beside the address, undefined-behaviour and thread sanitizers, in a scratch folder.
sanitize: setup
	@tools/dev/sanitize.sh $(PY)

lint: setup
	@$(PY) -m ruff check .
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports --no-logo

# The guides, the pages beside the code and the API as a site, site/index.html; a dead link ends it.
docs:
	@tools/dev/build_docs.sh

bench: setup
	@$(PY) tools/analysis_tools/benchmark_ops.py --op ms_deform_attn --device cpu

# On a machine with a GPU, three parts of 8 minutes at most: tests of the kernels, the sampler beside its peers, PLuG
# attention with the doctor and training steps. `PART=sampler` takes one. It needs no mm package: `PYTHONPATH=. python
# tools/dev/gpu.py --out DIR` does the same with torch, triton, numpy and pytest alone.
gpu: setup
	@$(PY) tools/dev/gpu.py --out benchmarks/results $(if $(PART),--part $(PART))

# The source archive and the wheel, in dist.
dist: setup
	@$(PY) tools/dev/dist.py
