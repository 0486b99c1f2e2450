#!/usr/bin/env bash
# Runs the tests. Arguments go to pytest: bash scripts/test.sh tests/verify -k golden
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"
compilers="$(compiler_extras)"
python="$(find_python)"
models="$(model_extras "$python")"
ensure_venv "$ROOT/.venv" "$python" "test$compilers$models"
# Where compilers for TPU and GPU, or models of others, were installed, a test that can't find them fails, not skips.
if [[ -n "$compilers" ]]; then export SPMD_AUTO_REQUIRE_COMPILERS=1; fi
if [[ -n "$models" ]]; then export SPMD_AUTO_REQUIRE_MODELS=1; fi
say "running pytest in $(test_workers) processes $*"
exec .venv/bin/python -m pytest -n "$(test_workers)" --dist worksteal "$@"
