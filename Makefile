# Each target makes its own environment in a fresh clone: uv if it is there, else python -m venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGE := $(VENV)/.package
TOOLS := $(VENV)/.tools
PEERS := $(VENV)/.peers
# What the tests need from npm (npm.txt, with versions): servers and clients that others wrote, and a newer node for them.
# What these need in turn is taken as it was on a day, so that it is the same everywhere.
NPM := $(VENV)/.npm
NPM_DAY := 2026-11-15
# Node has a list of certificates of its own; the machine's list is asked as well.
CERTIFICATES := $(or $(NODE_EXTRA_CA_CERTS),/etc/ssl/certs/ca-certificates.crt)
COMMA := ,
# With it every process that a test starts would compile everything again.
unexport PYTHONDONTWRITEBYTECODE

# $(call install,what): install into the environment, with the versions that are known to work together.
define install
	@if command -v uv >/dev/null 2>&1; then \
		uv venv --quiet --allow-existing --python $(PYTHON) $(VENV) && \
		uv pip install --quiet --python $(BIN)/python -c constraints.txt $(1); \
	else \
		test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(1); \
	fi
	@touch $@
endef

.PHONY: demo test check bench format clean

$(PACKAGE): pyproject.toml constraints.txt
	$(call install,-e .)

$(TOOLS): pyproject.toml constraints.txt no-deps.txt
	$(call install,-e '.[dev]')
	$(call install,--no-deps -r no-deps.txt)
	@touch $(PACKAGE)

$(PEERS): pyproject.toml constraints.txt no-deps.txt
	$(call install,-e '.[dev$(COMMA)bench]')
	$(call install,--no-deps -r no-deps.txt)
	@touch $(PACKAGE) $(TOOLS)

$(NPM): npm.txt | $(TOOLS)
	@command -v npm >/dev/null 2>&1 && \
		node -e 'const [a, b] = process.versions.node.split("."); process.exit(a > 20 || a == 20 && b >= 15 ? 0 : 1)' \
		2>/dev/null || { \
		echo "make test needs node (20.15 or newer) and npm: it tests against servers and clients from npm." >&2; \
		echo "Install both (Debian: apt-get install nodejs npm) and run it again." >&2; exit 1; }
	@mkdir -p $(VENV)/npm
	@if test -r $(CERTIFICATES); then export NODE_EXTRA_CA_CERTS=$(CERTIFICATES); fi; \
		npm install --prefix $(VENV)/npm --no-save --no-package-lock --no-audit --no-fund --ignore-scripts \
		--legacy-peer-deps --loglevel=error --before=$(NPM_DAY) \
		$$(sed "s/PLATFORM/$$(node -p 'process.platform + "-" + process.arch')/" npm.txt)
	@touch $@

# Commands of agents run in bubblewrap, so the tests need it.
.PHONY: sandbox
sandbox:
	@command -v bwrap >/dev/null 2>&1 || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null 2>&1 && \
		{ apt-get install -y -qq bubblewrap || { apt-get update -qq && apt-get install -y -qq bubblewrap; }; } >/dev/null; } || { \
		echo "make test needs bubblewrap: commands are confined by it. Install it and run it again" >&2; \
		echo "(Debian: apt-get install bubblewrap; Fedora, Arch: the package bubblewrap)." >&2; exit 1; }

# The inspector is tested in a real browser.
.PHONY: browser
browser:
	@test -x "$$CHROMIUM" || command -v chromium >/dev/null 2>&1 || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null 2>&1 && \
		{ apt-get install -y -qq chromium || { apt-get update -qq && apt-get install -y -qq chromium; }; } >/dev/null; } || { \
		echo "make test needs Chromium: the inspector is tested in it. Install it and run it again" >&2; \
		echo "(Debian: apt-get install chromium; or name the program in CHROMIUM)." >&2; exit 1; }

# The Postgres log is tested behind PgBouncer too: Debian's program is unpacked, and no service is installed.
PGBOUNCER := $(VENV)/.pgbouncer
$(PGBOUNCER): | $(TOOLS)
	@command -v pgbouncer >/dev/null 2>&1 || { \
		rm -rf $(VENV)/pgbouncer && mkdir -p $(VENV)/pgbouncer && cd $(VENV)/pgbouncer && \
		wanted="pgbouncer libc-ares2 libevent-2.1-7"; \
		{ apt-get download -qq $$wanted || { apt-get update -qq && apt-get download -qq $$wanted; }; } >/dev/null 2>&1 && \
		for each in *.deb; do dpkg -x $$each .; done; } || { \
		echo "make test needs pgbouncer: the Postgres log is tested behind it. Install it and run it again" >&2; \
		echo "(Debian, Fedora, Arch: the package pgbouncer)." >&2; exit 1; }
	@touch $@

## demo: the main job on embedded defaults, offline, in a scratch directory
demo: $(PACKAGE)
	@$(BIN)/python -m treenail demo

## test: everything that must hold (format, lint, types, import contract, tests, snippets, a trial of each bench)
test: check

check: $(TOOLS) $(NPM) $(PGBOUNCER) sandbox browser
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(VENV)/npm/node_modules/.bin/pyright
	$(BIN)/lint-imports
	$(BIN)/pytest -n auto --dist worksteal --durations=10

## docs: the site, below .venv/site; it loads nothing from elsewhere
.PHONY: docs
docs: $(TOOLS)
	rm -rf $(VENV)/site-pages && cp -r docs $(VENV)/site-pages
	sed -e 's#](docs/#](#g' README.md > $(VENV)/site-pages/index.md
	cp CONTRIBUTING.md CHANGELOG.md LICENSE $(VENV)/site-pages/
	$(BIN)/zensical build -f mkdocs.yml

## extras: every extra resolved on its own; two of them installed into a new environment and used
.PHONY: extras
extras: $(TOOLS) sandbox
	$(BIN)/python scripts/extras.py

## bench: speed as ratios to a floor or a peer in the same run (python -m bench --help)
bench: $(PEERS)
	$(BIN)/python -m bench

format: $(TOOLS)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# The pictures in the docs, recorded anew.
.PHONY: screens
screens: $(TOOLS)
	$(BIN)/python -m tests.stories.screens
