# `make demo` and `make test` are all that a machine with only Python needs; each makes its environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Processes that test at once, one more than cores because some tests wait. Each may start engines of eight ranks. nproc
# counts OpenMP's threads if they are limited.
WORKERS ?= $(shell expr 1 + $$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc 2>/dev/null || echo 2))
# COLD=1: engines train and load anew, and nothing that they wrote in an earlier run is taken.
COLD ?=
# ALL=1: every combination of cases, where tests take a sample (tests/support/sampling.py).
ALL ?=
export OMP_NUM_THREADS ?= 1
# Bytecode is kept even where a container's environment says otherwise: each of the many processes that tests start
# would compile all of ckpt again, which takes longer than most of them run.
export PYTHONDONTWRITEBYTECODE :=
# The newer frameworks: a Python of 3.12, a version of megatron-core, and the folder of their environment.
PYTHON312 ?= python3.12
MCORE ?= 0.19.2
FRAMEWORKS ?= .venv-mcore-$(MCORE)
# The environment of quantization libraries and llama.cpp.
QUANTIZERS ?= .venv-quantizers

.PHONY: help env demo test test-fast test-frameworks test-quantizers test-peft wheel lint format docs gpu-check fixtures-check faults fuzz bench cards clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

env: $(VENV)/.installed  ## make the environment

# Only what the demo runs; the environment of the tests has it, too.
$(VENV)/.train: pyproject.toml constraints.txt
	@echo "making $(VENV) with torch, transformers and DeepSpeed, 2 GB: this takes some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -f $(VENV)/.installed || $(BIN)/python -m pip install --quiet -c constraints.txt torch
	test -f $(VENV)/.installed || $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[train]'
	@touch $@

demo: $(VENV)/.train  ## train with ZeRO-3, convert to Hugging Face, verify, load
	$(BIN)/python -m examples.demo

test: env lint  ## lint, type check, and the tests; ALL=1: every combination; COLD=1: with engines that all run anew
	$(if $(COLD),CKPT_TEST_CACHE= )$(if $(ALL),CKPT_TEST_ALL=1 )$(BIN)/python -m pytest -m '' -n $(WORKERS) \
		--dist loadfile --no-loadscope-reorder --seconds=build/durations.txt

test-fast: env  ## the tests that start no engine
	$(BIN)/python -m pytest

test-portable: env  ## the same without Linux's own calls, as on macOS
	CKPT_TEST_PORTABLE=1 $(BIN)/python -m pytest

$(FRAMEWORKS)/.installed: pyproject.toml tests/frameworks/requirements.txt
	$(PYTHON312) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install --quiet -r tests/frameworks/requirements.txt -e .
	$(FRAMEWORKS)/bin/python -m pip install --quiet megatron-core==$(MCORE)
	$(FRAMEWORKS)/bin/python -m pip install --quiet --no-deps --target $(FRAMEWORKS)/transformer-engine transformer_engine==2.20.2
	@touch $@

test-frameworks: $(FRAMEWORKS)/.installed  ## newer frameworks, on Python 3.12; MCORE=0.18.0: another megatron-core
	$(FRAMEWORKS)/bin/python -m pytest -m '' tests/frameworks

# llama.cpp's converter is in no wheel, but in llama-cpp-python's sdist.
$(QUANTIZERS)/.installed: pyproject.toml constraints.txt tests/quantizers/requirements.txt
	$(PYTHON) -m venv $(QUANTIZERS)
	$(QUANTIZERS)/bin/python -m pip install --quiet -c constraints.txt torch
	$(QUANTIZERS)/bin/python -m pip install --quiet -c constraints.txt -e '.[gguf,lora]' \
		bitsandbytes datasets hypothesis psutil pytest safetensors transformers
	$(QUANTIZERS)/bin/python -m pip install --quiet --no-deps -r tests/quantizers/requirements.txt
	$(QUANTIZERS)/bin/python -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest $(QUANTIZERS) \
		llama-cpp-python==0.3.36
	mkdir -p $(QUANTIZERS)/llama-cpp-python
	tar --extract --gzip --strip-components 1 --directory $(QUANTIZERS)/llama-cpp-python \
		--file $(QUANTIZERS)/llama_cpp_python-0.3.36.tar.gz
	@touch $@

test-quantizers: $(QUANTIZERS)/.installed  ## other quantization libraries, and llama.cpp's converter and engine
	$(QUANTIZERS)/bin/python -m pytest -m '' tests/quantizers

# The tests in the sdist of the installed PEFT, which its wheel has not.
test-peft: env  ## PEFT's own list of adapters, every one merged
	rm -rf build/peft-tests && mkdir -p build/peft-tests
	version=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("peft"))') && \
		$(BIN)/python -m pip download --quiet --no-deps --no-binary peft --dest build/peft-tests "peft==$$version" && \
		tar --extract --gzip --strip-components 1 --directory build/peft-tests --file build/peft-tests/peft-$$version.tar.gz
	$(BIN)/python -m pip install --quiet --target build/peft-tests/beside -c constraints.txt \
		scikit-learn==1.9.1 scipy==1.17.1 joblib==1.6.0 threadpoolctl==3.8.0
	PEFT_TESTS=build/peft-tests/tests PYTHONPATH=build/peft-tests/beside \
		$(BIN)/python -m pytest -m '' tests/lora/test_peft_list.py tests/lora/test_adamss.py

wheel:  ## build the package, and try it on every Python at hand
	.ci/wheel

lint: env  ## ruff, mypy, import-linter, codespell, names
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python .ci/names

format: env  ## format and sort imports
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: env  ## the site, into build/docs, every link checked; no network
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

gpu-check:  ## train, resume and convert on this machine's GPUs, or on DOUBLE=2 made-up ones; needs torch
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m tests.gpu_check $(if $(DOUBLE),--double $(DOUBLE))

fixtures-check: env  ## make the committed checkpoints again and compare
	$(BIN)/python fixtures/check.py

faults: env  ## damage checkpoints in ten thousand ways
	$(BIN)/python -m tests.faults

fuzz: env  ## fuzz the readers of files for ten minutes
	$(BIN)/pip install -q atheris
	$(BIN)/python -m tests.faults.fuzz

bench: env  ## speed and memory against cp and the peers
	$(BIN)/python -m benchmarks

# DISK: GB for checkpoints; larger models go through in windows of layers. PART=1 moves each kind of layer once.
cards: env  ## pages of released models, moved through Megatron, ZeRO-3 and DCP; MODELS='Qwen3-8B gpt-oss-20b' DISK=50 PART=1 NARROW=4
	$(BIN)/python -m benchmarks.cards $(MODELS) $(if $(DISK),--disk $(DISK)) $(if $(PART),--part) $(if $(NARROW),--narrow $(NARROW))

clean:
	rm -rf $(VENV) build dist *.egg-info demo-outputs demo-outputs-hf
