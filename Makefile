# The one entry: each target sets up what it needs, and a second call is quick.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PAGE := tools/dashboard_pictures
.PHONY: setup test demo lint bench fidelity docs dashboards dashboard-pictures backends clean
.DELETE_ON_ERROR:
# Many tests start programs, and none is to compile anew what the one before it has.
unexport PYTHONDONTWRITEBYTECODE

setup: $(READY)

# A stamp, so that the packages are looked at again only when what they are made of has changed. Of their thousands of files
# Python compiles those that are ever imported: all of them would take as long again as the installation.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c 'import sys; sys.version_info >= (3, 11) or sys.exit("torchotel needs Python 3.11 or later")'
	@echo "installing torchotel with torch and all that tests and examples need: minutes, and some 6 GB"
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

bench: $(READY)
	$(BIN)/python -m benchmarks $(ARGS)

# Every model with and without torchotel, bit for bit: ten minutes on two cores. ARGS="swin" checks those of that name.
fidelity: $(READY)
	PYTHONPATH=tests:. $(BIN)/python -m fidelity --write docs/fidelity.md $(ARGS)

# The pages' tables are written anew from the code, and the site is built into site/.
docs: $(READY)
	$(BIN)/python docs/tables.py
	$(BIN)/mkdocs build

# Grafana's dashboards and alerts are written anew from their code.
dashboards: $(READY)
	$(BIN)/python -m tools.dashboards

# Draw every dashboard with Grafana's own components and check the pictures: needs Node, Chromium and the backends.
dashboard-pictures: $(READY) $(PAGE)/node_modules/.package-lock.json
	PYTHONPATH=tests:. $(BIN)/python -m tools.dashboard_pictures $(ARGS)
$(PAGE)/node_modules/.package-lock.json: $(PAGE)/package-lock.json
	npm ci --prefix $(PAGE)

# Jaeger, the Collector and Prometheus, into TORCHOTEL_BACKENDS: found there, or built with Go for some minutes each.
backends: $(READY)
	$(BIN)/python -m tools.backends
clean:
	rm -rf .venv site .mypy_cache .ruff_cache .pytest_cache dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
