{{/* "true" if the release has a node service with a tier. */}}
{{- define "kvstow.hasTier" -}}
{{- if and .Values.tier.url (or (eq .Values.mode "node") (eq (include "kvstow.attached" .) "sidecar")) -}}true{{- end -}}
{{- end -}}

{{- define "kvstow.tierSettings" -}}
{{- if include "kvstow.hasTier" . }}
tier: {{ .Values.tier.url | quote }}
{{- end }}
{{- end -}}

{{/* Resources of the container with the tier's clients, beside CPUs and memory. */}}
{{- define "kvstow.tierResources" -}}
{{- if include "kvstow.hasTier" . }}{{ toYaml .Values.tier.rdma.resources }}{{ end -}}
{{- end -}}

{{/* "true" if the URL asks for RDMA. */}}
{{- define "kvstow.tierIsRdma" -}}
{{- if regexMatch "[?&]protocol=rdma(&|$)" .Values.tier.url }}true{{ end -}}
{{- end -}}
