{{/* "true" if the release has a node service with disks. */}}
{{- define "kvstow.hasDisk" -}}
{{- if and .Values.disk.volume (or (eq .Values.mode "node") (eq (include "kvstow.attached" .) "sidecar")) -}}true{{- end -}}
{{- end -}}

{{/* Where each disk is mounted, by the name of its volume. */}}
{{- define "kvstow.disks" -}}
{{- if include "kvstow.hasDisk" . -}}
{{- if eq .Values.disk.volume "ephemeral" }}
kvstow-disk-0: /var/lib/kvstow-disk/0
{{- else }}
{{- range $index, $_ := .Values.disk.paths }}
kvstow-disk-{{ $index }}: /var/lib/kvstow-disk/{{ $index }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvstow.diskArgs" -}}
{{- range $_, $path := include "kvstow.disks" . | fromYaml }}
- --disk={{ $path }}
{{- end }}
{{- if include "kvstow.hasDisk" . }}
{{- with .Values.disk.size }}
- --disk-size={{ include "kvstow.bytes" . }}
{{- end }}
{{- with .Values.disk.writesPerDay }}
- --disk-writes={{ include "kvstow.bytes" . }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvstow.diskMounts" -}}
{{- range $name, $path := include "kvstow.disks" . | fromYaml }}
- {name: {{ $name }}, mountPath: {{ $path }}}
{{- end }}
{{- end -}}

{{/* The limit of an emptyDir has room for the records beside the data. */}}
{{- define "kvstow.diskVolumes" -}}
{{- if include "kvstow.hasDisk" . }}
{{- if eq .Values.disk.volume "ephemeral" }}
- name: kvstow-disk-0
  emptyDir:
    sizeLimit: {{ add (div (mul (include "kvstow.bytes" .Values.disk.size | int64) 21) 20) 268435456 | toString | quote }}
{{- else }}
{{- range $index, $path := .Values.disk.paths }}
- name: kvstow-disk-{{ $index }}
  hostPath:
    path: {{ $path }}
    type: Directory
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Makes the service's folder on each disk of the node. */}}
{{- define "kvstow.makeDisks" -}}
{{- range $_, $path := include "kvstow.disks" . | fromYaml }} && mkdir -p {{ $path }}/kvstow && chown {{ int $.Values.pod.user }} {{ $path }}/kvstow && chmod 0700 {{ $path }}/kvstow
{{- end }}
{{- end -}}
