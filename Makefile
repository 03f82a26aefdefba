# Everything a target needs is set up by the target: a virtual environment in .venv, made from the
# first suitable Python, with the versions that constraints.txt pins. A second run starts at once.

VENV   ?= .venv
BIN    := $(VENV)/bin
# The Pythons that the pinned TensorFlow has wheels for.
PYTHONS := python3 python3.13 python3.12 python3.11 python3.10
# What only root may do (mount, network namespaces) is left out for everybody else.
MAY    := $(if $(filter 0,$(shell id -u)),,-m "not root")
USABLE := import sys, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))

.DEFAULT_GOAL := help
.PHONY: help demo test lint lab bench docs constraints clean

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(VENV)/.demo ## train on real images through a tf.data service, in the terminal
	$(BIN)/tfd demo

test: lint ## lint, then all tests: unit, integration and notebooks
	$(BIN)/pytest $(MAY) --nbval --nbval-current-env --nbval-sanitize-with tests/notebooks/sanitize.cfg \
		tests/unit tests/integration tests/conformance notebooks
	# In a process of their own: once it has connected to a cluster it never is as it was before.
	$(BIN)/pytest tests/coordinator

lint: $(VENV)/.test ## ruff, mypy and the layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

lab: $(VENV)/.lab ## JupyterLab on the tutorials
	$(BIN)/jupyter lab notebooks

bench: $(VENV)/.demo ## every benchmark; the figures go to benchmarks/results.md
	$(BIN)/python benchmarks/run.py

docs: $(VENV)/.docs ## the documentation, in docs/_build/html
	$(BIN)/sphinx-build --fail-on-warning --keep-going -b html docs docs/_build/html

constraints: $(VENV)/.python ## resolve the pinned versions anew
	$(BIN)/python -m pip install --quiet uv
	printf 'hatchling\neditables\ntf-keras\n' | $(BIN)/uv pip compile --universal --python-version 3.10 \
		--python $(BIN)/python --fork-strategy requires-python --all-extras --upgrade \
		--no-annotate --custom-compile-command 'make constraints' \
		--output-file constraints.txt pyproject.toml -

# Keras 2, for the tests of it under a strategy. It asks for the distribution `tensorflow`, twice
# the download of `tensorflow-cpu`, which serves as well.
$(VENV)/.test: $(VENV)/.tf-keras
$(VENV)/.tf-keras: $(VENV)/.python constraints.txt
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt tf-keras
	@touch $@

clean: ## remove what the targets made, the environment too
	rm -rf $(VENV) build dist docs/_build .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './labextension/*' -prune -exec rm -rf {} +

$(VENV)/.python:
	@for python in $(PYTHONS); do \
		if $$python -c '$(USABLE)' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "No usable Python found: Python 3.10 to 3.13 with the venv module is needed."; \
		echo "Next: install one (on Debian and Ubuntu: apt-get install python3 python3-venv)."; \
		exit 1; \
	fi; \
	echo "Setting up $(VENV) with $$($$found --version); the first time takes a few minutes."; \
	$$found -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt hatchling editables
	@touch $@

# .venv/.demo, .venv/.test ... stand for the extra of that name being installed.
$(VENV)/.%: $(VENV)/.python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --no-build-isolation --constraint constraints.txt \
		--editable '.[$*]'
	@touch $@
