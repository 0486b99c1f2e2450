#!/usr/bin/env bash
# Runs the tests. Arguments go to pytest: bash scripts/test.sh tests/verify -k golden
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"
compilers="$(compiler_extras)"
python="$(find_python)"
ensure_venv "$ROOT/.venv" "$python" "test$compilers"
# Where the compilers for TPU and GPU were installed, a test that needs them and can't find them fails, not skips.
if [[ -n "$compilers" ]]; then export SPMD_AUTO_REQUIRE_COMPILERS=1; fi
say "running pytest $*"
exec .venv/bin/python -m pytest "$@"
