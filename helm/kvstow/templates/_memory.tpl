{{/* Bytes of a size such as 64Gi; 0 for an empty one. */}}
{{- define "kvstow.bytes" -}}
{{- $units := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- if . -}}
{{- mul (regexFind "^[0-9]+" . | int64) (index $units (regexFind "[KMGT]i$" .)) -}}
{{- else -}}
0
{{- end -}}
{{- end -}}

{{/* Ranks of one pod of vLLM. */}}
{{- define "kvstow.ranks" -}}
{{- mul .Values.parallel.tensor .Values.parallel.pipeline .Values.parallel.data -}}
{{- end -}}

{{/* Admin servers of one pod. */}}
{{- define "kvstow.adminServers" -}}
{{- ternary 1 (.Values.parallel.data | int) (eq .Values.mode "service") -}}
{{- end -}}

{{/* Bytes of one rank's pool, at its maximum size. */}}
{{- define "kvstow.poolBytes" -}}
{{- max (include "kvstow.bytes" .Values.pool.size) (include "kvstow.bytes" .Values.pool.maxSize) -}}
{{- end -}}

{{/* Reserved huge pages of one pod, in Mi; each rank takes whole pages, and the node service never more than its memory.
Empty if the pools use other memory. */}}
{{- define "kvstow.hugePages" -}}
{{- if eq .Values.memory.hugePages "reserved" -}}
{{- if eq .Values.mode "service" -}}
{{- mul (div (include "kvstow.bytes" .Values.service.memory) 2097152) 2 }}Mi
{{- else -}}
{{- $pages := div (add (include "kvstow.poolBytes" .) 2097151) 2097152 -}}
{{- mul (include "kvstow.ranks" .) $pages 2 }}Mi
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Memory of one pod, in Mi: the formula of the comment on `memory` in values.yaml, or on `service.overhead`. */}}
{{- define "kvstow.memory" -}}
{{- if eq .Values.mode "service" -}}
{{- $bytes := include "kvstow.bytes" .Values.service.overhead -}}
{{- if eq .Values.memory.hugePages "advised" }}{{ $bytes = add $bytes (include "kvstow.bytes" .Values.service.memory) }}{{ end -}}
{{- div $bytes 1048576 }}Mi
{{- else -}}
{{- $pool := include "kvstow.poolBytes" . -}}
{{- $percent := mul $pool .Values.memory.poolPercent -}}
{{- $perRank := add (div (add $percent 99) 100) (include "kvstow.bytes" .Values.memory.overheadPerRank) -}}
{{- if eq .Values.memory.hugePages "advised" }}{{ $perRank = add $perRank $pool }}{{ end -}}
{{- $total := add (mul (include "kvstow.ranks" .) $perRank) (include "kvstow.sharedMemory" . | include "kvstow.bytes") -}}
{{- div (add $total 1048575) 1048576 }}Mi
{{- end -}}
{{- end -}}

{{- define "kvstow.sharedMemory" -}}
{{- if eq .Values.mode "engine" }}{{ .Values.engine.sharedMemory }}{{ end -}}
{{- end -}}

{{/* The same sum, in words. */}}
{{- define "kvstow.memoryInWords" -}}
{{- if eq .Values.mode "service" -}}
{{ if eq .Values.memory.hugePages "advised" }}{{ .Values.service.memory }} + {{ end }}{{ .Values.service.overhead }}
{{- else -}}
{{ include "kvstow.ranks" . }} x ({{ include "kvstow.poolShareInWords" . }} + {{ .Values.memory.overheadPerRank }})
{{- with include "kvstow.sharedMemory" . }} + {{ . }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* The share of a rank's pool in that sum. */}}
{{- define "kvstow.poolShareInWords" -}}
{{- $size := .Values.pool.maxSize | default .Values.pool.size -}}
{{- if eq .Values.memory.hugePages "reserved" -}}
{{ .Values.memory.poolPercent }} % of {{ $size }}
{{- else -}}
{{ $size }} + {{ .Values.memory.poolPercent }} %
{{- end -}}
{{- end -}}
