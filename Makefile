# On a fresh machine: "make demo" and "make test". Both make .venv first.
PYTHON ?= python3
# Where several builds of torch can be had, this chooses: TORCH="torch==2.11.*" make test
TORCH ?= torch==2.13.0
VENV = .venv
RUN = $(VENV)/bin/python

# That check-install installs for.
PYTHONS ?= $(PYTHON)

.PHONY: tables demo demo-slow-link test test-gpu sanitize-gpu conformance check-install lint bench bench-slow-link clean

demo: $(VENV)/installed
	$(RUN) examples/train_ddp.py

demo-slow-link: $(VENV)/installed
	$(RUN) examples/slow_link.py --rate 1gbit -- examples/train_ddp.py

test: lint
	$(RUN) -m pytest

# PyTorch's own tests of torch.distributed, plain and compressed; half an hour, a summary line.
conformance: $(VENV)/installed-dev
	PYTHONPATH=. $(RUN) tests/conformance.py

# With the PyTorch and Numba that the GPU machine has, not with .venv.
test-gpu:
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu
	PYTHONPATH=. $(PYTHON) benchmarks/bench_cuda.py

SANITIZED = of_the_reference and 9293 or in_place or corrupt or decode_sum and ([2- or [9-) or no_room
sanitize-gpu:
	for tool in memcheck racecheck; do \
	  PYTHONPATH=. compute-sanitizer --tool $$tool --report-api-errors no --error-exitcode 1 \
	    $(PYTHON) -m pytest tests/test_cuda.py -k "$(SANITIZED)" || exit 1; \
	done

# sdist and wheel; the wheel in an empty environment, away from the sources, where it checks itself; then with
# the extra for GPUs, which compiles a kernel, also where there are none.
COMPILES = from zipccl_hooks.cuda import launch; from zipccl_hooks.format import Mode; \
  assert ".target sm_90" in launch.compiled_ptx("stamp", "uint8", Mode.RAW, (9, 0))
check-install: $(VENV)/installed-dev
	rm -rf dist
	$(RUN) -m build . > /dev/null
	for python in $(PYTHONS); do \
	  rm -rf .venv/empty && $$python -m venv .venv/empty && \
	  .venv/empty/bin/python -m pip install --quiet "$(TORCH)" dist/*.whl && \
	  (cd / && $(CURDIR)/.venv/empty/bin/python -m zipccl_hooks check) && \
	  .venv/empty/bin/python -m pip install --quiet "$$(ls dist/*.whl)[cu13]" && \
	  (cd / && XDG_CACHE_HOME=$(CURDIR)/.venv/empty $(CURDIR)/.venv/empty/bin/python -c '$(COMPILES)') || exit 1; \
	done
	rm -rf .venv/empty

lint: $(VENV)/installed-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

bench: $(VENV)/installed-dev
	$(RUN) -m pytest benchmarks --benchmark-only

bench-slow-link: $(VENV)/installed
	$(RUN) examples/slow_link.py --rate 1gbit -- benchmarks/bench_collectives.py $(SAVE)

# Tables and picture of README and docs, of the runs in benchmarks/saved.
tables: $(VENV)/installed-dev
	PYTHONPATH=. $(RUN) benchmarks/tables.py

clean:
	rm -rf $(VENV)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet "pip>=25.1"

# torch by itself first, so that nothing else decides which build is installed.
$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	$(RUN) -m pip install --quiet "$(TORCH)"
	$(RUN) -m pip install --quiet --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(RUN) -m pip install --quiet --group dev
	touch $@
