#!/usr/bin/env bash
# Everything that needs a GPU, in under 7 minutes, from a bare checkout (torch, triton, pytest; nothing installed).
# Results go to $OUT (default: build/gpu_check); the last output is a short table. A part that fails is named there,
# and stops no other. `--dry-run`: a few tokens on the CPU, with Triton's interpreter.
set -uo pipefail
cd "$(dirname "$0")/.."

out=$(mkdir -p "${OUT:-build/gpu_check}" && cd "${OUT:-build/gpu_check}" && pwd)
python=$(realpath -s "$(command -v "${PYTHON:-python3}")")
device=cuda
[ "${1:-}" != --dry-run ] || device=cpu

# The packages under their import names (see setup.py), away from the checkout whose folders hide libraries.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
mkdir "$copy/lib"
cp -r trace_kernels trace "$copy/lib" && mv "$copy/lib/trace" "$copy/lib/trace_rl"
cp -r kernels "$copy/lib/trace_kernels/device"
cp -r bench tests pyproject.toml "$copy"
export PYTHONPATH=$copy/lib PYTHONUNBUFFERED=1
cd "$copy"
parts=$out/parts
rm -rf "$parts" "$out"/{results,tiles,rows}.json "$out"/{rows.csv,tree_attention.svg,table.txt,log.txt}
mkdir "$parts"

part() { # name, seconds until it is stopped, command; at most 3 more until it is killed
    local name=$1 limit=$2 started=$SECONDS code=0
    shift 2
    timeout --kill-after=3 "$limit" "$@" >"$parts/$name.log" 2>&1 || code=$?
    local status=done
    [ $code = 0 ] || status="FAILED ($code)"
    printf '%-15s %s, %d s\n' "$name" "$status" $((SECONDS - started)) | tee -a "$parts/status.txt"
}
check() { # part, seconds to begin new work in, seconds until it is stopped
    part "$1" "$3" "$python" -m bench.gpu_check "$1" --out "$parts" --device cuda --seconds "$2"
}

if [ $device = cpu ]; then
    quick=(--out "$parts" --device cpu --quick)
    TRITON_INTERPRET=1 part interpreted 120 "$python" -m bench.gpu_check \
        parity ops tests tiles attention flex kernels "${quick[@]}" &
    part benchmarks 120 "$python" -m bench.gpu_check edge_logprobs score_anchors tree_reductions "${quick[@]}" &
    wait
else
    # Right or wrong first, side by side; then what is timed, one by one.
    check tests 75 95 &
    check parity 75 95 &
    check ops 60 95 &
    wait
    check tiles 60 72
    check attention 35 60
    check edge_logprobs 1 35
    check score_anchors 1 30
    check tree_reductions 1 30
    check kernels 8 17
    check flex 12 27
fi
part table 10 "$python" -m bench.gpu_check table --out "$parts" --device $device
cat "$parts/table.txt" 2>/dev/null || cat "$parts/status.txt"
tail -n +1 "$parts"/*.log >"$out/log.txt"
# Without a table everything stays as the parts left it.
[ -f "$parts/table.txt" ] || exit 0
mv "$parts"/{results.json,rows.json,rows.csv,table.txt} "$out"
mv "$parts"/{tiles.json,tree_attention.svg} "$out" 2>/dev/null
rm -rf "$parts"
