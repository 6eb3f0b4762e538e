#!/usr/bin/env bash
# Sets the checkout up and runs the tests. Arguments go to pytest; paths are those of the checkout.
set -euo pipefail
here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
python=$("$here/setup.sh" --print-python)
cd -- "$here/.."
exec "$python" -m pytest "$@"
