#!/usr/bin/env bash
# Every check that is no test: formatting, lint, types, layers. --fix formats the files first.
# Never asks anything; colors only where a terminal looks on and CI is not set.
set -uo pipefail
here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
python=$("$here/setup.sh" --no-build --print-python) || exit
cd -- "$here/.." || exit

if [ "${CI:-}" = true ] || [ ! -t 1 ]; then
  export NO_COLOR=1
else
  export CLICOLOR_FORCE=1 MYPY_FORCE_COLOR=1
fi

clang_format() { "$python" -c 'import clang_format; clang_format.clang_format()' "$@"; }
cpp_files() { find csrc deep_kernels/include tests -name '*.h' -o -name '*.cuh' -o -name '*.cpp'; }
with_cpp_files() {
  local files=()
  while IFS= read -r file; do files+=("$file"); done < <(cpp_files)
  "$@" "${files[@]}"
}

failed=0
check() { # name, command...: one line if all is well, what it said if not
  local name=$1 output
  shift
  if output=$("$@" 2>&1); then
    echo "ok      $name"
  else
    printf 'FAILED  %s\n%s\n' "$name" "$output"
    failed=1
  fi
}

case "$*" in
  '') ;;
  --fix)
    "$python" -m ruff check --quiet --fix-only .
    "$python" -m ruff format --quiet .
    with_cpp_files clang_format -i
    ;;
  *)
    echo "usage: scripts/check.sh [--fix]" >&2
    exit 2
    ;;
esac

check "ruff format" "$python" -m ruff format --check .
check "ruff check" "$python" -m ruff check .
check "mypy" "$python" -m mypy --strict
check "clang-format" with_cpp_files clang_format --dry-run -Werror
check "layers" "$python" scripts/check_layers.py
exit $failed
