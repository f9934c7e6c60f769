# PageTwin: `make sweep` runs the main job, `make test` the tests. Both set up .venv first.
PYTHON ?= python3
VENV   ?= .venv
PIP_ARGS ?=
ARGS   ?=
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.ready

OUT    ?=
PART   ?=
NIGHT  ?=

# what `make check` tests: the rules of the repository and the light packages
FAST   := $(addprefix tests/e2e/test_,house_rules.py import_directions.py document_links.py) tests/traces tests/engine/core \
          tests/harness/test_environment.py $(addprefix tests/harness/,config metrics store cost)

.PHONY: setup sweep check test nightly lint docs compiled gpu clean
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

check: lint  # before every commit: under a minute once mypy has its cache
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -n auto --dist loadfile -q $(FAST) $(ARGS)

# a test that hangs ends the run with its name and its stack; a process that died is not replaced, since its file would begin anew
HANGS := --max-worker-restart 0 -o faulthandler_timeout=1800 -o faulthandler_exit_on_timeout=true
test: $(STAMP)  # a file at a time, so that what its tests share is made once
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -n auto --dist loadfile --no-loadscope-reorder $(HANGS) $(ARGS)

nightly: $(STAMP)  # all parts of the night one after the other, or those named: make nightly NIGHT="3/10 fuzz" (with PAGETWIN_VLLM=PATH/bin/python also beside vLLM)
	$(PY) -m pip install --quiet $(PIP_ARGS) "atheris>=2.3"
	$(PY) tests/nightly/night_parts.py $(NIGHT)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

docs: $(STAMP)  # build/site; a broken link between pages fails
	$(PY) -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict

compiled: $(STAMP)  # build/compiled: a wheel whose policy core is machine code, and the same unpacked in build/compiled/site
	rm -rf build/compiled  # with wheels of other versions
	# from the source distribution: mypyc writes beside the sources, where its files would hide later changes
	HATCH_BUILD_HOOK_ENABLE_MYPYC=1 $(PY) -m build --no-isolation --outdir build/compiled
	$(PY) -m pip install --quiet --no-index --no-deps --upgrade --target build/compiled/site build/compiled/*.whl

gpu:  # no set-up: a GPU machine may have no network; PYTHON must have torch and the packages that it names
	PYTHONPATH=.:kernels:tests:$(PYTHONPATH) $(if $(wildcard $(PY)),$(PY),$(PYTHON)) -m gpu_acceptance.run $(if $(PART),--part $(PART)) $(if $(OUT),--out "$(OUT)") $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
