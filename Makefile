# `make demo` and `make test` install everything they need into .venv.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
SUITABLE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
PYTHON ?= $(shell for found in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$found" -c '$(SUITABLE)' 2>/dev/null && echo "$$found" && break; done)
UV := $(shell command -v uv)

.PHONY: help install demo demo-photos test test-long test-image browser quick lint format bench clean
.DEFAULT_GOAL := help

help:  ## show this page
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

install: $(VENV)/installed  ## create .venv with everything in it

$(VENV)/installed: pyproject.toml constraints.txt
	@test -n '$(PYTHON)$(UV)' || { echo 'error: no Python 3.11 to 3.14 found; install one or uv, or set it: make PYTHON=...'; exit 2; }
	@echo 'installing into $(VENV) (torch is large, so the first time takes a few minutes)'
	@if test -n '$(PYTHON)'; then $(PYTHON) -m venv $(VENV) \
		|| { echo 'error: the venv module is missing; on Debian: apt-get install python3-venv'; exit 2; }; \
	else echo 'no Python 3.11 to 3.14 found: uv provides one'; \
		'$(UV)' venv --quiet --seed --allow-existing --python 3.13 $(VENV); fi
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,bench,index,photos]'
	@touch $@

demo: install  ## repair digits with 40 % label noise
	@$(BIN)/python -m pipelines.demo

demo-photos: install  ## repair labels of photos, 30 % redrawn at random: PENCIL_DATA=FOLDER, or a download
	@$(BIN)/python -m pipelines.demo_photos

test: install browser  ## run every test this machine can run, but those of test-long and test-image
	$(BIN)/pytest -m 'not image and not long' --durations=15

test-long: install  ## lose nodes and links while training runs; takes a quarter of an hour
	$(BIN)/pytest -m long --durations=0

test-image: install  ## run every step of cluster/Dockerfile in a fresh Debian; needs root
	$(BIN)/pytest -m image tests/cluster

# Tests of the review page need chromium or Chrome; without one they are skipped and listed by name.
browser:
	@if command -v chromium chromium-browser google-chrome > /dev/null; then exit 0; fi; \
	if test "$$(id -u)" = 0; then as=; elif sudo -n true 2> /dev/null; then as=sudo; \
	else echo 'note: chromium is missing and cannot be installed without root; tests of the review page'; \
		echo '      are skipped (to run them: sudo apt-get install chromium)'; exit 0; fi; \
	echo 'installing chromium for tests of the review page'; \
	{ $$as apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$as apt-get install -y -qq \
		--no-install-recommends chromium fonts-dejavu-core; } > /dev/null \
	|| echo 'note: apt-get could not install chromium; tests of the review page are skipped'

quick: install  ## run the quick tests: no cluster, no network
	$(BIN)/pytest

lint: install  ## check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install  ## format every file
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install  ## run the benchmarks at their small size; each prints its ratio to a limit
	@for bench in index catalogue_rows label_table owners subset; do \
		echo "== benchmarks/$$bench.py"; $(BIN)/python benchmarks/$$bench.py || exit 1; done
	@if test -d runs/demo/catalogue; then echo '== benchmarks/train.py'; \
		$(BIN)/python benchmarks/train.py configs/demo.yaml; \
	else echo '-- benchmarks/train.py needs shards: run make demo first'; fi
	@if test -n "$$PENCIL_DATA"; then echo '== benchmarks/ingest.py'; $(BIN)/python benchmarks/ingest.py; \
	else echo '-- benchmarks/ingest.py needs photos: PENCIL_DATA=FOLDER make bench'; fi

clean:  ## remove the environment and every run
	rm -rf $(VENV) runs build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
