#!/usr/bin/env bash
# Shows spmd_auto at work on simulated CPU devices. Arguments go to the demo: bash scripts/demo.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"
python="$(find_python)"
ensure_venv "$ROOT/.venv" "$python" ""
say "running the demo"
exec .venv/bin/python -m spmd_auto demo "$@"
