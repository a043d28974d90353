#!/bin/sh
# Runs the kernels' tests under compute-sanitizer: out-of-bounds and misaligned accesses (memcheck), reads of device memory
# that nothing wrote (initcheck; it does not see what cuMemcpyBatchAsync writes, so it gets the test that does without).
# The kernels share no memory between threads, so there is nothing for racecheck. From the repository's root, on a GPU
# machine. Errors of the API are not reported: cuda-bindings asks for functions that the driver may not have.
set -eu

sanitize() {
    echo "== $1"
    compute-sanitizer --tool "$1" --report-api-errors no --print-limit 10 --error-exitcode 9 \
        python3 -m pytest -m gpu -q -p no:cacheprovider tests/gpu/test_round_trips.py tests/gpu/test_layers.py -k "$2"
}

sanitize memcheck "many_regions or staging_buffer or one_launch or random_layouts or divide_a_region"
sanitize initcheck "without_batched_copies"
