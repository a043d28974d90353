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
{{- end -}}

{{/* The part that all serving pods share in addition. */}}
{{- define "kvstow.servingPodSpec" -}}
{{ include "kvstow.podSpec" . }}
securityContext:
  {{- include "kvstow.podSecurity" . | nindent 2 }}
  {{- if or (eq .Values.mode "node") (eq (include "kvstow.attached" .) "node") }}
  # The socket belongs to this group: the service may give it away, and engines may write to it.
  supplementalGroups: [{{ int .Values.socket.group }}]
  {{- end }}
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
{{- with .Values.pod.seLinuxOptions }}
seLinuxOptions:
  {{- toYaml . | nindent 2 }}
{{- end }}
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

{{/* request = limit in every container, so that the pod's QoS class is Guaranteed. This one is vLLM's. */}}
{{- define "kvstow.engineResources" -}}
{{- $engine := .Values.engine -}}
{{- $amounts := dict "cpu" (toString $engine.cpu) "memory" (include "kvstow.memory" .) $engine.gpuResource (include "kvstow.ranks" .) -}}
{{- with include "kvstow.hugePages" . }}{{ $_ := set $amounts "hugepages-2Mi" . }}{{ end -}}
{{- toYaml (dict "requests" $amounts "limits" $amounts) -}}
{{- end -}}

{{- define "kvstow.serviceResources" -}}
{{- $amounts := dict "cpu" (toString .Values.service.cpu) "memory" (include "kvstow.serviceMemory" .) -}}
{{- with include "kvstow.serviceHugePages" . }}{{ $_ := set $amounts "hugepages-2Mi" . }}{{ end -}}
{{- $amounts = merge $amounts (include "kvstow.tierResources" . | fromYaml) -}}
{{- toYaml (dict "requests" $amounts "limits" $amounts) -}}
{{- end -}}
