# The two commands of the README are `make train` and `make test`. On a fresh machine each makes
# a virtual environment in .venv, installs into it what constraints.txt pins, and runs; later
# calls only run. A machine without a GPU saves gigabytes with torch's CPU build: name its index in
# PIP_EXTRA_INDEX_URL.

PYTHON ?= python3
VENV   ?= .venv
# Options for the program that a target runs, such as ARGS="--preset tiny --train-iters 100".
ARGS   ?=
# The environment of `make cuda-test` and `make core-test`, which holds torch's CUDA build (5 GB): by
# default the oldest torch that is supported. For another one, in an environment of its own:
# make cuda-test VENV_CUDA=.venv-cuda-newest CUDA_TORCH="<=2.15.0" PYTHON=python3.13
VENV_CUDA  ?= .venv-cuda
CUDA_TORCH ?= 2.11.0
# The newest torch that was tested; graphfsdp warns of newer ones.
NEWEST_TORCH ?= 2.15.0
# What .ci/run asks of each torch beside the one that constraints.txt pins.
CORE = $(addprefix tests/,capture/test_capture.py capture/test_on_change.py \
  capture/test_verification.py capture/test_model_zoo.py capture/cpu/test_cpu_graph.py \
  optim/test_fused_adam.py optim/test_as_made.py optim/test_adam_state.py \
  sharding/test_fully_shard.py sharding/test_trains_like_one_rank.py sharding/test_fsdp2_scripts.py \
  sharding/test_row_arithmetic.py checkpoint/test_checkpoint.py in_place/test_in_place.py in_place/test_parts.py \
  in_place/test_grouped_step.py)
# The environment of `make libraries-test`, and the tests that need other libraries.
VENV_LIBRARIES ?= .venv-libraries
LIBRARIES = $(addprefix tests/,integrations project/test_other_libraries.py \
  project/test_porting.py project/test_examples.py training/test_hugging_face_weights.py \
  training/test_training_run_directory.py capture/test_libraries_inside.py)
# The environment of `make docs`, without torch, and where the site goes.
VENV_DOCS ?= .venv-docs
SITE ?= build/site
# Where `make train` puts its run; a new directory each time, since a run is never overwritten.
RUN    ?= runs/$(shell date +%Y%m%d-%H%M%S)
# Where `make bench` puts its results, likewise.
ifndef BENCH
BENCH  := runs/bench-$(shell date +%Y%m%d-%H%M%S)
endif
# Where `make wheel` puts the wheel.
DIST   ?= dist

bin := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help train test core-test newest-torch cuda-env cuda-test cuda-tables libraries-env libraries-test lint format bench gpu-check wheel docs clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s  %s\n", $$1, $$2 }' Makefile

train: $(VENV)/.train  ## train the default GPT on Python's own source files (ARGS="..." for more)
	$(bin)/python -m graphfsdp train --out "$(RUN)" $(ARGS)

# Files are spread over processes: one per core, and few, since each has gloo ranks of its own.
# ARGS="-n 0" runs all in one process, for --pdb and -s.
test: $(VENV)/.dev  ## run the test suite (ARGS="-k name" for a part of it)
	$(bin)/python -m pytest -n auto --maxprocesses 4 --dist loadfile $(ARGS)

# On x86-64 and Linux, without a GPU: tests/cuda_stand_in/README.md says what it can show.
cuda-env: $(VENV_CUDA)/.stamp

cuda-test: $(VENV_CUDA)/.stamp  ## the tests for a GPU, on torch's CUDA build above a stand-in for the driver
	$(VENV_CUDA)/bin/python tests/cuda_stand_in/above.py -m pytest -m gpu -n auto --maxprocesses 4 --dist loadfile $(ARGS)

newest-torch:
	@echo $(NEWEST_TORCH)

# From the checkout, as on a machine where nothing can be installed.
core-test: $(VENV_CUDA)/.stamp  ## the core of the suite on a CPU, on the torch of that environment
	CUDA_VISIBLE_DEVICES= PYTHONPATH=. $(VENV_CUDA)/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile $(CORE) $(ARGS)

libraries-env: $(VENV_LIBRARIES)/.stamp

libraries-test: $(VENV_LIBRARIES)/.stamp  ## the tests of other libraries' loops and models, and the notebooks, with these libraries
	$(VENV_LIBRARIES)/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile $(LIBRARIES) $(ARGS)
	PYTHONPATH=. $(VENV_LIBRARIES)/bin/python -m pytest --nbmake examples/notebooks

cuda-tables: $(VENV_CUDA)/.stamp  ## launches and memory of one iteration above that stand-in, into docs/emulated.md
	PYTHONPATH=.:tests:tests/support $(VENV_CUDA)/bin/python -m benchmarks.emulated

lint: $(VENV)/.dev  ## ruff check, ruff format --check, mypy --strict
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy

format: $(VENV)/.dev  ## mend what ruff can mend
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

# The budget is in minutes; what does not fit into it is listed as left out.
bench: $(VENV)/.train  ## all contenders on this CPU in 14 minutes, into docs/speed.md
	$(bin)/python -m graphfsdp bench --device cpu --budget 14 --out "$(BENCH)" $(ARGS)
	$(bin)/python -m benchmarks.readme_table --keep "$(BENCH)"

# From a bare checkout: nothing is installed or downloaded.
gpu-check:  ## tests, parity and speed on a machine with a GPU; writes a JSON file into $OUT
	$(PYTHON) -m benchmarks.gpu_check $(ARGS)

# An earlier build/ would put modules that are gone into the wheel.
wheel: $(VENV)/.release  ## build source archive and wheel into DIST, and have what an index would refuse named
	rm -rf build "$(DIST)"/graphfsdp-*
	$(bin)/python -m build --outdir "$(DIST)" .
	$(bin)/python -m twine check --strict "$(DIST)"/*
	$(bin)/check-wheel-contents "$(DIST)"/*.whl

docs: $(VENV_DOCS)/.stamp  ## build the site into SITE; warnings are errors, and nothing is fetched
	NO_MKDOCS_2_WARNING=1 $(VENV_DOCS)/bin/python -m mkdocs build --strict --site-dir "$(abspath $(SITE))"

clean:  ## remove the environment and every build product; runs/ stays
	rm -rf $(VENV) $(VENV_CUDA) $(VENV_LIBRARIES) $(VENV_DOCS) tests/cuda_stand_in/build build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(bin)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
	  "graphfsdp needs Python 3.11 or newer, got " + sys.version.split()[0] \
	  + "; name one: make PYTHON=python3.12 ...")'
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }  # half an environment is none

# A stamp for each set of packages, so that `make train` does not wait for the developer's tools.
$(VENV)/.train: pyproject.toml constraints.txt | $(bin)/python
	$(bin)/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(bin)/python
	$(bin)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@ $(VENV)/.train

$(VENV)/.release: pyproject.toml constraints.txt | $(VENV)/.train
	$(bin)/python -m pip install --quiet --constraint constraints.txt "build" "check-wheel-contents" "twine"
	@touch $@

$(VENV_LIBRARIES)/.stamp: pyproject.toml constraints.txt tests/integrations/requirements.txt
	@$(PYTHON) -m venv $(VENV_LIBRARIES) || { rm -rf $(VENV_LIBRARIES); exit 1; }
	$(VENV_LIBRARIES)/bin/python -m pip install --quiet --progress-bar off --constraint constraints.txt \
	  --requirement tests/integrations/requirements.txt --editable ".[dev]"
	@touch $@

$(VENV_DOCS)/.stamp: docs/requirements.txt
	@$(PYTHON) -m venv $(VENV_DOCS) || { rm -rf $(VENV_DOCS); exit 1; }
	$(VENV_DOCS)/bin/python -m pip install --quiet --progress-bar off --requirement docs/requirements.txt
	@touch $@

# torch names the versions of NVIDIA's packages itself. Not from an index of CPU builds, which count
# as newer.
$(VENV_CUDA)/.stamp: tests/cuda_stand_in/requirements.txt
	@$(PYTHON) -m venv $(VENV_CUDA) || { rm -rf $(VENV_CUDA); exit 1; }
	grep -vE '^(torch|triton|setuptools)==' constraints.txt > $(VENV_CUDA)/constraints.txt
	env -u PIP_EXTRA_INDEX_URL $(VENV_CUDA)/bin/python -m pip install --quiet --progress-bar off \
	  --constraint $(VENV_CUDA)/constraints.txt --requirement tests/cuda_stand_in/requirements.txt \
	  "torch$(if $(findstring =,$(CUDA_TORCH)),,==)$(CUDA_TORCH)"
	@touch $@
