# Everything from a bare clone: `make demo` and `make test` set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CASES ?= 20000
AGAIN := NICEST_BROWSER=1 $(BIN)/python -m pytest -q --last-failed tests/studio/test_browser.py

.PHONY: help demo test test-modes test-lowest test-browser screenshots load-test fuzz crash-test soak bench compare lint format types pictures docs dist lock clean

help:  ## these lines
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' $(MAKEFILE_LIST)

demo: $(VENV)/.runtime  ## train on the embedded digits, evaluate, certify, draw the figures
	$(BIN)/nicest demo --out runs/demo
	$(BIN)/nicest reproduce figures --recipe digits --runs runs/reproduce --out runs/demo/figures

test: lint types  ## lint, types, import contracts and all tests
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not alone"
	$(BIN)/python -m pytest -q -m alone

test-modes: $(VENV)/.dev  ## all tests in random order, with SIGINT ignored; as an ordinary user, without network, with a read-only home
	sh tests/modes.sh

test-lowest:  ## every command with every dependency at its lowest version, without extras, without pandas and with all; torch is 3 GB
	$(PYTHON) tests/lowest.py

test-browser: $(VENV)/.dev  ## the studio in a real Chromium, where one is installed
	NICEST_BROWSER=1 $(BIN)/python -m pytest -q tests/studio/test_browser.py || $(AGAIN) || $(AGAIN) || $(AGAIN)

screenshots: $(VENV)/.dev  ## the pictures of docs/studio.md, from the browser test with the run of `make demo`
	NICEST_BROWSER=1 NICEST_STUDIO_RUN=runs/demo NICEST_SCREENSHOTS=docs/images \
		$(BIN)/python -m pytest -q tests/studio/test_browser.py -k Looks

load-test: $(VENV)/.dev  ## fifty clients of the studio for a minute, then hostile ones, with the run of `make demo`
	$(BIN)/python tests/load.py runs/demo --clients 50 --seconds 60 --out results/studio-load.json
	$(BIN)/python tests/hostile.py runs/demo --seconds 60 --out results/studio-hostile.json

KILLS ?= 60
crash-test: $(VENV)/.dev  ## kill real trainings KILLS=60 times, resume them, compare their ends; the next sitting adds to it
	PYTHONPATH=tests $(BIN)/python tests/crash.py --kills $(KILLS) --out results/crash-test.json

MINUTES ?= 60
soak: $(VENV)/.dev  ## the studio under load and trainings beside it for MINUTES=60, with kills and full disks
	$(BIN)/python tests/soak.py --minutes $(MINUTES) --out results/soak.json

fuzz: $(VENV)/.dev  ## feed every reader CASES (20,000) hostile files; stopped and started again, it goes on
	$(BIN)/python tests/fuzz.py --cases $(CASES) --out results/fuzz.json

bench: $(VENV)/.dev  ## measure the speed of the MNIST net, next to other flow libraries and a lower bound
	$(BIN)/python -m benchmarks bench

WHAT ?= density
compare: $(VENV)/.dev  ## compare NICE with other methods: WHAT=density, imputation, regression, classification, outliers, synthesis, known or posteriors
	$(BIN)/python -m benchmarks compare $(WHAT)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: $(VENV)/.dev
	$(BIN)/mypy

format: $(VENV)/.dev  ## format the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

pictures: $(VENV)/.dev  ## run the gallery and draw its pictures
	$(BIN)/python docs/run_page.py gallery --pictures

docs: $(VENV)/.docs  ## write docs/cli.md and build the site in site/; warnings and broken links are errors
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python docs/check_site.py site

dist: $(VENV)/.dist  ## build sdist and wheel in dist/, check them, run the wheel in a bare environment
	$(BIN)/python tests/dist.py

# the lock file pins every version; pyproject.toml says what is needed
$(VENV)/.runtime: pyproject.toml requirements.lock
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint requirements.lock --editable '.[studio,tables]'
	@touch $@

$(VENV)/.dev: pyproject.toml requirements.lock
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint requirements.lock --editable '.[dev]'
	@touch $@ $(VENV)/.runtime

$(VENV)/.docs: $(VENV)/.dev
	$(BIN)/pip install --quiet --constraint requirements.lock --editable '.[docs]'
	@touch $@

$(VENV)/.dist: $(VENV)/.dev
	$(BIN)/pip install --quiet --constraint requirements.lock --editable '.[dist]'
	@touch $@

$(VENV)/.sbi: $(VENV)/.dev
	$(BIN)/pip install --quiet --constraint requirements.lock --editable '.[sbi]'
	@touch $@

$(VENV)/.ecosystem: $(VENV)/.dev
	$(BIN)/pip install --quiet --constraint requirements.lock --editable '.[export,hub,mlflow,pyro,ray,spark,wandb]'
	@touch $@

lock: $(VENV)/.dev $(VENV)/.docs $(VENV)/.dist $(VENV)/.sbi $(VENV)/.ecosystem  ## pin what is installed now
	$(BIN)/pip freeze --all --exclude pip --exclude-editable | sed 's/+cpu$$//' > requirements.lock

clean:  ## remove everything that was made
	rm -rf $(VENV) build dist site runs .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
