{{/* The part of the pod's spec that all pods of the chart share. */}}
{{- define "kvstow.podSpec" -}}
automountServiceAccountToken: false
serviceAccountName: {{ .Values.pod.serviceAccountName }}
# KVStow would read the variables that describe the namespace's Services as settings.
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  {{- include "kvstow.podSecurity" . | nindent 2 }}
{{- end -}}

{{/* The part that all serving pods share in addition. */}}
{{- define "kvstow.servingPodSpec" -}}
{{ include "kvstow.podSpec" . }}
terminationGracePeriodSeconds: {{ add .Values.shutdown.delaySeconds .Values.shutdown.drainSeconds 30 }}
{{- with .Values.pod.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.pod.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .Values.pod.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.pod.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.pod.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.pod.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "kvstow.podSecurity" -}}
runAsNonRoot: true
{{- with .Values.pod.user }}
runAsUser: {{ int . }}
runAsGroup: {{ int . }}
fsGroup: {{ int . }}
# Volumes of weights are large: leave what is right already.
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "kvstow.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Without versions: a new chart version must not restart pods, which would empty their caches. */}}
{{- define "kvstow.podMetadata" -}}
labels:
  {{- include "kvstow.podSelector" . | nindent 2 }}
  {{- with .Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with .Values.pod.labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Old pods stop before new ones start: a node has memory and GPUs for only one of them. */}}
{{- define "kvstow.strategy" -}}
type: RollingUpdate
rollingUpdate:
  maxSurge: 0
  maxUnavailable: 1
{{- end -}}

{{- define "kvstow.adminPorts" -}}
{{- range $engine := until (include "kvstow.adminServers" . | int) -}}
- name: {{ include "kvstow.portName" $engine }}
  containerPort: {{ add $.Values.admin.port $engine }}
{{ end -}}
{{- end -}}

{{/* request = limit; .gpus may be 0. */}}
{{- define "kvstow.resources" -}}
{{- $amounts := dict "cpu" (toString .cpu) "memory" (include "kvstow.memory" .root) -}}
{{- with include "kvstow.hugePages" .root }}{{ $_ := set $amounts "hugepages-2Mi" . }}{{ end -}}
{{- if .gpus }}{{ $_ := set $amounts .root.Values.engine.gpuResource (toString .gpus) }}{{ end -}}
{{- toYaml (dict "requests" $amounts "limits" $amounts) -}}
{{- end -}}
