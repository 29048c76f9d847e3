# Everything a contributor runs. Needs make and Python 3.10 or newer; each target installs what it
# needs into .venv on its first run, and again when pyproject.toml changes.
#
#   PYTHON=...       the interpreter for a new .venv (default: the first found that is new enough)
#   TORCH=...        the torch to install, for instance TORCH=torch==2.7.1
#   TORCH_INDEX=...  the package index to take torch from, for instance one with CPU builds only
#   JOBS=...         how many tests run at once (default: 3; each may start several processes)
#   ARGS=...         further arguments for `make demo...`, `test`, `conformance`, `fuzz` and `bench...`

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
INSTALL := $(PIP) install -qq
# Tests wait for a quarter of their time, so three at once keep two cores busy.
JOBS := 3
PYTEST := $(PY) -m pytest -n $(JOBS) --dist loadfile

.DEFAULT_GOAL := help
# Two pips in one environment get in each other's way.
.NOTPARALLEL:
.DELETE_ON_ERROR:

.PHONY: help
help:
	@echo "make demo    train a small language model over several workers"
	@echo "make demo-meta        learn to learn, over workers (ARGS=digits for images)"
	@echo "make demo-pipeline    train a network in stages on workers (ARGS='--schedule zbv' for another order)"
	@echo "make demo-embedding   train a click-through model, its tables on servers (ARGS='--staleness 2' for a bound)"
	@echo "make demo-rl          learn to balance a pole, its environments on workers (ARGS=dqn for another algorithm)"
	@echo "make test    unit, simulation and multi-process tests"
	@echo "make end-to-end       whole programs, tests of the tools, a sample of PyTorch's own tests"
	@echo "make test-launchers   starts by ssh, SLURM, Ray, Kubernetes, mpirun, torchrun: those installed"
	@echo "make test-gpu         tensors on a GPU (WEFT_TEST_DEVICE=cpu: those that need none)"
	@echo "make thorough         all random programs and seeds, and ten million made-up inputs for each decoder in C"
	@echo "make quick   those that take a few minutes"
	@echo "make matrix  the quick tests on each Python and torch that there are (tests/matrix.py)"
	@echo "make conformance      PyTorch's own RPC tests, all of them, on Weft"
	@echo "make check   all that CI runs: format, lint, types, layers, tests, documentation"
	@echo "make test-plain       tests on the twin in Python of what is also there in C"
	@echo "make sanitize         tests and made-up bytes on the twin in C, which stops at its first fault"
	@echo "make fuzz    made-up bytes on everything that decodes some"
	@echo "make bench   Weft and torch.distributed.rpc side by side, in about seven minutes"
	@echo "make gate    the CPU time of calls beside that of an earlier commit; fails when they are slower"
	@echo "make bench-peers      small calls, with Ray and Monarch where they are installed"
	@echo "make bench-gpu        tensors and gradients between two processes on one GPU"
	@echo "make bench-endurance  a million calls, 10,000 autograd contexts, 2,000 clients that come and go: does anything grow?"
	@echo "make docs    build the documentation into site/"
	@echo "make clean   remove what the above made (distclean: .venv too)"

# Tests start many interpreters: let them keep what they compile, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

# ------------------------------------------------------------------------------------ what to run

.PHONY: demo
demo: $(VENV)/.installed-demo
	@echo "The demo trains for about two minutes on two cores."
	@$(PY) examples/language_model/train.py $(ARGS)

.PHONY: demo-meta
demo-meta: $(VENV)/.installed-meta
	@echo "The demo trains for about one minute on two cores."
	@$(PY) examples/meta_learning/train.py $(or $(ARGS),sinusoid)

.PHONY: demo-pipeline
demo-pipeline: $(VENV)/.installed-pipeline
	@echo "The demo trains for about half a minute on two cores, and then measures six schedules."
	@$(PY) examples/pipeline/train.py $(ARGS)

.PHONY: demo-embedding
demo-embedding: $(VENV)/.installed-embedding
	@echo "The demo trains for about half a minute on two cores."
	@$(PY) examples/embedding/train.py $(ARGS)

.PHONY: demo-rl
demo-rl: $(VENV)/.installed-demo-rl
	@echo "The demo trains for about ten seconds on two cores."
	@$(PY) examples/reinforcement_learning/train.py $(or $(ARGS),a2c)

# The files of these names, in the contract and beside it.
process_tests = $(foreach name,$(1),$(or $(wildcard \
    tests/contract/processes/test_$(name).py tests/processes/test_$(name).py),$(error no test_$(name).py)))

.PHONY: test
test: $(VENV)/.installed-test
ifdef ARGS
	@$(PY) -m pytest $(ARGS)
else
	@$(PYTEST) tests/unit tests/simulation
	@$(PYTEST) tests/processes tests/contract/processes
endif

# `make test` runs the twin that this machine has. The unit tests of the codec and of links run both.
PLAIN := tests/unit/rpc tests/unit/autograd $(call process_tests,\
    calls references autograd remote_module optimizer by_value strict tensors_in_messages)

.PHONY: test-plain
test-plain: $(VENV)/.installed-test
	@WEFT_NATIVE=0 $(PYTEST) $(or $(ARGS),$(PLAIN))

# AddressSanitizer and UBSan end the process at the first fault. Python and torch are not built with
# them, so they have to be loaded first, and cannot tell leaks: tests/unit/test_native.py does.
# The fuzzer tries more bytes than the tests' random examples, so these are few.
SANITIZED := build/sanitized
SANITIZERS = $(shell gcc -print-file-name=libasan.so) $(shell gcc -print-file-name=libubsan.so)
WITH_SANITIZERS = LD_PRELOAD='$(SANITIZERS)' ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
    WEFT_NATIVE=1 PYTHONPATH=$(SANITIZED)/lib:.

FUZZ_NATIVE = $(WITH_SANITIZERS) $(PY) -m tests.fuzz values inline frames ring messages --engine mutational

.PHONY: sanitized
sanitized: $(VENV)/.installed-fuzz
	@rm -rf $(SANITIZED)
	@CC=gcc CFLAGS='-fsanitize=address,undefined -fno-sanitize-recover=all -g -O1' \
	    $(PY) setup.py -q build --build-base $(SANITIZED) --build-lib $(SANITIZED)/lib

.PHONY: sanitize
sanitize: sanitized
	@WEFT_TEST_SHARE=60 $(WITH_SANITIZERS) $(PYTEST) tests/unit/test_native.py -k 'not plain' \
	    tests/unit/rpc/test_call_frames.py \
	    tests/unit/engine/codec/test_values.py tests/unit/engine/codec/test_makers.py \
	    tests/unit/engine/codec/test_tensors.py \
	    tests/unit/engine/codec/test_tensors_in_message.py \
	    tests/unit/engine/io/test_lease.py tests/unit/engine/io/test_link.py \
	    tests/unit/engine/io/test_ring.py tests/unit/engine/io/test_asking_serving.py \
	    tests/unit/rpc/test_decoding.py tests/unit/rpc/test_replies.py \
	    tests/unit/engine/io/test_resumable.py
	@$(FUZZ_NATIVE) $(or $(ARGS),--frames 4000 --bare 200000)

WHOLE_PROGRAMS := tests/end_to_end tests/contract/end_to_end
LAUNCHERS := tests/launchers tests/contract/launchers

# The tests that tests/thorough.py shortens.
THOROUGH := tests/unit tests/simulation $(call process_tests,\
    autograd_programs higher_order meta_gradients_loss)

.PHONY: thorough
thorough: $(VENV)/.installed-test sanitized
	@WEFT_TEST_THOROUGH=1 $(PYTEST) $(THOROUGH) $(ARGS)
	@WEFT_TEST_THOROUGH=1 $(PYTEST) $(WHOLE_PROGRAMS) tests/processes tests/contract/processes \
	    -m thorough
	@WEFT_TEST_THOROUGH=1 $(PY) -m pytest tests/end_to_end/test_training_faults.py
	@$(FUZZ_NATIVE) --bare 10000000

# One run, as each start of pytest imports all that its tests need. The tests for a GPU keep a group
# for the whole run, so they have their own, in one process.
WHOLE := $(WHOLE_PROGRAMS) tests/tools tests/contract/conformance $(LAUNCHERS)

.PHONY: end-to-end
end-to-end: $(VENV)/.installed-test
	@$(PYTEST) $(WHOLE) -m 'not launcher or smoke'
	@WEFT_TEST_DEVICE=cpu $(PY) -m pytest tests/gpu

# Each test is skipped, with the reason, where its system is missing. Pip installs Ray and the
# client of Kubernetes; the others are the distribution's.
.PHONY: test-launchers
test-launchers: $(VENV)/.installed-launchers
	@for command in sshd slurmctld munged mpirun; do \
	    if ! PATH="$$PATH:/usr/sbin:/sbin" command -v $$command >/dev/null; then \
	        echo "there is no $$command, so its tests are skipped; on Debian:"; \
	        echo "    apt-get install --no-install-recommends openssh-server slurm-wlm munge openmpi-bin"; \
	        break; \
	    fi; \
	done
	@$(PY) -m pytest $(LAUNCHERS) $(ARGS)

# Every test is skipped, with the reason, where there is no GPU or torch is built without CUDA.
.PHONY: test-gpu
test-gpu: $(VENV)/.installed-test
	@$(PY) -m pytest tests/gpu $(ARGS)

# Unit and simulation tests, and of the process tests those of each area that end soon.
QUICK := tests/unit tests/simulation tests/tools $(call process_tests,\
    calls references autograd optimizer remote_module mapreduce cancellation deadlines health \
    joining bad_input strict allowed_modules compat_autograd compat_optimizer compat_references)

.PHONY: quick
quick: $(VENV)/.installed-test
	@$(PYTEST) $(or $(ARGS),$(QUICK))

.PHONY: matrix
matrix: $(VENV)/.made
	@$(PY) -m tests.matrix $(ARGS)

.PHONY: conformance
conformance: $(VENV)/.installed-conformance
	@$(PY) -m tests.contract.conformance.run $(ARGS)

.PHONY: fuzz
fuzz: $(VENV)/.installed-fuzz
	@$(PY) -m tests.fuzz $(or $(ARGS),all)

.PHONY: format
format: $(VENV)/.installed-dev
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

# Cheapest first. Tries more seeds and examples than `make test` alone, see tests/thorough.py.
.PHONY: check
check: export WEFT_TEST_SHARE := 10
check: lint types layers test test-plain sanitize end-to-end gate docs
	@echo "all checks passed"

.PHONY: lint
lint: $(VENV)/.installed-dev
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .

.PHONY: types
types: $(VENV)/.installed-dev
	@$(PY) -m mypy

.PHONY: layers
layers: $(VENV)/.installed-dev
	@$(VENV)/bin/lint-imports

.PHONY: docs
docs: $(VENV)/.installed-docs
	@$(PY) -m sphinx -q -W --keep-going --fresh-env -j auto -b html docs site
	@echo "documentation: site/index.html"

.PHONY: bench
bench: $(VENV)/.installed-core
	@$(PY) -m benchmarks $(ARGS)

.PHONY: gate
gate: $(VENV)/.installed-core
	@$(PY) -m benchmarks.gate $(ARGS)

.PHONY: bench-peers
bench-peers: $(VENV)/.installed-core
	@$(PY) -m benchmarks.calls --sides torch weft raw ray monarch --works "sync 1" "flight 100" "flight 2000" --rounds 5 $(ARGS)

.PHONY: bench-gpu
bench-gpu: $(VENV)/.installed-core
	@$(PY) -m benchmarks.gpu $(ARGS)

.PHONY: bench-endurance
bench-endurance: $(VENV)/.installed-core
	@$(PY) -m benchmarks.endurance $(ARGS)
	@$(PY) -m benchmarks.endurance.departures

.PHONY: clean distclean
clean:
	rm -rf site build dist runs .matrix .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .grimp_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) src/*.egg-info

# ----------------------------------------------------------------------------------------- set-up

# Stamps: .made (the environment) <- .torch <- .installed-core, and one for each extra or group.
.SECONDARY: $(VENV)/.made $(VENV)/.torch

# The examples need extras, which users may install as well; contributors' targets need groups.
EXTRAS_core := [rl]
EXTRAS_demo := [demo]
EXTRAS_meta := [meta]
EXTRAS_pipeline := [pipeline]
EXTRAS_embedding := [embedding]
EXTRAS_demo-rl := [demo-rl]
EXTRAS_test := [demo,meta,pipeline,embedding,demo-rl,top,torchrl]
EXTRAS_launchers := $(EXTRAS_test)
EXTRAS_fuzz := $(EXTRAS_test)
EXTRAS_dev := $(EXTRAS_test)
GROUPS := conformance test launchers fuzz docs dev

$(VENV)/.installed-%: pyproject.toml setup.py $(wildcard native/*) $(VENV)/.torch
	@echo "setting up $(VENV): torchweft$(if $(filter-out core,$*), and what '$*' needs)"
	@$(INSTALL) --editable '.$(EXTRAS_$*)' $(if $(filter $*,$(GROUPS)),--group $*)
	@touch $@

# A torch that can be imported is kept. Otherwise the CPU build is preferred where the configured
# package sources have one: the default build for Linux brings gigabytes of CUDA along.
$(VENV)/.torch: $(VENV)/.made
	@set -e; \
	if version=$$($(PY) -c 'import torch; print(torch.__version__)' 2>/dev/null); then \
	    echo "setting up $(VENV): keeping torch $$version"; \
	else \
	    wanted='$(TORCH)'; \
	    index='$(TORCH_INDEX)'; \
	    if [ -z "$$wanted$$index" ]; then \
	        cpu=$$($(PIP) index versions torch 2>/dev/null | tr -s ' ,():' '\n' | grep '+cpu' | head -n 1 || true); \
	        wanted=$${cpu:+torch==$$cpu}; \
	    fi; \
	    if [ -z "$$index" ] && [ "$${wanted%+cpu}" = "$$wanted" ]; then $(LARGE_TORCH); fi; \
	    wanted=$${wanted:-torch>=2.6}; \
	    echo "setting up $(VENV): $$wanted (the largest part, once)"; \
	    $(INSTALL) $${index:+--index-url "$$index"} "$$wanted"; \
	fi; \
	touch $@

# Says before the download how to avoid most of it. Only Linux on x86 gets CUDA by default.
LARGE_TORCH = \
	if [ "$$(uname -sm)" = 'Linux x86_64' ] && [ ! -e /dev/nvidiactl ] && [ ! -e /dev/kfd ]; then \
	    echo "No GPU is in sight, but pip's default torch for Linux brings CUDA along: 2.8 GB to download,"; \
	    echo "6 GB on disk. The CPU build takes 0.2 GB and 0.8 GB. To take it, stop here (Ctrl-C) and run"; \
	    echo "    make TORCH_INDEX=ADDRESS $(MAKECMDGOALS)"; \
	    echo "with the address that https://pytorch.org/get-started/locally shows for Pip and CPU."; \
	fi

# A candidate must run (a version manager's shim may not), be new enough, and able to make an
# environment with pip in it (some distributions split that off).
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))

$(VENV)/.made:
	@set -e; \
	if ! $(PY) -c '' 2>/dev/null; then \
	    found=; \
	    for candidate in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python3.10); do \
	        if $$candidate -c '$(USABLE)' 2>/dev/null; then found=$$candidate; break; fi; \
	    done; \
	    if [ -z "$$found" ]; then \
	        echo "no Python 3.10 or newer with the modules venv and ensurepip found; name one: make PYTHON=/path/to/python3 ..." >&2; \
	        exit 1; \
	    fi; \
	    echo "setting up $(VENV): $$($$found --version)"; \
	    $$found -m venv --clear $(VENV); \
	fi; \
	$(PIP) --version >/dev/null 2>&1 || $(PY) -m ensurepip >/dev/null; \
	$(PIP) install --help | grep -q -e '--group' || $(INSTALL) --upgrade 'pip>=25.1'; \
	touch $@
