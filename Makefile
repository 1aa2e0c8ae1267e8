# The commands of this project; CI runs these same ones. `make` lists them.
PYTHON ?= python3
SEED ?= 0
BIN := .venv/bin

# Places with wheels of your own, such as a CPU build of torch (space-separated, as pip reads it). Empty: the index only.
FIND_LINKS := $(foreach place,$(PIP_FIND_LINKS),--find-links '$(place)')
# uv reads neither pip's variables nor its files, so an index that pip was told about is passed on.
INDEX := $(if $(PIP_INDEX_URL),--default-index '$(PIP_INDEX_URL)')

# One thread per process: the tiny models are too small to share, and two cores are all that CI has.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
CPU := -m "not gpu and not multi_gpu and not vllm and not network"

.DEFAULT_GOAL := help
.PHONY: help install vllm-env fmt check test test-vllm numerics properties integration gpu demo families families-vllm bench clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z_-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: .venv/.installed ## make .venv and install everything (quick when nothing changed)

.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt uv
	$(BIN)/uv pip install --compile-bytecode -p $(BIN)/python $(INDEX) $(FIND_LINKS) -c constraints.txt -e '.[dev]'
	touch $@

vllm-env: .venv-vllm/.installed ## make .venv-vllm: vLLM on a CPU and our plugin (2.2 GB)

.venv-vllm/.installed: $(wildcard vllm-env/*) src/latepix_vllm/pyproject.toml constraints.txt
	PYTHON='$(PYTHON)' vllm-env/install.sh .venv-vllm
	touch $@

fmt: install ## format the code and fix what can be fixed
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

check: install ## formatting, lint, types and spelling
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/ty check
	$(BIN)/codespell

test: install ## every test that needs neither a GPU nor vLLM nor the network
	$(PYTEST) $(CPU)

test-vllm: install vllm-env ## the tests against a real vLLM on the CPU: contract, weight updates, parity, doctor, rl
	$(PYTEST) -m vllm

numerics: install ## the equalities: packed = one by one, engine = trainer, ...
	$(PYTEST) $(CPU) tests/numerics

properties: install ## the property tests with 10,000 random cases each (some minutes)
	LATEPIX_PROPERTY_CASES=10000 $(PYTEST) tests/unit/orchestrator/test_batch_properties.py

integration: install ## whole runs on the tiny model
	$(PYTEST) $(CPU) tests/integration

gpu: install ## the tests for machines with a GPU
	$(PYTEST) -m "gpu or multi_gpu"

demo: install ## train a tiny Qwen3-VL on handwritten digits by RL, on a CPU (SEED=0)
	$(BIN)/python examples/digits/demo.py --seed $(SEED)

families: install ## every family in numbers: writes a table of docs/families.md (some minutes)
	$(BIN)/python benchmarks/families.py

families-vllm: install vllm-env ## the same through a real vLLM (some minutes)
	$(BIN)/python benchmarks/families.py --vllm .venv-vllm/bin/python

bench: install ## samples per second of the whole loop
	$(BIN)/python benchmarks/loop.py

clean: ## remove caches and build leftovers (keeps the environments and runs/)
	rm -rf build dist src/latepix_vllm/build .pytest_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o \( -name __pycache__ -o -name '*.egg-info' \) -type d -exec rm -rf {} +
