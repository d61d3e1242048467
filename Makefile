# Two commands matter: `make demo` and `make test`. Everything they install or build stays below .venv and .cache
# (and pip's and the model's cache in ~/.cache); nothing is installed globally.

PYTHON  ?= python3
VENV    := .venv
OLDEST  := .cache/venv-oldest
BIN     := $(VENV)/bin
HOME_OF_DEMO := .cache/demo
ENGINE  ?= $(HOME_OF_DEMO)/smollm2-135m-instruct-w8
PIP     := -m pip --disable-pip-version-check install --quiet
PYTEST  := -m pytest

.PHONY: help demo test test-oldest check format bench wheel clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo         build the demo engine, serve it over MQTT, ask it a question'
	@echo 'make test         run the whole test suite'
	@echo 'make test-oldest  run the engine and runtime tests against the oldest supported ONNX Runtime'
	@echo 'make check        formatting, lint, types, lowest Python version'
	@echo 'make format       format the sources'
	@echo 'make bench        measure the demo engine on this machine'
	@echo 'make wheel        build the wheel and the source archive into dist/'
	@echo 'make clean        remove .venv, .cache and every other product of these commands'

demo: $(VENV)/.demo
	@$(BIN)/edge-runtime demo --home $(HOME_OF_DEMO)

test: $(VENV)/.dev
	@$(BIN)/python $(PYTEST)

test-oldest: $(OLDEST)/.dev
	@$(OLDEST)/bin/python $(PYTEST) -m 'not native and not slow' tests/runtime tests/engines

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/vermin --quiet --no-tips --violations --exclude tomllib --target=3.10- edge_runtime engines jetson tools tests

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.demo $(ENGINE)/engine.json
	@$(BIN)/edge-runtime bench $(ENGINE) --suite all --json .cache/bench.json

wheel: $(VENV)/.dev
	@$(BIN)/python -m build --no-isolation

clean:
	rm -rf $(VENV) .cache dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(ENGINE)/engine.json: | $(VENV)/.demo
	@$(BIN)/edge-runtime build smollm2-135m-instruct -o $(ENGINE) --precision w8

# A stamp file per environment: pip runs again only when pyproject.toml has changed. An environment whose set-up was
# interrupted has no stamp and is completed by the next run.
$(VENV)/.demo: pyproject.toml
	@$(call setup,$(VENV),-e '.[demo]')
	@touch $@

$(VENV)/.dev: pyproject.toml
	@$(call setup,$(VENV),-e '.[dev]')
	@touch $(VENV)/.demo $@

$(OLDEST)/.dev: pyproject.toml
	@$(call setup,$(OLDEST),-e '.[dev]' onnxruntime==1.23.2)
	@touch $@

define setup
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo 'edge-runtime needs Python 3.10 or newer; name one with: make PYTHON=python3.12 ...' >&2; exit 1; }; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo 'Python has no venv module; on Debian and Ubuntu: sudo apt-get install python3-venv' >&2; exit 1; }; \
	echo 'setting up $(1) (a few minutes the first time, packages are downloaded)'; \
	$(1)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(1) && $(1)/bin/python $(PIP) $(2)
endef
