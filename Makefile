# Every target makes the virtual environment it needs. Variables:
#   PYTHON       the interpreter that makes it (3.11 or newer)
#   VENV         the virtual environment's directory
#   TORCH_INDEX  the package index that torch comes from; set to nothing, pip's own. By default, a machine without a GPU
#                takes PyTorch's index of CPU builds, and every other one pip's own
#   BASE         the base model's directory, for serve
#   REGISTRY     the registry's directory, for serve
#   BENCH        which benches to run
#   WHEELS_PYTHON  the Python version that wheels are for
#   BACKEND      engine in the image: native, or vllm with vLLM's build for the CPU
#   IMAGE        name of the image: by default localhost/peraxis:cpu, or localhost/peraxis:vllm-cpu
#   IMAGE_OPTIONS  of docker/build_image.py, e.g. --base-image=NAME
#   WORKERS      how many processes run the tests: a number, or logical for one per core
#   PACKAGES     no: install no Debian packages as root; the tests that need them skip
#   REVISION     the commit that replay compares the working tree with

PYTHON ?= python3
BASE ?=
REGISTRY ?= registry
BENCH ?= load
WORKERS ?= logical
PACKAGES ?= yes
REVISION ?= HEAD
WHEELS_PYTHON ?= 3.12
BACKEND ?= native
IMAGE ?= localhost/peraxis:$(if $(filter vllm,$(BACKEND)),vllm-cpu,cpu)
IMAGE_OPTIONS ?=

VENV ?= .venv
BIN := $(VENV)/bin
# What runs the demo and a server, and with it what checks and tests need.
RUNTIME := $(VENV)/.runtime
DEV := $(VENV)/.dev
VLLM := $(VENV)-vllm
PIP := $(BIN)/python -m pip --disable-pip-version-check
# What a GPU image with torch and transformers lacks. numba is left out: it compiles kernels for CPUs alone, and has
# 64 MB with llvmlite.
WHEELS := anyio fastapi fastapi-offline httptools httpx llguidance msgspec prometheus-client psutil pydantic pydantic-settings python-multipart pyzmq rich typer uvicorn uvloop
# Tests of one file stay together until a worker runs dry, so that a server or model is seldom made twice.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal --durations=10

.PHONY: help demo test test-deploy test-vllm test-clients client-pins client-packages replay coverage screenshots check hooks serve bench wheels reference image image-packages packages
.DEFAULT_GOAL := help

help:
	@echo 'make demo      train a small base and three fine-tunes, compress, serve and compare them'
	@echo 'make test      check, then every test'
	@echo 'make test-deploy  tests that take minutes: of deployments, and of whole benches'
	@echo 'make test-vllm  the tests of --backend vllm among them, in an environment of its own'
	@echo 'make test-clients  the sessions of stock clients among them, in environments of their own'
	@echo 'make replay    compare what the working tree answers with REVISION=COMMIT, over HTTP and on the command line'
	@echo 'make check     formatting, lint and types'
	@echo 'make hooks     let every commit run the checks'
	@echo 'make coverage  every test, with the share of branches that they reach'
	@echo 'make serve     serve BASE=DIR with the variants in REGISTRY=DIR'
	@echo 'make bench     measure; results go to bench/results/ (BENCH="load ...")'
	@echo 'make reference write docs/reference.md, and the settings in the chart, from the code'
	@echo 'make screenshots  write the pictures of docs/console.md'
	@echo 'make image     as root: build the container image IMAGE=NAME for the CPU, run it and prove what it must do'
	@echo '               (BACKEND=vllm: with vLLM)'
	@echo 'make packages  Debian packages that tests use, as root, which make test also does; without them those tests skip'
	@echo 'make client-packages  those of stock clients (curl, Node, a JDK), which make test-deploy also does'
	@echo 'make wheels    what a GPU image lacks, under wheels/, for a machine without a network'

# bootstrap.py compiles nothing: Python keeps the bytecode of the modules that it imports, which are a small part of all.
# Without it, each of the hundreds of processes that tests start would take seconds longer.
unexport PYTHONDONTWRITEBYTECODE
$(RUNTIME): pyproject.toml constraints.txt
	$(PYTHON) bootstrap.py $(VENV) runtime
	touch $@

$(DEV): $(RUNTIME)
	$(PYTHON) bootstrap.py $(VENV) dev
	touch $@

demo: $(RUNTIME)
	$(BIN)/peraxis demo

test: check packages
	$(PYTEST)

# Needs Chromium, as tests of the console do.
screenshots: $(DEV) packages
	$(BIN)/python -m tests.server.console.screenshots

# What takes too long for `test`.
test-deploy: $(DEV) $(VLLM)/.ready packages client-packages
	TESTS_VLLM_PYTHON=$(abspath $(VLLM))/bin/python $(PYTEST) -m deploy

test-vllm: $(DEV) $(VLLM)/.ready
	TESTS_VLLM_PYTHON=$(abspath $(VLLM))/bin/python $(PYTEST) -m deploy tests/vllm tests/server/engine tests/server/deltas

# Clients come from PyPI and npm with pinned hashes, into .clients.
test-clients: $(DEV) client-packages
	$(PYTEST) -m deploy tests/clients

# The newest versions of the clients, for which `python -m tests.clients.record` then records anew.
CLIENT_PINS := tests/clients/environments
client-pins: $(DEV)
	$(PIP) install --quiet uv
	for name in python instructor; do \
		(cd $(CLIENT_PINS)/$$name && $(abspath $(BIN))/uv pip compile --quiet --upgrade --universal --python-version 3.11 \
			--generate-hashes --no-annotate --custom-compile-command 'make client-pins' requirements.in -o requirements.txt) \
			|| exit 1; done
	cd $(CLIENT_PINS)/node && npm install --package-lock-only --ignore-scripts

# vLLM in an environment of its own, whose interpreter runs the engines of its tests.
$(VLLM)/.ready: pyproject.toml vllm_plugin/pyproject.toml vllm_plugin/constraints.txt
	$(PYTHON) bootstrap.py $(VLLM) vllm
	touch $@

# What a refactoring may not change: every answer of REVISION beside that of the working tree.
replay: $(DEV)
	$(BIN)/python -m tests.replay $(REVISION)

# A target of its own, because tracing takes a third more time.
coverage: $(DEV)
	$(PYTEST) -m "" --cov --cov-report=term

check: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --num-workers auto

# Programs that tests run, each with its Debian package.
packages: PROGRAMS := promtool:prometheus docker-compose:docker-compose chromium:chromium
client-packages: PROGRAMS := curl:curl java:default-jdk-headless node:nodejs npm:npm
# Not where systemd runs: it would start the packages' services.
packages client-packages:
	@missing=; \
	for pair in $(PROGRAMS); do command -v "$${pair%:*}" >/dev/null || missing="$$missing $${pair#*:}"; done; \
	if [ -z "$$missing" ]; then :; \
	elif [ '$(PACKAGES)' = yes ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && [ ! -d /run/systemd/system ]; then \
		echo "installing Debian packages for tests:$$missing (PACKAGES=no leaves this machine alone)"; \
		apt-get update && apt-get install -y --no-install-recommends $$missing \
			|| echo "not installed, their tests skip:$$missing"; \
	else echo "Debian packages are not installed, and their tests skip: \`make $@\` as root installs$$missing"; fi

hooks: $(DEV)
	$(BIN)/pre-commit install

serve: $(RUNTIME)
	@test -n '$(BASE)' || { echo 'make serve: name the base model, BASE=DIR' >&2; exit 2; }
	$(BIN)/peraxis serve --base '$(BASE)' --registry '$(REGISTRY)'

bench: $(DEV)
	set -e; for name in $(BENCH); do $(BIN)/python -m bench.$$name; done

# Needs no Docker: a base by debootstrap, the build by buildah, the proof with podman.
image: $(DEV) image-packages
	$(BIN)/python docker/build_image.py --backend '$(BACKEND)' --tag '$(IMAGE)' $(IMAGE_OPTIONS)
	PYTHONPATH=. $(BIN)/python docker/prove_image.py --backend '$(BACKEND)' '$(IMAGE)'

IMAGE_TOOLS := buildah podman runc debootstrap
image-packages:
	@for tool in $(IMAGE_TOOLS); do command -v $$tool >/dev/null || exec apt-get install -y --no-install-recommends $(IMAGE_TOOLS); done

reference: $(DEV)
	$(BIN)/python -m docs.reference
	$(BIN)/python -m docs.chart_settings

# To be installed with: pip install --no-index --no-deps wheels/*.whl
wheels: $(RUNTIME)
	rm -rf $@
	$(PIP) wheel --quiet --no-deps -w $@ .
	$(PIP) download --quiet -c constraints.txt -d $@ --only-binary :all: --python-version $(WHEELS_PYTHON) \
		--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 $(WHEELS)
	du -sh $@
