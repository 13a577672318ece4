# Two commands on a fresh machine: `make dev` and `make test`. `make check` is what a reviewer runs first.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: dev test check docs servers clean
.DEFAULT_GOAL := help

help:
	@echo "make dev     set up everything, then run rcfarm on this machine with an example service"
	@echo "make test    set up everything, then run the tests"
	@echo "make check   lint, types, import contracts, docs"
	@echo "make docs    build the documentation into site/"

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rcfarm needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev,docs,uvloop]'
	touch $(READY)

dev: $(READY)
	$(BIN)/rcfarm dev --apply examples/hello.yaml

test: $(READY)
	$(BIN)/pytest $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/mkdocs build --quiet --strict --config-file docs/mkdocs.yml

docs: $(READY)
	$(BIN)/mkdocs build --config-file docs/mkdocs.yml

clean:
	rm -rf .venv .servers site .mypy_cache .ruff_cache .pytest_cache .hypothesis
