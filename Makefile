# `make help` lists the targets. Everything installs into $(VENV), which is made at the first need.

VENV ?= .venv
OUT ?= results/quick
# Of `make speed`: cpu or cuda; 1 for small cases and few rounds; further options of its command.
DEVICE ?= cpu
QUICK ?=
SPEED ?=
# Options of the command of `make gpu-check`, as --seconds 300 --only steps.
GPU_CHECK ?=
# Candidates, in order; the first one of a version that we support is used.
PYTHON ?= python3 python3.14 python3.13 python3.12 python3.11
# TORCH=cpu: at the first installation, PyTorch's own wheels without CUDA, a tenth of the download.
TORCH ?= default
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
# Folders whose types are checked; all of them where empty.
TYPED ?=
# Processes of pytest: a number, or auto for one a core.
JOBS ?= auto
# Options of tests/lanes.py, as --python 3.12, --only-one, --tests mechanisms, --record.
LANE ?=
# What `make check` tests: the import rules, the catalogue, the duties of every method, and the core's mechanisms.
CORE := tests/test_architecture.py tests/test_catalog.py tests/test_every_defense.py \
  $(addprefix tests/attacks/,test_every_attack.py test_core.py) \
  $(addprefix tests/defenses/core/plan/,test_bound.py test_codec.py test_defense.py test_public_data.py) \
  $(addprefix tests/defenses/core/,gradients/test_reference.py randomness/test_keys.py privacy/test_sampling.py) \
  tests/audit/run/test_graph.py tests/leaderboard/test_metrics.py

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

ifeq ($(filter $(TORCH),default cpu),)
$(error TORCH must be default or cpu, got $(TORCH))
endif

.DELETE_ON_ERROR:
.PHONY: help demo site check test test-newest test-lowest test-peers test-shapes test-long test-all test-gpu gpu-check ci \
  lint types core default speed browser latex format clean
# Where the environment forbids compiled modules, every process that a test starts would compile all of ours again.
check test test-long test-newest test-lowest test-peers test-shapes test-all test-gpu gpu-check browser ci: export PYTHONDONTWRITEBYTECODE :=

help:
	@echo 'make demo       trains and attacks the quick suite, prints its board and makes its page (one to three minutes, installed)'
	@echo 'make site       builds the site of leaderboard/published, which opens without a server (OUT=DIR, site by default)'
	@echo 'make check      format, lint, types of the packages and the tests of the core: what one runs while working (a minute)'
	@echo 'make test       format, lint and the default tests (seven minutes on two cores)'
	@echo 'make test-long  the expensive tests that the default ones leave out (minutes)'
	@echo 'make test-peers second opinions: Opacus, BackPACK, torchvision, torchmetrics, kymatio, Flower; the wheel'
	@echo 'make test-shapes'
	@echo '                the tests of make check, in which the shapes and types of every call are checked'
	@echo 'make ci         make test, types, make test-peers, make test-long and make test-shapes: what CI runs'
	@echo 'make test-newest, make test-lowest'
	@echo '                the default and the long tests on newer Pythons and the newest versions of all, and on the lowest'
	@echo 'make test-all   every test but those of a GPU, at full counts'
	@echo 'make latex      compiles exported tables by pdflatex; says why not where it is not installed'
	@echo 'make test-gpu   the tests that need a CUDA device'
	@echo "make browser    installs Debian's chromium and chromium-driver where they are missing, and tests the pages in it"
	@echo 'make gpu-check  numbers, times and memory on a CUDA device, in six minutes at most'
	@echo 'make speed      times and memory of a step against plain training and other tools (DEVICE=cuda, QUICK=1)'
	@echo 'make format     formats the code and mends what the linter can'
	@echo 'make clean      removes .venv, .lanes, caches and builds; results stay'
	@echo 'Options: TORCH=cpu (wheels without CUDA), VENV=DIR, PYTHON=python3.12, JOBS=N, OUT=DIR (of the demo and the site)'
	@echo "         GPU_CHECK='--seconds 300 --only steps' (of make gpu-check; all: GPU_CHECK=--help)"
	@echo "         SPEED='--case dp_cnn-256 --way auto' (of make speed; all: SPEED=--help)"

# `run` prints the board, also where a cell failed; the page is made then too, and the exit code stays that of `run`.
demo: $(VENV)/.core
	@$(BIN)/leakbench run quick --out $(OUT); code=$$?; \
	$(BIN)/leakbench leaderboard page $(OUT) --out $(OUT)/page || [ $$code -ne 0 ] || code=$$?; exit $$code

# Built whole, from records alone; `OUT=DIR` names another folder.
# A board with a failed control (exit 1) is published too: its pages say so on top.
site: OUT = site
site: $(VENV)/.core
	@$(BIN)/leakbench leaderboard build $(sort $(wildcard leaderboard/published/*/)) --out $(OUT) $(if $(wildcard submissions),--submissions submissions) \
	  || [ $$? -eq 1 ]

# Beside one another: the type checker is one process, and the tests wait for their imports. Tests are half of all that
# has types, and theirs are checked by `make ci`.
check: $(VENV)/.dev
	@+$(MAKE) --no-print-directory -j 3 lint types core TYPED='leakbench defenses attacks audit benchmarks leaderboard'

test: $(VENV)/.dev
	@+$(MAKE) --no-print-directory -j 2 lint default

ci: test
	@+$(MAKE) --no-print-directory -j 2 types test-peers
	@+$(MAKE) --no-print-directory test-long
	@+$(MAKE) --no-print-directory test-shapes

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# The parts as folders of `leakbench`, which is how they are imported: type checkers read no `__path__`.
types: $(VENV)/.dev
	@mkdir -p .types/leakbench && ln -sfn $(addprefix ../../,$(wildcard leakbench/*.py)) .types/leakbench/
	@ln -sfn $(addprefix ../../,defenses attacks audit benchmarks leaderboard) .types/leakbench/
	$(BIN)/pyright --pythonpath $(BIN)/python $(TYPED)

# In one process: to import PyTorch and collect once more in others takes as long as a third of these tests.
core: $(VENV)/.dev
	$(BIN)/pytest -q -n 0 --hypothesis-profile=few $(CORE)

# A file's tests in one process: what they share, as a trained model, is made once, for a tenth less in all.
default: $(VENV)/.dev
	$(BIN)/pytest -q -n $(JOBS) --dist loadfile

test-long: $(VENV)/.dev
	$(BIN)/pytest -q -n $(JOBS) --dist loadfile -m 'long and not slow and not gpu and not peers'

test-peers: $(VENV)/.dev
	$(BIN)/pytest -q -n $(JOBS) -m 'peers and not slow and not gpu'

# Without the tests that read the sources: they check no calls.
test-shapes: $(VENV)/.dev
	LEAKBENCH_SHAPES=1 $(BIN)/pytest -q -n $(JOBS) --dist loadfile --hypothesis-profile=few \
	  $(filter-out tests/test_architecture.py tests/test_catalog.py,$(CORE))

# Each makes environments of its own, by uv where it is installed. PyTorch of PyTorch's own index with TORCH=cpu.
test-newest test-lowest: $(VENV)/.made
	@$(BIN)/python tests/lanes.py $(@:test-%=%) --jobs $(JOBS) $(if $(filter cpu,$(TORCH)),--torch-index $(TORCH_CPU_INDEX)) $(LANE)

test-all: $(VENV)/.dev
	$(BIN)/pytest -q -n $(JOBS) --dist loadfile -m 'not gpu' --hypothesis-profile=full

# Also among the default tests, which name no reason for what they skip.
latex: $(VENV)/.dev
	$(BIN)/pytest -q -n 0 -rs -m 'not slow' tests/leaderboard/exports/test_formats.py -k latex

test-gpu: $(VENV)/.dev
	$(BIN)/pytest -m gpu

# Both of Debian, because a driver is for its browser's version.
browser: $(VENV)/.dev
	@{ command -v chromium && command -v chromedriver; } >/dev/null || \
	  $$([ "$$(id -u)" -eq 0 ] || echo sudo) apt-get install --yes chromium chromium-driver
	$(BIN)/pytest -q -n 0 -m 'not slow' tests/leaderboard/page/test_browser.py tests/leaderboard/site/test_site_browser.py

gpu-check: $(VENV)/.dev
	@$(BIN)/python -m leakbench.benchmarks.gpu_check $(GPU_CHECK)

# As a module from here, so that `benchmarks` is ours, whatever other distributions call theirs.
speed: $(VENV)/.dev
	@$(BIN)/python -m leakbench.benchmarks.speed --device $(DEVICE) $(if $(filter-out 0,$(QUICK)),--quick) $(SPEED)

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .lanes build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@for python in $(PYTHON); do \
	  if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null; then \
	    echo "making $(VENV) with $$($$python --version)"; \
	    $$python -m venv $(VENV) || exit 1; touch $@; exit 0; \
	  fi; \
	done; \
	echo "leakbench needs Python 3.11, 3.12, 3.13 or 3.14, and none of [$(PYTHON)] is one:" \
	  "install one, or name yours with PYTHON=/path/to/python" >&2; exit 1

# An index that the user has set up is kept: PyTorch's is then asked beside it, not instead.
$(VENV)/.torch: $(VENV)/.made
ifeq ($(TORCH),cpu)
	@echo 'installing PyTorch without CUDA'
	@option=--index-url; [ -z "$$PIP_INDEX_URL" ] || option=--extra-index-url; \
	$(PIP) install --quiet $$option $(TORCH_CPU_INDEX) 'torch>=2.10' torchvision
endif
	@touch $@

$(VENV)/.core: pyproject.toml $(VENV)/.torch
	@echo 'installing leakbench (PyTorch is large: the first time takes minutes)'
	@$(PIP) install --quiet --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	@echo 'installing leakbench and what its tests need (PyTorch is large: the first time takes minutes)'
	@$(PIP) install --quiet --editable '.[dev]'
	@touch $@ $(VENV)/.core
