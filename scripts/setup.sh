#!/usr/bin/env bash
# Makes the checkout usable: finds or installs torch, installs what is missing, builds the extension.
# This file only finds a Python; environment.py beside it does the work and lists the options.
set -euo pipefail
here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)

is_new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

if [ -n "${PYTHON:-}" ]; then
  if ! is_new_enough "$PYTHON"; then
    echo "setup: PYTHON=$PYTHON is not a Python 3.10 or newer" >&2
    exit 1
  fi
  exec "$PYTHON" "$here/environment.py" "$@"
fi
for candidate in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
  if is_new_enough "$candidate"; then
    [ "$candidate" = python3 ] || echo "setup: python3 is missing or older than 3.10, using $candidate" >&2
    exec "$candidate" "$here/environment.py" "$@"
  fi
done
echo "setup: Python 3.10 or newer is needed: install one, or name it, PYTHON=/path/to/python3" >&2
exit 1
