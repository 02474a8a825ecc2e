# SPDX-License-Identifier: Apache-2.0
# Everything from a fresh checkout: `make demo` or `make test`. Needs Python 3.11 or newer and a C compiler.
# PYTHON=python3.12 chooses the interpreter of .venv, PYTEST_ARGS='-k index' what pytest gets,
# BENCH_ARGS='--rows I1,I3' what bench/run.py gets.

VENV := .venv
PY := $(VENV)/bin/python
SOURCES := pyproject.toml setup.py $(wildcard rmq/_core/*.pyx rmq/_core/*.pxd rmq/_core/*.h)
CORE_TESTS := $(wildcard $(addprefix tests/test_,javahash.py record.py crc.py items.py places.py putbatch.py puttexts.py \
    putter.py indexfile.py indexbatches.py sidecar.py queries.py rowhashes.py consumequeue_units.py columns.py views.py jsonrows.py \
    messagelines.py numbertext.py storedfields.py recordcheck.py verify_damage.py verify_pieces.py verify_windows.py))
PYTEST_ARGS ?=
BENCH_ARGS ?=
FUZZ_SECONDS ?= 60

# Thousands of interpreters are started; without its files each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test interop spark cluster spark-versions crash kill faults levels aarch64 fuzz lint bench \
    bench-quick bench-check bench-latency bench-spark bench-jobs bench-peers bench-growth performance-page docs build debug \
    sanitize memcheck clean FORCE
.DELETE_ON_ERROR:

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' Makefile | expand -t 18

demo: $(VENV)/.demo ## run examples/flights.py
	$(PY) examples/flights.py

test: $(VENV)/.dev ## run all tests, with Java and Maven those of `make interop` too
	@tools/java.sh >/dev/null || true
	@tools/java.sh spark >/dev/null
	$(PY) -m pytest -q --synced -m 'slow or not slow' $(PYTEST_ARGS)

interop: $(VENV)/.dev ## RocketMQ itself opens our stores; needs Java 17 or newer and Maven
	@tools/java.sh >/dev/null || true
	RMQ_REQUIRE_JAVA=1 $(PY) -m pytest -q --synced -m interop $(PYTEST_ARGS)

spark: $(VENV)/.dev ## stores on Spark; needs Java 17 or newer
	@tools/java.sh spark >/dev/null
	$(PY) -m pytest -q -m 'not cluster' tests/spark $(PYTEST_ARGS)

cluster: $(VENV)/.dev ## executors of a Spark cluster on loopback die during reads, writes and streams
	@tools/java.sh spark >/dev/null
	$(PY) -m pytest -q -m cluster tests/spark $(PYTEST_ARGS)

spark-versions: $(VENV)/.dev ## a little of everything on older releases of PySpark, each in build/; 500 MB each
	@tools/java.sh spark >/dev/null
	tools/spark_versions.sh

crash: $(VENV)/.dev ## thousands of disks that power loss may leave; RMQ_CRASH_SEED and RMQ_CRASH_STATES choose them
	$(PY) -m pytest -q -rP --show-capture=stdout --synced -m crash $(PYTEST_ARGS)

kill: $(VENV)/.dev ## 200 writers killed at random moments; threads and readers for a minute each
	$(PY) -m pytest -q -rP --show-capture=stdout --synced -m kill $(PYTEST_ARGS)

levels: $(VENV)/.dev ## tests of compiled code at each set of instructions that this CPU has; five minutes
	$(PY) -m pytest -q -rPs --show-capture=stdout -m slow tests/test_levels.py tests/test_crc.py

aarch64: $(VENV)/.dev ## the quick tests on aarch64, emulated; root on Debian, ten minutes
	tools/aarch64.sh -n 2 $(PYTEST_ARGS)

fuzz: $(VENV)/.dev ## FUZZ_SECONDS of hostile bytes (60) under ASan and UBSan, guided by coverage
	tools/fuzz.sh --seconds $(FUZZ_SECONDS) --jobs 2

faults: $(VENV)/.dev ## system calls fail one at a time, disks are full, limits are low; three minutes
	$(PY) -m pytest -q --synced -m faults $(PYTEST_ARGS)

lint: $(VENV)/.dev ## ruff, mypy, and the rules of tests/test_tidy.py
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m pytest -q -m 'slow or not slow' tests/test_tidy.py

bench: $(VENV)/.bench ## the table of goals beside RocketMQ, databases, memory; seven minutes, build/goals.json
	@tools/java.sh >/dev/null || true
	$(PY) bench/run.py --json build/goals.json $(BENCH_ARGS)

bench-quick: $(VENV)/.bench ## the rows of it that need no JVM, in four minutes
	$(PY) bench/run.py --quick --json build/goals-quick.json $(BENCH_ARGS)

bench-latency: $(VENV)/.bench ## how long one put takes, of 10 million, and why the slowest did; a minute
	$(PY) bench/latency.py --json build/latency.json $(BENCH_ARGS)

bench-spark: $(VENV)/.bench ## look-ups on Spark beside Spark's own ways, 16 million keys; a quarter of an hour, 8 GB of disk
	@tools/java.sh >/dev/null || true
	$(PY) bench/spark.py --entries 20000000 --keys 16000000 --json build/spark.json $(BENCH_ARGS)

bench-jobs: $(VENV)/.bench ## whole-store jobs on stores of 1 to 8 GiB, by processes and on Spark; ten minutes, 30 GB of disk
	@tools/java.sh >/dev/null || true
	$(PY) bench/jobs.py --spark --json build/jobs.json $(BENCH_ARGS)

bench-check: $(VENV)/.bench ## an error when a row that needs no JVM falls below its goal; one to three minutes
	$(PY) bench/run.py --check $(BENCH_ARGS)

bench-peers: $(VENV)/.bench ## everything beside pure Python and databases; six minutes, build/bench.json
	@mkdir -p build
	$(PY) -m pytest bench -q --benchmark-only --benchmark-sort=name --benchmark-columns=median,max,rounds \
	    --benchmark-json=build/bench.json -o tmp_path_retention_policy=failed $(PYTEST_ARGS)

bench-growth: $(VENV)/.bench ## cost by batch size, keys of an index file, segments of a store; build/growth.json
	$(PY) bench/growth.py --json build/growth.json

performance-page: $(VENV)/.bench ## docs/performance.md from build/goals*.json, growth.json, latency.json
	$(PY) bench/report.py $(filter-out %-quick.json,$(wildcard build/goals*.json))

docs: $(VENV)/.dev ## the documentation as a site in build/site
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

build: $(VENV)/.built ## .venv with the package, its modules compiled in place

debug: $(VENV)/.dev ## a second copy in build/debug: bounds checks, asserts, symbols
	tools/flavour.sh debug
	@echo 'use it: PYTHONPATH=build/debug $(PY) -P ...    gdb: gdb --args $(PY) -P -m pytest -q tests/...'

sanitize: $(VENV)/.dev ## a second copy in build/asan, and the core's tests under ASan and UBSan
	tools/flavour.sh asan
	tools/sanitized.sh -c 'import rmq._core._record as module; print(module.__file__)'
	$(if $(CORE_TESTS),tools/sanitized.sh -m pytest -q -p no:cacheprovider $(CORE_TESTS) $(PYTEST_ARGS))

memcheck: $(VENV)/.dev ## a second copy in build/valgrind, and the core's tests: memory that nobody set
	tools/flavour.sh valgrind
	$(PY) tools/memcheck.py $(CORE_TESTS) $(PYTEST_ARGS)

clean: ## remove .venv and everything built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	rm -f rmq/_core/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# With PYTHON given, look whether .venv is of that interpreter.
$(VENV)/.built: $(SOURCES) tools/setup.sh $(if $(PYTHON),FORCE)
	@PYTHON='$(PYTHON)' tools/setup.sh build

$(VENV)/.demo: $(VENV)/.built
	@PYTHON='$(PYTHON)' tools/setup.sh demo

$(VENV)/.dev: $(VENV)/.built
	@PYTHON='$(PYTHON)' tools/setup.sh dev

$(VENV)/.bench: $(VENV)/.dev
	@PYTHON='$(PYTHON)' tools/setup.sh bench
