#!/usr/bin/env bash
# Builds .venv from requirements/<hardware>.txt. Called by `make setup`: requirements/setup.sh cpu|cuda [python]
set -euo pipefail
cd "$(dirname "$0")/.."

hardware=$1
python=${2:-python3}
lock=requirements/$hardware.txt
started=$SECONDS

say() { printf '[setup %3ds] %s\n' "$((SECONDS - started))" "$*"; }
fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

command -v "$python" >/dev/null || fail "$python not found; install Python 3.11 or newer, or: make setup PYTHON=/path/to/python"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old, 3.11 or newer is needed: make setup PYTHON=python3.11"
command -v g++ >/dev/null || fail "g++ not found; DeepSpeed compiles a communication op on its first CPU run"

if ! .venv/bin/python -c '' 2>/dev/null; then
    say "creating .venv with $("$python" --version)"
    "$python" -m venv --clear .venv ||
        fail "could not create .venv; on Debian and Ubuntu the module is the package python3-venv"
fi

# One line for every 25 packages, and the whole log when something goes wrong.
install() {
    local log=.venv/setup.log
    .venv/bin/pip install --no-deps --no-build-isolation --disable-pip-version-check --no-input "$@" 2>&1 |
        tee "$log" |
        awk -v total="$(grep -cE '^[a-zA-Z]' "$lock")" '
            /^(Collecting|Processing|Requirement already satisfied)/ && ++n % 25 == 0 {
                printf "             %d of %d packages fetched\n", n, total; fflush() }
            /^Building wheels/ { print "             building " substr($0, index($0, ":") + 2); fflush() }
            /^Installing collected/ { print "             unpacking"; fflush() }' || {
        tail -n 40 "$log" >&2
        fail "pip failed, the last lines are above and all of them in $log"
    }
}

# DeepSpeed is published as source only and looks for torch while it builds.
say "installing torch and build tools"
mapfile -t first < <(grep -E '^(torch|setuptools|wheel|ninja)==' "$lock")
install "${first[@]}"
say "installing $lock"
install -r "$lock"
say "installing this repository"
install -e .
say "done"
