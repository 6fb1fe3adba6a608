# make train [TEXT=file.txt]   train a small GPT with flash_attention, on the CPU, in under three minutes
# make quick [BASE=HEAD]       lint, types and the tests of the packages that a change touches, in about a minute
# make test [ONLY=cpu]         the tests, five minutes on two cores; or one part: cpu, emulated, slow, which are the tests
#                              that train, grade or start processes for seconds, left out otherwise, or torch, which
#                              are those with PyTorch and the models of Hugging Face
# make fuzz [MINUTES=10]       drawn calls of attention, many of them nonsense: refused in words, or right
# make fuzz GPU=1 [MINUTES=6]  drawn calls on a GPU, with PyTorch's, CuPy's and numba's arrays in any layout
# make fuzz-options [EXAMPLES=2500]   more than 20,000 drawn combinations of attention's options
# make ptx                     every CUDA kernel compiled without a GPU, for compute capabilities from 7.5 to 9.0
# make next-compiler           the same with numba-cuda-mlir, numba-cuda's successor: lists what fails
# make lint                    style and types
# make app [MODULE=2]          the app in a browser: every page, or those of the modules up to one
# make docs                    the site: build/docs/index.html, with the lessons in a browser where npm is
# make bench                   naive against flash attention: time and memory
# make experiments             every measurement that has a figure: build/measurements
# make reliability             the long tests of what goes wrong and what goes on: docs/reliability.md
# make ends                    the suite with the oldest and with the newest of everything it may run with
# make lock                    requirements-ci.txt anew: the exact versions that CI installs
# Each creates .venv on first use and installs what it needs. PYTHON=python3.12 picks another Python.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
ONLY ?=
MODULE ?=
GPU ?=
MINUTES ?= 10
EXAMPLES ?= 2500
# The order of the emulated GPU's threads: another one each time.
SCHEDULE := $(or $(SCHEDULE),$(shell date +%s))
# A file of exact versions and their hashes, which are all that is installed then, as CI does; without it
# pip takes the newest of each range.
LOCK ?=
WHEELS := build/wheels$(if $(LOCK),-$(shell sha256sum $(LOCK) | cut -c1-12))
LOCKED := $(if $(LOCK),$(WHEELS)/.fetched)
OLDEST ?= python3.10
FIRST_CUDA := 'cuda-toolkit==13.0.*' 'cuda-bindings==13.0.*' 'nvidia-nvjitlink==13.0.*'
NEWEST ?= python3.13
BIN := $(VENV)/bin
PIP := $(if $(LOCK),PIP_CONSTRAINT=$(WHEELS)/versions.txt PIP_NO_INDEX=1 PIP_FIND_LINKS=$(abspath $(WHEELS))) $(BIN)/python -m pip --disable-pip-version-check install --quiet
# The text's name reaches the script by the environment, as it is: quotes and spaces mean nothing there.
override TEXT := $(value TEXT)
export TEXT

.PHONY: train quick test test-cpu test-emulated test-slow test-torch run-torch ptx next-compiler fuzz fuzz-options lint docs bench experiments reliability app \
  install-ci install-others lock ends clean FORCE

# Not empty when the user says which Python.
CHOSEN := $(filter-out file,$(origin PYTHON))
VERSION := import sys; print("%d.%d" % sys.version_info[:2])
# Of a report of pip: each package with the hash of its file.
HASHES := import json, sys; [print(x["metadata"]["name"] + "==" + x["metadata"]["version"], "--hash=sha256:" + \
  x["download_info"]["archive_info"]["hashes"]["sha256"]) for x in json.load(open(sys.argv[1]))["install"]]

# An environment that works, of a version that works, stays, unless PYTHON=... asks for another
# version.  The file is touched only when the environment is new, so that the rest follows.
$(VENV)/.python: FORCE
	@have=$$($(BIN)/python -c 'import pip; $(VERSION)' 2>/dev/null); \
	case "$(if $(CHOSEN),chosen,$$have)" in 3.10|3.11|3.12|3.13|3.14|3.15) ;; *) \
	  found=$$($(PYTHON) -c '$(VERSION)' 2>/dev/null); \
	  case "$$found" in 3.10|3.11|3.12|3.13|3.14|3.15) ;; *) \
	    echo "$(PYTHON) is $${found:+Python }$${found:-no Python}; needed is 3.10 to 3.15: make ... PYTHON=python3.12" >&2; \
	    exit 1;; \
	  esac; \
	  if test "$$found" != "$$have"; then \
	    if test -d $(VENV) && test ! -e $(VENV)/pyvenv.cfg; then \
	      echo "$(VENV) is no virtual environment; move it away, or name another: make ... VENV=..." >&2; \
	      exit 1; \
	    fi; \
	    echo "$(PYTHON) -m venv $(VENV)"; \
	    $(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }; \
	    touch $@; \
	  fi;; \
	esac; \
	test -e $@ || touch $@

$(WHEELS)/.fetched: $(LOCK) | $(VENV)/.python
	rm -rf $(WHEELS)
	$(BIN)/python -m pip download --quiet --no-deps --require-hashes --dest $(WHEELS) --requirement $(LOCK)
	sed 's/ --hash.*//' $(LOCK) > $(WHEELS)/versions.txt
	@touch $@

$(VENV)/.train: $(VENV)/.python setup.py requirements.txt $(LOCKED)
	$(PIP) --editable '.[plot]'
	@touch $@

$(VENV)/.test: $(VENV)/.python setup.py requirements.txt $(LOCKED)
	$(PIP) --editable '.[app,plot,serve,test]'
	@touch $@

$(VENV)/.lint: $(VENV)/.test
	$(PIP) --editable '.[app,plot,test,lint]'
	@touch $@

$(VENV)/.docs: $(VENV)/.python setup.py requirements.txt $(LOCKED)
	$(PIP) --editable '.[docs]'
	@touch $@

$(VENV)/.app: $(VENV)/.python setup.py requirements.txt $(LOCKED)
	$(PIP) --editable '.[app]'
	@touch $@

train: $(VENV)/.train
	$(BIN)/python project/train_gpt.py $${TEXT:+--text="$$TEXT"} $(ARGS)

quick: $(VENV)/.lint
	$(BIN)/python -m tests.support.quick $(or $(BASE),HEAD)

test: $(addprefix test-,$(or $(ONLY),cpu emulated))

# Importing the others takes as long as many tests.
SLOW_FILES := $$(grep -rl --include='test_*.py' mark.slow tests)
NAMES_EMULATED := grep -rlie emulated -e on_every_backend --include='test_*.py'

# Those that only compile are make ptx, whose packages may be there.
test-cpu: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" --ignore=tests/structure/compile_only $(ARGS)

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow $(ARGS) $(SLOW_FILES)
	MINITORCH_EMULATE=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "slow and emulated" $(ARGS) \
	  $$($(NAMES_EMULATED) $(SLOW_FILES))

test-emulated: $(VENV)/.test
	MINITORCH_EMULATE=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "emulated and not slow" $(ARGS) \
	  $$($(NAMES_EMULATED) tests)

# PyTorch is no requirement of the other tests: an environment apart.
test-torch:
	@$(MAKE) --no-print-directory run-torch VENV=$(VENV)-torch

$(VENV)/.torch: $(VENV)/.python setup.py requirements.txt $(LOCKED)
	$(PIP) --editable '.[tokenizers,torch,test]'
	@touch $@

run-torch: $(VENV)/.torch
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" $(ARGS) \
	  $$(grep -rlE 'importorskip\("(torch|transformers|tokenizers)"|^WITH_TORCH' --include='test_*.py' tests)

$(VENV)/.ptx: $(VENV)/.test
	$(PIP) --editable '.[app,plot,test,cuda]'
	@touch $@

ptx: $(VENV)/.ptx
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/structure/compile_only $(ARGS)

next-compiler: $(VENV)/.python
	PYTHONPATH=project $(BIN)/python -m reliability.next_compiler $(ARGS)

fuzz: $(VENV)/.test
	$(BIN)/python project/measure.py $(if $(GPU),fuzz_gpu,fuzz) --minutes $(MINUTES) $(ARGS)

fuzz-options: $(VENV)/.test
	@echo "MINITORCH_SCHEDULE=$(SCHEDULE)"
	MINITORCH_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -n 2 -m fuzz $(ARGS)
	MINITORCH_EMULATE=1 MINITORCH_SCHEDULE=$(SCHEDULE) MINITORCH_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -n 2 -m fuzz $(ARGS) \
	  tests/structure/emulated tests/reliability/test_extreme.py::test_extreme_scores_are_right_on_tensor_cores

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs $(ARGS)
	@if $(MAKE) --no-print-directory build/browser/.packages; then \
	  $(BIN)/python project/course.py lessons build/docs/browser build/browser; \
	else echo "NO LESSONS IN A BROWSER: Pyodide comes by npm, from its registry" >&2; fi
	@echo "the site is in build/docs/index.html"

# What the lessons in a browser are made of: Pyodide, and wheels of pure Python.
build/browser/.packages: docs/browser/package.json docs/browser/wheels.txt
	rm -rf build/browser && mkdir -p build/browser && cp docs/browser/package.json build/browser
	npm install --prefix build/browser --silent --ignore-scripts --no-package-lock
	python3 -m pip download --quiet --no-deps --only-binary=:all: --platform any --dest build/browser/wheels \
	  --requirement docs/browser/wheels.txt
	@touch $@

bench: $(VENV)/.train
	$(BIN)/python project/measure.py bench_attention $(ARGS)

experiments: $(VENV)/.train
	$(BIN)/python project/measure.py figures $(ARGS)

reliability: $(VENV)/.test
	$(BIN)/python project/measure.py determinism bad_calls leaks fuzz --publish --device cpu $(ARGS)

app: $(VENV)/.app
	$(BIN)/python -m streamlit run project/app.py $(ARGS) -- $(MODULE)

# Everything that .ci/run needs, so that its parts only run: what lints, builds the site and runs most tests, and the rest.
install-ci: $(VENV)/.lint $(VENV)/.docs $(VENV)/.ptx

install-others:
	@$(MAKE) --no-print-directory $(VENV)-torch/.torch VENV=$(VENV)-torch

# All of CI's environments, the newest of each range, and what they have in common the same version.
# Only CUDA's compiler is the oldest of its range, CUDA 13: it lets products wait for one another where newer
# ones do not, which costs a third of their speed and is nothing that a newest one can show.
# For Linux on x86-64 and this Python, whose files have the hashes; 3.11 or newer, as the newest NumPy has no 3.10.
lock:
	rm -rf build/lock
	$(PYTHON) -m venv build/lock/all
	build/lock/all/bin/python -m pip install --quiet --upgrade '.[app,cuda,docs,lint,plot,serve,test]' \
	  $(FIRST_CUDA)
	build/lock/all/bin/python -m pip freeze --all --exclude pip --exclude minitorch-flash > build/lock/all.txt
	$(PYTHON) -m venv build/lock/torch
	PIP_CONSTRAINT=build/lock/all.txt build/lock/torch/bin/python -m pip install --quiet --upgrade '.[test,tokenizers,torch]'
	build/lock/torch/bin/python -m pip freeze --all --exclude pip --exclude minitorch-flash > build/lock/torch.txt
	LC_ALL=C sort -fu build/lock/all.txt build/lock/torch.txt > build/lock/both.txt
	build/lock/all/bin/python -m pip install --quiet --dry-run --ignore-installed --no-deps --report build/lock/report.json \
	  --requirement build/lock/both.txt
	{ echo "# What CI installs, of the ranges in setup.py and requirements.txt: made by make lock, on Python" \
	    "$$($(PYTHON) -c '$(VERSION)')."; $(PYTHON) -c '$(HASHES)' build/lock/report.json; } > requirements-ci.txt

# The lower bound of each range, and CUDA's compiler as in lock; then what pip finds today.
ends:
	mkdir -p build/ends
	{ grep -ohE '[A-Za-z][A-Za-z0-9_-]*(\[cu13\])?>=[0-9.]+' requirements.txt setup.py | sed -E 's/(\[cu13\])?>=/==/' | \
	  grep -v '^torch='; printf '%s\n' $(FIRST_CUDA); } > build/ends/oldest.txt
	@PIP_CONSTRAINT=build/ends/oldest.txt $(MAKE) --no-print-directory test ptx VENV=build/ends/oldest PYTHON=$(OLDEST) LOCK=
	@$(MAKE) --no-print-directory test ptx VENV=build/ends/newest PYTHON=$(NEWEST) LOCK=

clean:
	rm -rf $(VENV) $(VENV)-torch runs build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
