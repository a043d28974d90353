{{/* Settings with the same names in `kvstow serve` and the connector. All are text. */}}
{{- define "kvstow.settings" -}}
{{ include "kvstow.adminFiles" . }}
policy: {{ .Values.pool.policy }}
transfer_timeout: {{ .Values.pool.transferTimeoutSeconds }}s
{{- if ne .Values.memory.hugePages "advised" }}
huge_pages: {{ .Values.memory.hugePages }}
{{- end }}
{{- with .Values.pool.pinning }}
{{- with .latencyTarget }}
pin_latency_target: {{ . }}
{{- end }}
{{- with .chunk }}
pin_chunk: {{ include "kvstow.bytes" . | quote }}
{{- end }}
{{- with .pause }}
pin_pause: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The value of vLLM's --kv-transfer-config. */}}
{{- define "kvstow.connection" -}}
{{- $extra := include "kvstow.settings" . | fromYaml | merge (dict
      "cpu_bytes_to_use_per_rank" (include "kvstow.bytes" .Values.pool.size | int64)
      "lazy_offload" .Values.connector.lazyOffload
      "copy_strategy" .Values.pool.copyStrategy
      "admin_host" .Values.admin.host
      "admin_port" (.Values.admin.port | int)
    )
-}}
{{- with .Values.admin.readinessRequire }}{{ $_ := set $extra "readiness_require" . }}{{ end -}}
{{- /* max_bytes covers all ranks of one engine. */ -}}
{{- $ranks := mul .Values.parallel.tensor .Values.parallel.pipeline -}}
{{- with .Values.pool.maxSize }}{{ $_ := set $extra "max_bytes" (mul $ranks (include "kvstow.bytes" .)) }}{{ end -}}
{{- dict
      "kv_connector" "KVStowConnector"
      "kv_connector_module_path" "kvstow_service.connectors.vllm"
      "kv_role" "kv_both"
      "kv_load_failure_policy" "recompute"
      "kv_connector_extra_config" $extra
    | toJson -}}
{{- end -}}
