{{/* "true" if the release has a node service with a tier. */}}
{{- define "kvstow.hasTier" -}}
{{- if and .Values.tier.url (or (eq .Values.mode "node") (eq (include "kvstow.attached" .) "sidecar")) -}}true{{- end -}}
{{- end -}}

{{/* The files of Secrets, and where they are mounted; empty without any. */}}
{{- define "kvstow.tierFiles" -}}
{{- with .Values.tier -}}
{{- with .passwordSecret }}{{ if .name }}
password_file: {{ printf "/etc/kvstow/tier-password/%s" .key }}
{{- end }}{{ end }}
{{- with .caSecret }}{{ if .name }}
ca_file: {{ printf "/etc/kvstow/tier-ca/%s" .key }}
{{- end }}{{ end }}
{{- if .certificateSecret }}
certificate_file: /etc/kvstow/tier-certificate/tls.crt
key_file: /etc/kvstow/tier-certificate/tls.key
{{- end }}
{{- end }}
{{- end -}}

{{/* The URL with all its options. */}}
{{- define "kvstow.tierUrl" -}}
{{- $options := include "kvstow.tierFiles" . | fromYaml -}}
{{- $separator := contains "?" .Values.tier.url | ternary "&" "?" -}}
{{- .Values.tier.url -}}
{{- range $name, $value := $options }}{{ $separator }}{{ $name }}={{ $value }}{{ $separator = "&" }}{{ end -}}
{{- end -}}

{{- define "kvstow.tierSettings" -}}
{{- if include "kvstow.hasTier" . }}
tier: {{ include "kvstow.tierUrl" . | quote }}
{{- end }}
{{- end -}}

{{/* The Secrets by the name of their volume. */}}
{{- define "kvstow.tierSecrets" -}}
{{- if include "kvstow.hasTier" . -}}
{{- with .Values.tier -}}
{{- with .passwordSecret.name }}
tier-password: {{ . }}
{{- end }}
{{- with .caSecret.name }}
tier-ca: {{ . }}
{{- end }}
{{- with .certificateSecret }}
tier-certificate: {{ . }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvstow.tierMounts" -}}
{{- range $folder, $_ := include "kvstow.tierSecrets" . | fromYaml }}
- {name: kvstow-{{ $folder }}, mountPath: /etc/kvstow/{{ $folder }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "kvstow.tierVolumes" -}}
{{- range $folder, $secret := include "kvstow.tierSecrets" . | fromYaml }}
- name: kvstow-{{ $folder }}
  secret:
    secretName: {{ $secret }}
    {{- include "kvstow.secretMode" $ }}
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
