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

{{/* Admin servers of one pod: the node service has one, and so has each data-parallel engine that embeds KVStow. */}}
{{- define "kvstow.adminServers" -}}
{{- if or (eq .Values.mode "node") (eq (include "kvstow.attached" .) "sidecar") -}}
1
{{- else -}}
{{ .Values.parallel.data }}
{{- end -}}
{{- end -}}

{{/* Size of one rank's pool. The value is empty by default, so that a size which has no effect is noticed. */}}
{{- define "kvstow.poolSize" -}}
{{- .Values.pool.size | default "64Gi" -}}
{{- end -}}

{{/* Bytes of one rank's pool, at its maximum size. */}}
{{- define "kvstow.poolBytes" -}}
{{- max (include "kvstow.poolSize" . | include "kvstow.bytes") (include "kvstow.bytes" .Values.pool.maxSize) -}}
{{- end -}}

{{/* Reserved huge pages of vLLM's container, in Mi; each rank takes whole pages. Empty if its pools use other memory, or
none of it is its own. */}}
{{- define "kvstow.hugePages" -}}
{{- if and (eq .Values.memory.hugePages "reserved") (not (include "kvstow.attached" .)) -}}
{{- $pages := div (add (include "kvstow.poolBytes" .) 2097151) 2097152 -}}
{{- mul (include "kvstow.ranks" .) $pages 2 }}Mi
{{- end -}}
{{- end -}}

{{/* The same of the node service's container: never more than its memory. */}}
{{- define "kvstow.serviceHugePages" -}}
{{- if eq .Values.memory.hugePages "reserved" -}}
{{- mul (div (include "kvstow.bytes" .Values.service.memory) 2097152) 2 }}Mi
{{- end -}}
{{- end -}}

{{/* Bytes of a node service that the ranks of one pod map: what their engines may get. */}}
{{- define "kvstow.mappedBytes" -}}
{{- if .Values.attach.memory -}}
{{- mul .Values.parallel.data (include "kvstow.bytes" .Values.attach.memory) -}}
{{- else -}}
{{- include "kvstow.bytes" .Values.service.memory -}}
{{- end -}}
{{- end -}}

{{/* Memory of vLLM's container, in Mi: the formula of the comment on `memory` in values.yaml. */}}
{{- define "kvstow.memory" -}}
{{- $ranks := include "kvstow.ranks" . -}}
{{- $bytes := mul $ranks (include "kvstow.bytes" .Values.memory.overheadPerRank) -}}
{{- if include "kvstow.attached" . -}}
{{- $bytes = add $bytes (div (add (mul (include "kvstow.mappedBytes" .) .Values.memory.poolPercent) 99) 100) -}}
{{- else -}}
{{- $pool := include "kvstow.poolBytes" . -}}
{{- $bytes = add $bytes (mul $ranks (div (add (mul $pool .Values.memory.poolPercent) 99) 100)) -}}
{{- if eq .Values.memory.hugePages "advised" }}{{ $bytes = add $bytes (mul $ranks $pool) }}{{ end -}}
{{- end -}}
{{- $total := add $bytes (include "kvstow.sharedMemory" . | include "kvstow.bytes") -}}
{{- div (add $total 1048575) 1048576 }}Mi
{{- end -}}

{{/* Memory of the node service's container, in Mi. */}}
{{- define "kvstow.serviceMemory" -}}
{{- $bytes := include "kvstow.bytes" .Values.service.overhead -}}
{{- if eq .Values.memory.hugePages "advised" }}{{ $bytes = add $bytes (include "kvstow.bytes" .Values.service.memory) }}{{ end -}}
{{- div $bytes 1048576 }}Mi
{{- end -}}

{{- define "kvstow.sharedMemory" -}}
{{- if eq .Values.mode "engine" }}{{ .Values.engine.sharedMemory }}{{ end -}}
{{- end -}}

{{/* These sums, in words. */}}
{{- define "kvstow.memoryInWords" -}}
{{- if include "kvstow.attached" . -}}
{{ include "kvstow.ranks" . }} x {{ .Values.memory.overheadPerRank }} + {{ include "kvstow.mappedShareInWords" . }}
{{- else -}}
{{ include "kvstow.ranks" . }} x ({{ include "kvstow.poolShareInWords" . }} + {{ .Values.memory.overheadPerRank }})
{{- end -}}
{{- with include "kvstow.sharedMemory" . }} + {{ . }}{{ end -}}
{{- end -}}

{{- define "kvstow.serviceMemoryInWords" -}}
{{ if eq .Values.memory.hugePages "advised" }}{{ .Values.service.memory }} + {{ end }}{{ .Values.service.overhead }}
{{- end -}}

{{/* The share of a rank's pool in the sum of vLLM's container. */}}
{{- define "kvstow.poolShareInWords" -}}
{{- $size := .Values.pool.maxSize | default (include "kvstow.poolSize" .) -}}
{{- if eq .Values.memory.hugePages "reserved" -}}
{{ .Values.memory.poolPercent }} % of {{ $size }}
{{- else -}}
{{ $size }} + {{ .Values.memory.poolPercent }} %
{{- end -}}
{{- end -}}

{{/* The share of the memory that its ranks map. */}}
{{- define "kvstow.mappedShareInWords" -}}
{{ .Values.memory.poolPercent }} % of {{ with .Values.attach.memory }}{{ if gt (int $.Values.parallel.data) 1 }}{{ $.Values.parallel.data }} x {{ end }}{{ . }}{{ else }}{{ .Values.service.memory }}{{ end }}
{{- end -}}
