#!/usr/bin/env bash
# The prefiller: computes prompts, finds those that it has seen in host memory, and hands them over through NIXL.
set -euo pipefail
export VLLM_NIXL_SIDE_CHANNEL_HOST=${HOST:-127.0.0.1} VLLM_NIXL_SIDE_CHANNEL_PORT=5600
exec vllm serve "${MODEL:-Qwen/Qwen3-8B}" --port 8100 --kv-transfer-config '{
    "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"connectors": [
        {"kv_connector": "NixlConnector", "kv_role": "kv_producer"},
        {"kv_connector": "KVStowConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": "60GB"}}]}}' "$@"
