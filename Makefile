# Every script of this repository goes through here: `make` alone lists what there is.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

GO ?= go

# What takes minutes to build is built once for all checkouts of a user.
CACHE := $(shell dir="$${XDG_CACHE_HOME:-$$HOME/.cache}/onceledger/tools"; \
	mkdir -p "$$dir" 2>/dev/null && test -w "$$dir" && echo "$$dir" || echo "$(CURDIR)/.cache/tools")
version = $(shell awk '$$1 == "$(1)" { print $$2; exit }' $(2))
BUILT_WITH := $(shell $(GO) env GOVERSION 2>/dev/null)
SQLC := $(CACHE)/sqlc-$(call version,github.com/sqlc-dev/sqlc,tools/go.mod)-$(BUILT_WITH)
LINT := $(CACHE)/golangci-lint-$(call version,github.com/golangci/golangci-lint/v2,tools/lint/go.mod)-$(BUILT_WITH)

# A checkout that belongs to somebody else has no revision to stamp.
VCS := -buildvcs=$(shell git status >/dev/null 2>&1 && echo auto || echo false)

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: go gcc ## Build api, worker and onceledger into bin/
	@mkdir -p bin
	@test -x bin/api || echo "building; the first time takes two or three minutes, most of it for the Kafka client"
	$(GO) build $(VCS) -o bin/ ./cmd/api ./cmd/worker ./cmd/onceledger

.PHONY: run
run: build ## Start everything on this machine; Ctrl-C stops it
	@bin/onceledger up

.PHONY: test
test: go gcc ## Run all tests on a real Postgres 18 and the embedded broker
	@echo "building the tests; the first time takes some minutes"
	@$(GO) run ./test/prepare
	$(GO) vet ./...
	$(GO) test -race -shuffle=on -timeout 15m ./...

# Package by package: each starts brokers and more of its own. What needs Java is
# in files with the build tag apache; the other tests there are make test's. A JVM
# that lives for seconds does not pay for its second compiler. The tests of the
# relays wait more than they work.
test-kafka: export JAVA_TOOL_OPTIONS := -XX:TieredStopAtLevel=1 -XX:+UseSerialGC
.PHONY: test-kafka
test-kafka: go gcc ## Run the tests that need Java, on Apache Kafka, Connect and Debezium
	@$(GO) run ./test/prepare -java
	$(GO) vet -tags apache ./...
	@failed=; \
	for dir in $$(grep -rl --include='*_test.go' '^//go:build apache$$' cmd internal test | xargs -n 1 dirname | sort -u); do \
		names=$$(grep -l '^//go:build apache$$' $$dir/*_test.go | xargs sed -n 's/^func \(Test[A-Z0-9][A-Za-z0-9_]*\)(t \*testing\.T).*/\1/p' | paste -sd '|'); \
		test -n "$$names" || { echo "there is no test in the files of $$dir with the build tag apache"; failed=1; continue; }; \
		more=; test $$dir != test/conformance || more="-parallel 4"; \
		echo "$(GO) test -race -tags apache -timeout 45m $$more -run '^($$names)$$' ./$$dir"; \
		$(GO) test -race -tags apache -timeout 45m $$more -run "^($$names)\$$" ./$$dir || failed=1; \
	done; \
	test -z "$$failed"

# TWIN is one of test/twins, or several; without it, all of them.
TWIN ?=
.PHONY: twins
twins: build ## Prove that the proof has teeth: build each broken twin, and see prove catch it
	@$(GO) run ./test/twins $(if $(TWIN),$(TWIN),-json test/twins/results.json)

.PHONY: test-pooler
test-pooler: go gcc ## Run the tests behind PgBouncer, which has to be installed
	@PATH="$$PATH:/usr/sbin" command -v pgbouncer >/dev/null || { echo "pgbouncer is not installed: install it (Debian: apt-get install pgbouncer)"; exit 1; }
	@$(GO) run ./test/prepare
	$(GO) vet -tags pgbouncer ./test/pooler
	$(GO) test -race -tags pgbouncer ./test/pooler

.PHONY: lint
lint: go gcc $(LINT) ## Run golangci-lint
	$(LINT) run ./...

.PHONY: generate
generate: go $(SQLC) ## Write internal/db anew from db/queries and db/migrations
	$(SQLC) generate

.PHONY: verify
verify: go gcc $(SQLC) ## Check what must agree: generated code, go.mod, formatting, docs, migrations up and down
	$(SQLC) diff
	@unformatted=$$(gofmt -l $$(git ls-files -co --exclude-standard '*.go')); \
		test -z "$$unformatted" || { echo "not formatted with gofmt:"; echo "$$unformatted"; exit 1; }
	$(GO) mod tidy -diff
	cd tools && $(GO) mod tidy -diff
	cd tools/lint && $(GO) mod tidy -diff
	$(GO) vet -tags apache ./...
	$(GO) test -count=1 ./test/static ./internal/migrate
	$(GO) run ./test/twins -check

.PHONY: prove
prove: build ## Break a onceledger of its own 100 times, and account for everything
	@bin/onceledger prove

.PHONY: bench
bench: build ## Measure, both sides of each ratio in one run; results go to bench/results
	@for main in bench/*/main.go; do echo "== $$(dirname $$main)"; $(GO) run ./$$(dirname $$main); done

.PHONY: ci
ci: ## Run what CI runs
	.ci/run

.PHONY: clean
clean: ## Remove what was built here; data in .onceledger stays
	rm -rf bin .cache

$(SQLC):
	@echo "building sqlc; it takes some two minutes, once"
	@mkdir -p $(@D)
	cd tools && CGO_ENABLED=0 $(GO) build -o $@.new github.com/sqlc-dev/sqlc/cmd/sqlc && mv $@.new $@

$(LINT):
	@echo "building golangci-lint; it takes some two minutes, once"
	@mkdir -p $(@D)
	cd tools/lint && CGO_ENABLED=0 $(GO) build -o $@.new github.com/golangci/golangci-lint/v2/cmd/golangci-lint && mv $@.new $@

# Prerequisites that are not ours to install.
.PHONY: go gcc
go:
	@command -v $(GO) >/dev/null || { echo "go is not installed: install Go $$(awk '$$1 == "go" { print $$2 }' go.mod) or later (https://go.dev/doc/install)"; exit 1; }
gcc:
	@command -v "$$($(GO) env CC)" >/dev/null || { echo "there is no C compiler, which the Kafka client needs: install gcc (Debian: apt-get install gcc libc6-dev)"; exit 1; }
