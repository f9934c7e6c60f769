# PageTwin: `make sweep` runs the main job, `make test` the tests. Both set up .venv first.
PYTHON ?= python3
VENV   ?= .venv
PIP_ARGS ?=
ARGS   ?=
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.ready

OUT    ?=
PART   ?=

# what `make check` tests: the rules of the repository and the packages that need no torch
FAST   := $(addprefix tests/e2e/test_,house_rules.py import_directions.py document_links.py) tests/traces tests/engine/core \
          tests/harness/test_environment.py \
          $(addprefix tests/harness/,config metrics store replay cost sweep trace)

.PHONY: setup sweep check test nightly lint docs gpu clean
setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "PageTwin needs Python 3.11 or newer; use: make setup PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	# torch first and alone: with its pin in place nothing else asks for another build of it
	$(PY) -m pip install --quiet $(PIP_ARGS) torch==2.13.0 "numpy<2.4"
	$(PY) -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

sweep: $(STAMP)
	$(PY) -m harness sweep $(ARGS)

check: lint  # before every commit: about two minutes
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -n auto -q -m "not slow and not browser" $(FAST) $(ARGS)

test: $(STAMP)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -n auto $(ARGS)

nightly: $(STAMP)  # (with PAGETWIN_VLLM=PATH/bin/python also beside vLLM) what is too long for every day: random walks of the policy core, fuzzing of readers and requests, every model type, the kernels from their PTX, a sweep killed 50 times, fits to logs of a known truth
	$(PY) -m pip install --quiet $(PIP_ARGS) "atheris>=2.3"
	PAGETWIN_NIGHTLY=1 PAGETWIN_FUZZ_EXAMPLES=500 $(PY) -m pytest -n auto tests/engine/core/test_random_walks.py tests/engine/core/memory tests/traces/formats/test_fuzz.py tests/engine/runtime/models/test_every_type.py tests/e2e/test_bad_inputs.py tests/harness/sweep/test_plan.py tests/harness/oracle tests/harness/lessons/test_lesson_pages.py tests/e2e/test_document_commands.py
	PAGETWIN_NIGHTLY=1 OMP_NUM_THREADS=1 $(PY) -m pytest -n auto tests/ptx
	$(PY) tests/nightly/fuzz_traces.py -max_total_time=600 -rss_limit_mb=4000
	PAGETWIN_FUZZ_SECONDS=600 $(PY) -m pytest -n 2 tests/harness/serve/test_odd_requests.py
	$(PY) tests/nightly/kill_drill.py local 50
	$(PY) tests/nightly/planted_logs.py --seeds 3

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

docs: $(STAMP)  # build/site; a broken link between pages fails
	$(PY) -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict

gpu:  # no set-up: a GPU machine may have no network; PYTHON must have torch and the packages that it names
	PYTHONPATH=.:kernels:tests:$(PYTHONPATH) $(if $(wildcard $(PY)),$(PY),$(PYTHON)) -m gpu_acceptance.run $(if $(PART),--part $(PART)) $(if $(OUT),--out "$(OUT)") $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
