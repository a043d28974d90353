#!/usr/bin/env bash
# The decoder: gets prompts through NIXL, and keeps them and its own answers in host memory for the next turn.
set -euo pipefail
export VLLM_NIXL_SIDE_CHANNEL_HOST=${HOST:-127.0.0.1} VLLM_NIXL_SIDE_CHANNEL_PORT=5601
exec vllm serve "${MODEL:-Qwen/Qwen3-8B}" --port 8200 --kv-transfer-config '{
    "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"connectors": [
        {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"},
        {"kv_connector": "KVStowConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": "60GB"}}]}}' "$@"
