# The two commands:   make train      train the byte model of examples/bytes under ZeRO on RANKS processes
#                     make test       every test that is not marked slow
# Each of them sets up .venv by itself (scripts/setup.py) and does nothing twice. PYTHON=/path/to/python chooses the Python.

RANKS ?= 2
ARGS ?=
export PYTHON

BIN := .venv/bin
FIND_PYTHON = for p in $(PYTHON) python3 python3.13 python3.12 python3.11 python3.10; do \
	  if "$$p" -c '' 2>/dev/null; then exec "$$p" scripts/setup.py $(1); fi; \
	done; \
	echo "zoo: Python 3.10 to 3.13 is missing (looked for python3 and python3.13 to python3.10); install one, or name it with \`make PYTHON=/path/to/python ...\`." >&2; exit 1

# C++ and CUDA whose layout is checked; what clang-tidy reads: no torch, so that it takes seconds. Of what is compiled for
# each instruction set without its analysis of paths, which takes lengths and addresses for 0 that no caller passes.
FORMATTED := $(wildcard $(addprefix cuda/zoo/kernels/,common/*.* */*.cu */*.h */binding.cpp */python.cpp)) \
  $(wildcard $(addprefix tests/kernels/emulator/,*.cpp include/*.h include/*/*.h))
TIDY := $(filter-out %/binding.cpp %/python.cpp,$(wildcard cuda/zoo/kernels/common/*.cpp))
TIDY_ISA := $(filter-out %/binding.cpp %/python.cpp cuda/zoo/kernels/common/%,$(wildcard cuda/zoo/kernels/*/*.cpp))

# What decides the set of installed packages, and what decides the Rust extension.
MANIFESTS := requirements-dev.txt pyproject.toml $(wildcard */pyproject.toml) scripts/setup.py
RUST := Cargo.toml Cargo.lock $(shell find crates -name '*.rs' -o -name Cargo.toml)

export PATH := $(PATH):$(HOME)/.cargo/bin
# One interpreter for every cargo command, so that none of them rebuilds what another has built.
export PYO3_PYTHON := $(CURDIR)/.venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup train test test-rust test-python test-avx2 test-slow laws campaign mutants mutants-cuda lint format types contracts wheels \
	try-wheels release nvcc peer dstests plugin kernels-check sanitize sanitize-io fuzz-io bench bench-gpu bench-rust schema pages docs clean again
.DELETE_ON_ERROR:

help:
	@sed -n '1,3s/^# //p' Makefile
	@echo "also: setup test-rust test-python test-avx2 test-slow laws campaign mutants mutants-cuda lint format types contracts wheels try-wheels release nvcc"
	@echo "      peer dstests plugin kernels-check sanitize sanitize-io fuzz-io bench bench-gpu bench-rust schema pages docs clean"

# PYTHON= names another Python than the one that .venv was made from: install again.
ifneq ($(PYTHON),)
ifneq ($(PYTHON),$(shell cat .venv/made-from 2>/dev/null))
AGAIN := again
endif
endif

.venv/installed: $(MANIFESTS) $(RUST) $(AGAIN)
	@$(call FIND_PYTHON,$(if $(wildcard $@),$(if $(filter-out $(RUST),$?),install,native),install))
	@touch $@

setup: .venv/installed

train: setup
	@$(BIN)/torchrun --standalone --nproc-per-node=$(RANKS) -m zoo.cli train examples/bytes/config.json $(ARGS)

# A native library that cannot be built fails the tests; without this they would be skipped, or run the references.
# ZOO_KERNELS=auto is for machines without a C++ compiler.
test-python test-avx2 test-slow campaign laws mutants: export ZOO_KERNELS ?= native
# pytest rewrites 570 files of tests: half a minute for each worker and run, where Python may not keep the result.
test-python test-avx2 test-slow campaign laws mutants: export PYTHONDONTWRITEBYTECODE :=

test: test-rust test-python

test-rust: setup
	@$(call FIND_PYTHON,check)
	@if cargo nextest --version >/dev/null 2>&1; then cargo nextest run --workspace --status-level fail; \
	else cargo test --workspace --quiet; fi
	@cargo test --quiet -p zoo-io --features loom --lib model::
	@cargo clippy --quiet --workspace --all-targets -- -D warnings

# One worker more than cores: tests of processes and of timeouts wait.
WORKERS = $(shell $(BIN)/python -c "import os; print(len(os.sched_getaffinity(0)) + 1)" 2>/dev/null || echo auto)
test-python: setup
	@$(BIN)/python -m pytest -q -n $(WORKERS) -m "not slow and not campaign" $(ARGS)

# Tests of bits once more, with torch and the kernels held to AVX2: what a machine with AVX-512 would not notice.
BITS := tests/laws tests/golden tests/compression tests/optim tests/examples tests/zero/update/test_clipping.py tests/zero/update/test_onebit.py
test-avx2: export ATEN_CPU_CAPABILITY = avx2
test-avx2: export ZOO_KERNELS_ISA = avx2
test-avx2: setup
	@if ! grep -qw avx512f /proc/cpuinfo 2>/dev/null; then echo "zoo: no AVX-512 here: make test has been that"; \
	else $(BIN)/python -m pytest -q -n auto -m "not slow and not campaign" $(BITS) $(ARGS); fi

# What `make test` leaves out, and every property again with many more examples.
# MINUTES=30 begins no test after that time and says which were not run.
test-slow: setup
	@$(if $(MINUTES),ZOO_TEST_MINUTES=$(MINUTES)) ZOO_TEST_PROFILE=deep \
	  $(BIN)/python -m pytest -q -n auto -m "(slow or hypothesis) and not campaign" $(ARGS)

# What takes longer than CI may: four times as many examples, others each time, and tests that are marked so.
# Writes a page to keep; of a part, NAME=training ARGS=tests/laws/test_careless_training.py has one of its own.
CAMPAIGN_PAGE = $(or $(ZOO_TEST_PAGE),docs/campaigns/$(shell date +%F)$(if $(NAME),-$(NAME)).md)
campaign: setup
	@$(if $(MINUTES),ZOO_TEST_MINUTES=$(MINUTES)) ZOO_TEST_PROFILE=campaign ZOO_TEST_PAGE=$(CAMPAIGN_PAGE) \
	  $(BIN)/python -m pytest -q -n auto -m "slow or hypothesis or campaign" $(ARGS)

# Which mistakes would the tests not notice? Outside of CI; goes on where it was interrupted.
mutants: setup
	@VIRTUAL_ENV=$(CURDIR)/.venv $(BIN)/uv pip install --quiet -r requirements-mutants.txt
	@$(BIN)/python -m scripts.mutants $(ARGS)

# Which barriers and masks of the kernels for CUDA could be missing? Each is taken away and weakened, on the emulator, in
# every order of threads: some ten minutes, and a page to keep.
mutants-cuda:
	@$(MAKE) --no-print-directory campaign NAME=$(or $(NAME),cuda-mutants) ARGS="tests/kernels/test_cuda_mutants.py $(ARGS)"

# Each law under each semantics of zoo.sim and over the transports of CPU jobs; `make test` draws one for each.
laws: setup
	@for world in gloo pairwise shared nccl; do echo "== $$world"; \
	  ZOO_LAWS=$$world $(BIN)/python -m pytest -q -n auto tests/laws $(ARGS) || exit 1; done

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run -Werror $(FORMATTED)
	@$(BIN)/clang-tidy --quiet $(TIDY) -- -std=c++17
	@$(BIN)/clang-tidy --quiet --checks=-clang-analyzer-* $(TIDY_ISA) -- -std=c++17 -DZOO_ISA=portable
	@cargo fmt --check
	@cargo clippy --quiet --workspace --all-targets -- -D warnings

format: setup
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(FORMATTED)
	@cargo fmt

types: setup
	@$(BIN)/mypy

contracts: setup
	@$(BIN)/lint-imports

# Wheels and source archives of all distributions, into dist/; and a training with nothing but them in an empty environment.
wheels: setup
	@$(BIN)/python -m scripts.wheels build

try-wheels: wheels
	@$(BIN)/python -m scripts.wheels try

# All files of a release, built twice at different paths, compared byte by byte, and tried; docs/release.md says how to publish.
# PYTHONS="python3.10 python3.12" tries them on others too.
release: setup
	@$(BIN)/python -m scripts.release all
	@$(if $(PYTHONS),$(BIN)/python -m scripts.release try $(PYTHONS))

# For machines without a CUDA toolkit: nvcc as wheels, 113 MB to download, 308 MB on the disk.
nvcc: setup
	@$(call FIND_PYTHON,nvcc)

# Real DeepSpeed in an environment of its own, which tests/clients compares with; 5.7 GB on the disk, most of it torch.
PEER ?= .peer
peer: setup
	@$(BIN)/python scripts/peer.py $(PEER)

# DeepSpeed's own unit tests on zoo.deepspeed: TESTS is the folder tests of its repository, IDS a file of pytest ids.
DSTESTS ?= .dstests
dstests: setup
	@$(BIN)/python -m scripts.dstests setup --python $(DSTESTS)/bin/python
	@$(BIN)/python -m scripts.dstests run --python $(DSTESTS)/bin/python $(TESTS) $(IDS) $(ARGS)
	@mkdir -p docs/dstests; $(BIN)/python -m scripts.dstests page $(IDS) > docs/dstests/$$(date +%F).md

# The package of examples/plugin outside of the tree: built, installed beside zoo, and its own tests.
plugin: setup
	@$(BIN)/python scripts/plugin.py

kernels-check: setup
	@$(BIN)/python scripts/kernels_check.py

sanitize: setup
	@$(BIN)/python scripts/sanitize.py $(ARGS)

# The same question for zoo-io, with a nightly toolchain. SANITIZER=thread looks for races instead (std is built with it too,
# which needs the component rust-src), and SANITIZER=miri at the rules of pointers in what needs no kernel.
SANITIZER ?= address
NIGHTLY := cargo +nightly
TARGET := x86_64-unknown-linux-gnu
sanitize-io:
ifeq ($(SANITIZER),miri)
	@MIRIFLAGS=-Zmiri-disable-isolation PROPTEST_CASES=4 $(NIGHTLY) miri test --target-dir target/miri -p zoo-io --lib -- \
	  align:: checksum:: op:: $(ARGS)
else
	@RUST_BACKTRACE=0 RUSTFLAGS=-Zsanitizer=$(SANITIZER) ASAN_OPTIONS=detect_leaks=0 $(NIGHTLY) test --target-dir target/$(SANITIZER) \
	  $(if $(filter thread,$(SANITIZER)),-Zbuild-std) --target $(TARGET) -p zoo-io --lib --tests $(ARGS)
endif

# Some millions of cases of what cuts operations into transfers, and programs of operations against a model of the file.
CASES ?= 3000000
fuzz-io:
	@PROPTEST_CASES=$(CASES) CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS=true cargo test --quiet --release --target-dir target/fuzz \
	  -p zoo-io --lib plan:: -- $(ARGS)
	@ZOO_IO_PROGRAMS=10000 CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS=true cargo test --quiet --release --target-dir target/fuzz \
	  -p zoo-io --test programs -- $(ARGS)

bench-rust: setup
	@cargo bench --quiet -p zoo-io

schema: setup
	@$(BIN)/python scripts/schema.py

# The reference pages that are made of other files.
pages: setup
	@$(BIN)/python -m scripts.pages

# The site: every page of the repository, in build/docs/index.html. A link that leads nowhere is an error.
docs: setup
	@$(BIN)/python -m sphinx -c docs -d build/doctrees -n -W --keep-going -q . build/docs
	@echo "build/docs/index.html"

bench: setup
	@for folder in benchmarks/*/; do name=$$(basename $$folder); [ $$name = gpu ] && continue; echo "== $$name"; \
	  $(BIN)/python -m benchmarks.$$name $(ARGS) || exit 1; done

# Not among the others: where there is no GPU it has nothing to do and says so with its exit status.
bench-gpu: setup
	@$(BIN)/python -m benchmarks.gpu $(ARGS)

clean:
	rm -rf .venv target build dist runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find python cuda moe compression tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
	find python -name '_native*.so' -delete
