#!/bin/sh
# Makes what the image holds: TARGET, a virtual environment with this project's wheel and the packages of LOCK.
# The Dockerfile runs it; so does a test, on any machine with Python 3.11 and pip 22.3 or newer.
set -eu

if [ "$#" -ne 3 ]; then
    echo "usage: build.sh SOURCE TARGET LOCK" >&2
    exit 2
fi
source=$1
target=$2
lock=$3
python=${PYTHON:-python3}

wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT

pip() {
    "$python" -m pip --disable-pip-version-check --no-cache-dir "$@"
}

pip wheel --quiet --no-deps --wheel-dir "$wheels" "$source"
"$python" -m venv --without-pip "$target"
# Every file must be one the lock names. Wheels only, so that no package runs its own code here; nkeys, four
# files of plain Python, is published as source alone.
pip --python "$target/bin/python" install --quiet --only-binary :all: --no-binary nkeys --require-hashes \
    --requirement "$source/deploy/image/$lock"
pip --python "$target/bin/python" install --quiet --no-deps --no-index "$wheels"/*.whl
# Nothing but the interpreter and our own command; no tests of libraries.
find "$target/bin" -type f ! -name watchkeeper -delete
find "$target/lib" -type d -name tests -prune -exec rm -rf {} +
"$target/bin/python" -m compileall -q "$target/lib"
