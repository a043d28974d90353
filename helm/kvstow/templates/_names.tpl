{{- define "kvstow.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 50 characters, so that suffixes fit into a DNS label. */}}
{{- define "kvstow.fullname" -}}
{{- $name := include "kvstow.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvstow.labels" -}}
app.kubernetes.io/name: {{ include "kvstow.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels that select the pods with KVStow. A Deployment can never change them. */}}
{{- define "kvstow.podSelector" -}}
{{- if ne .Values.mode "addon" -}}
app.kubernetes.io/name: {{ include "kvstow.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: {{ .Values.mode }}
{{- else if .Values.addon.podLabels -}}
{{ toYaml .Values.addon.podLabels }}
{{- else -}}
kvstow-connection: {{ include "kvstow.fullname" . }}
{{- end -}}
{{- end -}}

{{- define "kvstow.keeperSelector" -}}
app.kubernetes.io/name: {{ include "kvstow.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: keeper
{{- end -}}

{{- define "kvstow.testSelector" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: test
{{- end -}}

{{/* Name of the port of admin server number `engine`, as containers declare it. */}}
{{- define "kvstow.portName" -}}
kvstow{{ if . }}-{{ . }}{{ end }}
{{- end -}}

{{/* Full reference of .Values.image[.name]. */}}
{{- define "kvstow.image" -}}
{{- $image := index .root.Values.image .name -}}
{{- $path := printf "%s/%s" (trimSuffix "/" .root.Values.image.registry) $image.repository -}}
{{- if $image.digest -}}
{{ $path }}@{{ $image.digest }}
{{- else -}}
{{ $path }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* "true" if .enabled says so, or if it is auto and the cluster has the Prometheus operator's API. */}}
{{- define "kvstow.monitored" -}}
{{- if eq (toString .enabled) "auto" -}}
{{- if .root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1" -}}true{{- end -}}
{{- else if .enabled -}}
true
{{- end -}}
{{- end -}}
