{{/* The value of vLLM's --kv-transfer-config. */}}
{{- define "kvstow.connection" -}}
{{- $extra := dict
      "cpu_bytes_to_use_per_rank" (include "kvstow.bytes" .Values.pool.size | int64)
      "lazy_offload" .Values.connector.lazyOffload
      "policy" .Values.pool.policy
      "copy_strategy" .Values.pool.copyStrategy
      "transfer_timeout" .Values.pool.transferTimeoutSeconds
      "admin_host" .Values.admin.host
      "admin_port" (.Values.admin.port | int)
-}}
{{- $extra = merge $extra (include "kvstow.adminFiles" . | fromYaml) -}}
{{- /* max_bytes is of all ranks of one engine. */ -}}
{{- $ranks := mul .Values.parallel.tensor .Values.parallel.pipeline -}}
{{- with .Values.pool.maxSize }}{{ $_ := set $extra "max_bytes" (mul $ranks (include "kvstow.bytes" .)) }}{{ end -}}
{{- with .Values.pool.pinning }}
{{- if .latencyTarget }}{{ $_ := set $extra "pin_latency_target" .latencyTarget }}{{ end -}}
{{- if .chunk }}{{ $_ := set $extra "pin_chunk" (include "kvstow.bytes" .chunk | int64) }}{{ end -}}
{{- if .pause }}{{ $_ := set $extra "pin_pause" .pause }}{{ end -}}
{{- end -}}
{{- dict
      "kv_connector" "KVStowConnector"
      "kv_connector_module_path" "kvstow_service.connectors.vllm"
      "kv_role" "kv_both"
      "kv_load_failure_policy" "recompute"
      "kv_connector_extra_config" $extra
    | toJson -}}
{{- end -}}
