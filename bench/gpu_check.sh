#!/usr/bin/env bash
# Everything that needs a GPU, in under 7 minutes, from a bare checkout (torch, triton, pytest; nothing installed).
# Results go to $OUT (default: build/gpu_check); the last output is a short table. A part that fails is named there.
# GPU_CHECK_DEVICE=cpu: a dry run on a few tokens with Triton's interpreter.
set -uo pipefail
cd "$(dirname "$0")/.."

out=$(mkdir -p "${OUT:-build/gpu_check}" && cd "${OUT:-build/gpu_check}" && pwd)
device=${GPU_CHECK_DEVICE:-cuda}
python=$(realpath -s "$(command -v "${PYTHON:-python3}")")
[ "$device" != cpu ] || export TRITON_INTERPRET=1

# The packages under their import names (see setup.py), away from the checkout whose folders hide libraries.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
mkdir "$copy/lib"
cp -r trace_kernels trace "$copy/lib" && mv "$copy/lib/trace" "$copy/lib/trace_rl"
cp -r kernels "$copy/lib/trace_kernels/device"
cp -r bench tests pyproject.toml "$copy"
export PYTHONPATH=$copy/lib PYTHONUNBUFFERED=1
cd "$copy"
rm -f "$out"/{parity,tiles,kernels}.json "$out"/tree_attention.* "$out/table.txt"
: >"$out/log.txt"

part() { # seconds, name, command
    local limit=$1 name=$2 started=$SECONDS
    shift 2
    printf '\n== %s\n' "$name" >>"$out/log.txt"
    timeout --kill-after=5 "$limit" "$@" >>"$out/log.txt" 2>&1
    local code=$?
    printf '%-10s %s, %d s\n' "$name" "$([ $code = 0 ] && echo done || echo "FAILED ($code)")" $((SECONDS - started))
}
check() { # part, seconds to begin new work in, seconds in all
    part "$3" "$1" "$python" -m bench.gpu_check "$1" --out "$out" --device "$device" --seconds "$2"
}

if [ "$device" = cpu ]; then
    part 300 "dry run" "$python" -m bench.gpu_check parity tiles attention kernels --out "$out" --device cpu --quick
else
    check parity 60 75
    [ ! -d tests/kernels ] || part 75 tests "$python" -m pytest -q -x -p no:cacheprovider tests/kernels
    check tiles 75 90
    check attention 95 125
    check kernels 25 30
fi
"$python" -m bench.gpu_check table --out "$out" --device "$device"
