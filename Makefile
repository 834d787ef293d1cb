# `make demo` and `make test` do the whole set-up; a second run finds it done. Other targets are
# thin wrappers around CMake, ctest, pip and pytest: HACKING.md shows the commands.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.NOTPARALLEL:
.DEFAULT_GOAL := help
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export CTEST_PARALLEL_LEVEL := $(JOBS)
export PYTHONDONTWRITEBYTECODE := 1
# One name for the compiler: Python's build flags may call it g++ and CMake c++, so ccache would
# compile everything twice.
ifeq ($(origin CXX),default)
CXX := c++
endif
export CXX
# Relative paths let a second checkout take the first one's objects from ccache.
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1

JOBS ?= $(shell nproc)
FUZZ_SECONDS ?= 20
PYTEST_OPTIONS ?=
PACKAGE_STAMP := .venv/package.stamp
# Includes folders, whose time changes when a file is deleted.
PACKAGE_SOURCES := CMakeLists.txt pyproject.toml README.md LICENSE \
  $(shell find cmake include src cli python/bindings python/loadstone \
    -name __pycache__ -prune -o \( -type d -o -name '*.h' -o -name '*.cpp' -o -name '*.py*' \
    -o -name '*.css' -o -name '*.js' -o -name '*.in' -o -name py.typed \
    -o -name 'CMakeLists.txt' -o -name '*.cmake' \) -print)
# Prints a line for each failure, and the closing lines.
CTEST := ctest --preset
SHORTEN := { grep -vE '^ +Start +[0-9]+: | Passed +[0-9.]+ sec$$' || true; }
# The ten slowest C++ tests, from ctest's log.
SLOWEST = LC_ALL=C sort -k3,3 -gr build/release/Testing/Temporary/CTestCostData.txt | \
  awk 'NF == 3 && shown++ < 10 {printf "%8.1f s  %s\n", $$3, $$1}'

.PHONY: help demo test test-all bench lint clang-tidy clean setup package release
.PHONY: asan tsan asan-hostile fuzz

help:
	@echo 'make demo      load a real checkpoint, and compare with what transformers gives'
	@echo 'make tutorials write tiny models for the tutorials and for docs/how-to/heal-a-script.md,'
	@echo '               in build/tutorials'
	@echo 'make test      run all tests except the long ones'
	@echo 'make test-fast run the quick tests: a minute after a build'
	@echo 'make test-all  run all tests: also whole matrices, repeated kills, sweeps over model'
	@echo '               classes, measurements (gigabytes, an hour), C++ tests under sanitizers'
	@echo 'make test-llama-cpp  build llama.cpp, and run the tests that compare with it'
	@echo 'make test-page test the page of a plan in a browser, which is installed first'
	@echo 'make screenshots  make the pictures of the page for docs/images'
	@echo 'make wheel     make the source archive and the wheel, in build/dist'
	@echo 'make aarch64   cross compile for aarch64, and test in QEMU'
	@echo 'make docs      make the documentation as a site, in build/docs/html'
	@echo 'make bench     compare speed and memory with other loaders'
	@echo 'make bench-table  measure the figures of the documentation'
	@echo 'make versions  test releases of other libraries, and write docs/versions.md'
	@echo 'make newest    test their pre-releases, and write build/newest/report.md'
	@echo 'make format    format all code with clang-format and ruff'
	@echo 'make lint      run clang-format, clang-tidy, ruff, mypy and tools/tidy.py'
	@echo 'make asan | tsan   run the C++ tests under a sanitizer'
	@echo 'make asan-hostile  run the tests of malformed files and faults under sanitizers'
	@echo 'make fuzz      run the fuzz targets for a short time'
	@echo 'make clean     remove build/ and .venv/'

setup:
	@tools/setup.sh

release: setup
	cmake --preset release
	cmake --build --preset release --parallel $(JOBS)

# Builds the package and the command in .venv. ccache makes it cheap after `release`: same flags.
package: setup
	@$(MAKE) --no-print-directory $(PACKAGE_STAMP)

$(PACKAGE_STAMP): $(PACKAGE_SOURCES)
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) python -m pip install -q --no-deps --no-build-isolation \
	  --config-settings=cmake.define.LOADSTONE_WERROR=ON .
	touch $@

.PHONY: wheel
wheel: package
	python tools/wheel.py build/dist

# Needs Debian 12 on x86-64.
.PHONY: aarch64
aarch64: setup
	tools/aarch64.sh sysroot
	cmake --preset aarch64
	cmake --build --preset aarch64 --parallel $(JOBS)
	$(CTEST) aarch64 | $(SHORTEN)
	tools/aarch64.sh wheel

demo: package
	python -m examples.demo

test: release package $(if $(CI),lint-quick)
	$(CTEST) release | $(SHORTEN)
	@$(SLOWEST)
	python -m pytest -q -n $(JOBS) --durations=15 --durations-min=1 $(PYTEST_OPTIONS)

# In a separate environment: vLLM requires other releases than the adapters are tested with.
.PHONY: test-vllm
test-vllm: package
	tools/vllm.sh build/vllm
	build/vllm/bin/python -m pytest -q -p no:cacheprovider -c /dev/null \
	  --rootdir python/tests/serving python/tests/serving

# Compares with llama.cpp's converter, llama-quantize and encoders, built from sources.
.PHONY: test-llama-cpp
test-llama-cpp: package
	JOBS=$(JOBS) tools/llama_cpp.sh build/llama-cpp -n $(JOBS)

.PHONY: tutorials
tutorials: package
	python tools/tutorial_models.py build/tutorials

.PHONY: test-page screenshots
screenshots: package
	tools/setup.sh chromium
	python tools/screenshots.py
	python tools/terminal.py

test-page: package
	tools/setup.sh chromium
	python -m pytest -q python/tests/execute/test_page.py

# Takes under 90 seconds after a build: HACKING.md lists the omitted tests.
.PHONY: test-fast
test-fast: release package
	$(CTEST) fast | $(SHORTEN)
	python -m pytest -q -n $(JOBS) --dist loadfile -m 'fast and not sweep and not bench and not long'

test-all: release package
	$(CTEST) release | $(SHORTEN)
	python -m pytest -q -n $(JOBS) -m 'not sweep and not bench'
	python -m pytest -q -m 'sweep or bench'
	@$(MAKE) --no-print-directory asan tsan

bench: package
	cmake --preset bench
	cmake --build --preset bench --parallel $(JOBS)
	for program in build/bench/bin/*_bench; do "$$program"; done
	python -m bench.loaders
	python -m bench.reads
	python -m bench.large_plan
	python -m bench.many_tensors
	python -m bench.gguf_bench
	python -m bench.quantize_files
	python -m bench.outputs
	python -m bench.code_moves
	python -m bench.bnb_bench
	python -m bench.modelopt_bench
	python -m bench.single_files
	python -m bench.remote

# The tables in README.md and docs/measured.md; commit the tree first.
.PHONY: bench-table
bench-table: package
	cmake --preset bench
	cmake --build --preset bench --parallel $(JOBS) --target limits
	python -m bench.published

# Warnings are errors, including broken links.
.PHONY: docs
docs: package
	tools/setup.sh doxygen chromium
	python -m pip install -q -c constraints.txt -r tools/site/requirements.txt
	rm -rf build/docs/images
	if command -v chromium >/dev/null; then python tools/screenshots.py build/docs/images; \
	else echo 'docs: no chromium, so the pictures of plans are those of docs/images'; fi
	python tools/site/stage.py build/docs

.PHONY: map
map:  # draw the folders of HACKING.md; a test compares the picture with the tree
	python tools/map.py

.PHONY: versions
versions: package  # downloads some gigabytes into build/versions
	python tools/versions.py build/versions

.PHONY: check-agreement
check-agreement: package  # loadstone.check against transformers, for tiny models with defects
	python tools/check_agreement.py

.PHONY: newest
newest: package  # NEWEST=transformers: one library; NEWEST=--main: main branches, by git
	python tools/versions_newest.py build/newest $(NEWEST)

.PHONY: format format-check
format: setup
	git ls-files '*.h' '*.cpp' | xargs clang-format -i
	ruff format
	ruff check --fix

format-check: setup
	git ls-files '*.h' '*.cpp' | xargs clang-format --dry-run -Werror
	ruff check
	ruff format --check
	mypy

.PHONY: lint-quick
lint-quick: format-check
	python tools/tidy.py
	python tools/language.py

lint: lint-quick clang-tidy

clang-tidy:
	@tools/setup.sh clang-tidy
	cmake --preset dev
	git ls-files 'src/*.cpp' 'cli/*.cpp' | xargs -P $(JOBS) -n 4 clang-tidy --quiet \
	  --extra-arg=-Wno-unknown-warning-option -p build/dev

asan tsan: setup
	cmake --preset $@
	cmake --build --preset $@ --parallel $(JOBS)
	$(CTEST) $@ | $(SHORTEN)

# Readers of malformed files, file system faults, and the corpora of fuzz/, under the address and
# undefined-behaviour sanitizers: a push is checked with it, so it builds nothing else.
asan-hostile: setup
	cmake --preset $@
	cmake --build --preset $@ --parallel $(JOBS) --target hostile_checks
	$(CTEST) $@ | $(SHORTEN)

fuzz:
	@tools/setup.sh clang libclang-rt-dev
	cmake --preset fuzz
	cmake --build --preset fuzz --parallel $(JOBS)
	for program in build/fuzz/bin/*_fuzz; do \
	  name=$$(basename "$$program" _fuzz); \
	  seeds=fuzz/corpus/$$name; \
	  [ -d "$$seeds" ] || seeds=tests/hostile; \
	  mkdir -p "build/fuzz/corpus/$$name"; \
	  "$$program" -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=1536 \
	    -malloc_limit_mb=256 -verbosity=0 -artifact_prefix=build/fuzz/ \
	    "build/fuzz/corpus/$$name" "$$seeds"; \
	done

clean:
	rm -rf build .venv
