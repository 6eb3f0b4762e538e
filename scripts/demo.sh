#!/usr/bin/env bash
# Sets the checkout up and runs the main job: a search in the Python language reference. Arguments go to
# `python -m deep_kernels demo`, a query first of all.
set -euo pipefail
here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
python=$("$here/setup.sh" --no-tests --print-python)
[ $# -gt 0 ] || set -- "how to catch an exception and clean up with finally"
exec "$python" -m deep_kernels demo "$@"
