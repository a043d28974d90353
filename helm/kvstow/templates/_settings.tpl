{{/* Settings of the host of the cache, with the same names in `kvstow serve` and the connector. All are text. */}}
{{- define "kvstow.hostSettings" -}}
{{ include "kvstow.adminFiles" . }}
policy: {{ .Values.pool.policy }}
transfer_timeout: {{ .Values.pool.transferTimeoutSeconds }}s
{{- if ne .Values.memory.hugePages "advised" }}
huge_pages: {{ .Values.memory.hugePages }}
{{- end }}
{{- end -}}

{{/* The pace of pinning: in mode node, of populating. */}}
{{- define "kvstow.paceSettings" -}}
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

{{/* Of `kvstow serve`. A sidecar populates at its own pace; the pace of pinning is vLLM's. */}}
{{- define "kvstow.serviceSettings" -}}
{{ include "kvstow.hostSettings" . }}
{{- include "kvstow.tierSettings" . }}
{{- if eq .Values.mode "node" }}
{{ include "kvstow.paceSettings" . }}
{{- end }}
{{- end -}}

{{/* The value of vLLM's --kv-transfer-config. */}}
{{- define "kvstow.connection" -}}
{{- $extra := merge (dict "lazy_offload" .Values.connector.lazyOffload "copy_strategy" .Values.pool.copyStrategy
      "load_path" .Values.connector.loadPath "load_step_budget" .Values.connector.loadStepBudget)
      (include "kvstow.paceSettings" . | fromYaml)
-}}
{{- if include "kvstow.attached" . -}}
{{- $_ := set $extra "attach" (printf "unix://%s" (include "kvstow.socketPath" .)) -}}
{{- with .Values.attach.memory }}{{ $_ := set $extra "cpu_bytes_to_use" (include "kvstow.bytes" . | int64) }}{{ end -}}
{{- with .Values.attach.weightsId }}{{ $_ := set $extra "weights_id" . }}{{ end -}}
{{- if .Values.attach.requireSharing }}{{ $_ := set $extra "attach_require_sharing" true }}{{ end -}}
{{- else -}}
{{- $extra = merge $extra (include "kvstow.hostSettings" . | fromYaml) (dict
      "cpu_bytes_to_use_per_rank" (include "kvstow.poolSize" . | include "kvstow.bytes" | int64)
      "admin_host" .Values.admin.host
      "admin_port" (.Values.admin.port | int)
    )
-}}
{{- if not .Values.pool.curve }}{{ $_ := set $extra "curve" false }}{{ end -}}
{{- with .Values.admin.readinessRequire }}{{ $_ := set $extra "readiness_require" . }}{{ end -}}
{{- /* max_bytes covers all ranks of one engine. */ -}}
{{- $ranks := mul .Values.parallel.tensor .Values.parallel.pipeline -}}
{{- with .Values.pool.maxSize }}{{ $_ := set $extra "max_bytes" (mul $ranks (include "kvstow.bytes" .)) }}{{ end -}}
{{- end -}}
{{- dict
      "kv_connector" "KVStowConnector"
      "kv_connector_module_path" "kvstow_service.connectors.vllm"
      "kv_role" "kv_both"
      "kv_load_failure_policy" "recompute"
      "kv_connector_extra_config" $extra
    | toJson -}}
{{- end -}}
