# Entry point for development: each target installs its requirements first, and a second call is quick.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PAGE := tools/dashboard_pictures
.PHONY: setup test demo lint bench gpu fidelity docs dashboards dashboard-pictures backends clean
.DELETE_ON_ERROR:
# Tests start many programs, which share compiled files.
unexport PYTHONDONTWRITEBYTECODE

setup: $(READY)

# A stamp file: packages are installed again only when pyproject.toml has changed. Python compiles a file when it is first
# imported; compiling all files here would double the time of the installation.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c 'import sys; sys.version_info >= (3, 11) or sys.exit("torchotel needs Python 3.11 or later")'
	@echo "installing torchotel with torch and all packages for tests and examples: some minutes and 6 GB"
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[demo,report,dev]'
	touch $@

test: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

demo: $(READY)
	$(BIN)/torchotel demo $(ARGS)

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m tools.check_english

bench: $(READY)
	$(BIN)/python -m benchmarks $(ARGS)

# On a machine with CUDA, ten minutes: the tests that need it, device times, synchronisations, memory and cost. docs/gpu.md
# is written from it. Without CUDA, a tiny model shows that it runs.
gpu: $(READY)
	$(BIN)/python -m benchmarks.gpu $(ARGS)

# Compare every model with and without torchotel bit for bit: ten minutes on two cores. ARGS="swin" selects by name.
fidelity: $(READY)
	PYTHONPATH=tests:. $(BIN)/python -m fidelity --write docs/fidelity.md $(ARGS)

# Generate the tables of the pages from the code, and build the site into site/.
docs: $(READY)
	$(BIN)/python docs/tables.py
	$(BIN)/mkdocs build

# Generate Grafana's dashboards and alerts from their code.
dashboards: $(READY)
	$(BIN)/python -m tools.dashboards

# Draw every dashboard with Grafana's own components and check the pictures; needs Node, Chromium and the backends.
dashboard-pictures: $(READY) $(PAGE)/node_modules/.package-lock.json
	PYTHONPATH=tests:. $(BIN)/python -m tools.dashboard_pictures $(ARGS)
$(PAGE)/node_modules/.package-lock.json: $(PAGE)/package-lock.json
	npm ci --prefix $(PAGE)

# Build Jaeger, the Collector and Prometheus with Go into TORCHOTEL_BACKENDS, some minutes each, unless they exist there.
backends: $(READY)
	$(BIN)/python -m tools.backends
clean:
	rm -rf .venv site .mypy_cache .ruff_cache .pytest_cache dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
