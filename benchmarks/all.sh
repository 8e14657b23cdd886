#!/bin/sh
# Every measurement of benchmarks/README.md, in about 35 minutes on two idle cores.
#
#   sh benchmarks/all.sh PYTHON PEER_PYTHON [DIR]     from the repository's root; DIR: default benchmarks/results
#
# Short of time? Leave out from the end of this list upwards: `medium bf16`, `medium fp32`, `tiny bf16`, the folder of
# 50,000, `resnet18 bf16`. Never the gate, and never the control ("again") of small fp32.
set -eu
python=$1 peer=$2 out=${3:-benchmarks/results}
data=$(mktemp -d)
trap 'rm -rf "$data"' EXIT
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"

case_of() { # case precision rounds block arms...
    case=$1 precision=$2 rounds=$3 block=$4
    shift 4
    echo "== $case $precision" >&2
    "$python" -m benchmarks.speed --case "$case" --precision "$precision" --rounds "$rounds" --block "$block" \
        --peer-python "$peer" --data "$data" --out "$out" --arms "$@"
}

# Seconds: start-up of the arms (about 8 each) + tuning once a case (about 40) + rounds x 2 x block x arms.
case_of small fp32 6 2 mocokit again encoders plain lightly lightly-same     # about 240
case_of small bf16 6 2 mocokit encoders lightly lightly-same                 # about 140
case_of tiny fp32 6 1 mocokit encoders plain lightly                         # about 130
case_of photos fp32 4 2 mocokit encoders plain lightly                       # about 230
case_of resnet18 fp32 3 4 mocokit encoders lightly                           # about 200
case_of resnet18 bf16 3 4 mocokit encoders lightly lightly-same              # about 200
"$python" -m benchmarks.parts augment --peer-python "$peer" --out "$out"     # about 30
"$python" -m benchmarks.parts loss --out "$out"                              # about 10
"$python" -m benchmarks.parts queue --out "$out"                             # about 10
"$python" -m benchmarks.parts folder --out "$out"                            # about 60
case_of tiny bf16 5 1 mocokit encoders lightly-same                          # about 60
case_of medium fp32 4 2 mocokit encoders lightly                             # about 120
case_of medium bf16 4 2 mocokit encoders lightly-same                        # about 80
"$python" -m benchmarks.report "$out" --write
