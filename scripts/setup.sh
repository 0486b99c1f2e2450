# Sourced by the other scripts: Python environments that are made once and reused.
#
#   find_python                     prints a Python >= 3.11, 3.11 itself where there is one ($PYTHON overrides)
#   find_next_python                prints a Python >= 3.12, which gets the newest jax; fails where there is none
#   test_workers                    prints how many processes pytest should use
#   ensure_venv DIR PYTHON EXTRAS   DIR is a venv with this package and EXTRAS ("test,tpu", or ""), installed only
#                                   when pyproject.toml, the Python version or EXTRAS changed since the last time

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

say() { printf '[%s] %s\n' "$(date +%H:%M:%S)" "$*" >&2; }

python_at_least() { "$1" -c "import sys; sys.exit(sys.version_info < (3, $2))" >/dev/null 2>&1; }

find_python() {
  if [[ -n "${PYTHON:-}" ]]; then
    python_at_least "$PYTHON" 11 || { say "PYTHON=$PYTHON is no Python 3.11 or later"; return 1; }
    echo "$PYTHON"
    return
  fi
  local candidate
  for candidate in python3.11 python3 python python3.12 python3.13 python3.14; do
    if python_at_least "$candidate" 11; then command -v "$candidate"; return; fi
  done
  say "no Python 3.11 or later on the PATH; install one or set PYTHON=/path/to/python"
  return 1
}

find_next_python() {
  local candidate
  local -a candidates=(python3.14 python3.13 python3.12 python3)
  if command -v pyenv >/dev/null; then
    candidates+=("$(pyenv root)"/versions/3.1[2-9]*/bin/python)
  fi
  for candidate in "${candidates[@]}"; do
    if python_at_least "$candidate" 12; then command -v "$candidate"; return; fi
  done
  return 1
}

# Compilers for TPU and GPU come as wheels for Linux on x86-64 only.
compiler_extras() {
  if [[ "$(uname -sm)" == "Linux x86_64" ]]; then echo ",tpu,gpu"; fi
}

# Models of packages that are supported on Python 3.11, with the jax that it gets.
model_extras() {
  if ! python_at_least "$1" 12; then echo ",models"; fi
}

# One pytest process per core, at most four: each compiles and takes a few GB at its worst.
test_workers() { "$ROOT/.venv/bin/python" -c 'import os; print(min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))'; }

ensure_venv() {
  local venv="$1" python="$2" extras="$3"
  local requirement="$ROOT${extras:+[$extras]}"
  local stamp="$venv/.installed-${extras//,/-}"
  local wanted
  wanted="$({ "$python" --version; cat "$ROOT/pyproject.toml"; } | "$python" -c \
    'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')"
  if [[ -x "$venv/bin/python" && "$(cat "$stamp" 2>/dev/null)" == "$wanted" ]]; then
    say "environment $(basename "$venv") is ready"
    return
  fi
  if [[ ! -x "$venv/bin/python" || "$("$venv/bin/python" --version)" != "$("$python" --version)" ]]; then
    say "making $(basename "$venv") with $("$python" --version)"
    "$python" -m venv --clear "$venv"
  fi
  say "installing spmd-auto${extras:+[$extras]} into $(basename "$venv") (a few minutes the first time)"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$requirement"
  echo "$wanted" > "$stamp"
  say "installed: $("$venv/bin/python" -c "import importlib.metadata as m; print(*(f'{p} {m.version(p)}' for p in ('jax', 'flax', 'optax')), sep=', ')")"
}
