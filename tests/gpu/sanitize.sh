#!/bin/sh
# Runs the kernels' tests under compute-sanitizer: out-of-bounds and misaligned accesses (memcheck), reads of device
# memory that nothing wrote (initcheck), races in shared memory (racecheck). From the repository's root, on a GPU
# machine. TOOLS picks some of them. Errors of the API are not reported: cuda-bindings asks for functions that this driver
# may not have.
set -eu
for tool in ${TOOLS:-memcheck initcheck racecheck}; do
    echo "== $tool"
    compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 9 python3 -m pytest -m gpu -q -p no:cacheprovider \
        tests/gpu/test_round_trips.py -k "many_regions or staging_buffer" "$@"
done
