# On a fresh machine: `make dev` and `make test`. Before a review: `make check`.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: dev test check fmt docs servers clean
.DEFAULT_GOAL := help

help:
	@echo "make dev     set up everything, then run rcfarm on this machine with an example service"
	@echo "make test    set up everything, then run the tests"
	@echo "make check   lint, types, import contracts, prose, docs"
	@echo "make fmt     format the code, and fix what ruff can fix"
	@echo "make docs    build the documentation into site/"

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rcfarm needs Python 3.11 or newer; set PYTHON=python3.11")'
	@echo "Installing rcfarm and its tools into .venv, which takes a minute or more"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --progress-bar off --disable-pip-version-check --editable '.[dev,docs,uvloop]'
	touch $(READY)

dev: $(READY)
	@echo 'In a second terminal, put the commands on its path:  export PATH="$(CURDIR)/$(BIN):$$PATH"'
	$(BIN)/rcfarm dev --apply examples/hello.yaml

# Most tests of the servers wait for processes most of the time, so there is one worker more than cores.
WORKERS ?= $(shell expr $$(nproc) + 1)

test: $(READY)
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/prose.py
	$(BIN)/mkdocs build --quiet --strict --config-file docs/mkdocs.yml

fmt: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	$(BIN)/mkdocs build --config-file docs/mkdocs.yml

clean:
	rm -rf .venv .servers site .mypy_cache .ruff_cache .pytest_cache .hypothesis
