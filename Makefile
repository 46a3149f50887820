# SPDX-License-Identifier: Apache-2.0
# The same targets for people and for CI. PYTHON=/path/to/python3.11 chooses the Python under .venv.
.POSIX:
.PHONY: help setup serve test check build bump fork native native-test netns-test npu-test test-ascend-cpu container-test tidy clean

PY = .venv/bin/python

help:
	@echo "make serve    set up, start prefill + decode on a real model, ask it something, keep serving (ONCE=1: stop then)"
	@echo "make test     set up, then all checks and the tests (netns, ascend-cpu and container apart)"
	@echo "make setup    .venv with the fork's wheel and the development tools"
	@echo "make check    ruff, mypy --strict, import-linter, clang-format, size limits"
	@echo "make native   the C++ libraries of csrc_npu into vllm_ascend_pd/native/"
	@echo "make tidy     clang-tidy over csrc_npu and tests/csrc (minutes; what was clean is not looked at again)"
	@echo "make native-test   the C++ unit tests: plain, with sanitizers (needs g++), for aarch64 under qemu; the wheel's glibc"
	@echo "make netns-test   two servers, and one instance over two hosts, as network namespaces (needs root and iproute2)"
	@echo "make npu-test   the NPU path without an NPU, in environments of its own (needs g++ and Debian's apt-get)"
	@echo "make test-ascend-cpu   the oracle suite on the Ascend lane's engine code (vLLM 0.23.0), in an environment of its own"
	@echo "make container-test   build and try the Dockerfile's images without Docker (root, Debian; minutes, 5 GB of cache)"
	@echo "make build    the fork's wheel into dist/   (LANE=cpu, ascend or ascend-cpu; ARCH=x86_64 or aarch64)"
	@echo "make bump     what a bump to an upstream release needs: RELEASE=x.y.z, LANE=cpu (docs/bump.md)"
	@echo "make fork     the fork's tool, for example: make fork ARGS='check'"
	@echo "make clean    remove what was built here; the cache outside the checkout stays"

setup:
	@sh tools/setup.sh

serve: setup
	@$(PY) -m tools.serve_demo

check: setup
	@sh tools/check.sh

test: check native-test
	@$(PY) -m tools.fork fetch
	@$(PY) -m tools.ascend fetch
	@$(PY) -m pytest --ignore=tests/netns
	@for release in 9.1.0 8.5.0; do PD_DATADIST=stub STANDIN_CANN=$$release $(PY) -m pytest tests/contract || exit 1; done
	@STANDIN_CANN=8.2.0 $(PY) -m pytest tests/unit/transfer/test_cann_pair.py -k two_sided
	@$(MAKE) npu-test

netns-test: setup
	@$(PY) -m pytest tests/netns

npu-test: setup
	@$(PY) -m tools.npu_triton test
	@$(PY) -m tools.npu test

test-ascend-cpu: setup
	@$(PY) -m tools.ascend_cpu test
	@$(PY) -m tools.ascend beside

native: setup
	@$(PY) -m tools.native build

tidy: setup
	@$(PY) -m tools.native tidy

native-test: setup
	@$(PY) -m tools.native test sanitize aarch64 audit

# Not part of `make test`; docs/containers.md records its last result.
container-test: setup
	@$(PY) -m tools.containers test --serve "$$($(PY) -c 'from tests.models import ensure_model; print(ensure_model("gqa2"))')"

LANE = cpu
ARCH =
build: setup
	@mkdir -p dist
	$(PY) -m tools.fork wheel --lane $(LANE) $(ARCH:%=--arch %) --out dist

RELEASE =
bump: setup
	@test -n "$(RELEASE)" || { echo "make bump RELEASE=x.y.z [LANE=cpu]: name upstream's release" >&2; exit 2; }
	@$(PY) -m tools.fork bump --release $(RELEASE) --lane $(LANE) || true
	@VLLM_PD_RELEASE=$(RELEASE) $(PY) -m pytest -q tests/fork/test_contract.py

ARGS = --help
fork: setup
	@$(PY) -m tools.fork $(ARGS)

clean:
	rm -rf .venv build dist logs *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
