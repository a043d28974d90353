{{/* The node service: "node" for the one that a release in mode node runs on each node, "sidecar" for one in vLLM's pod,
empty if vLLM embeds KVStow. */}}
{{- define "kvstow.attached" -}}
{{- if eq .Values.mode "node" -}}
{{- else if .Values.sidecar -}}
sidecar
{{- else if .Values.attach.node -}}
node
{{- end -}}
{{- end -}}

{{/* "true" if the pods that the release is about have an admin server. */}}
{{- define "kvstow.hasAdmin" -}}
{{- if ne (include "kvstow.attached" .) "node" -}}true{{- end -}}
{{- end -}}

{{/* In all pods; an engine opens no folder but this one. */}}
{{- define "kvstow.socketMount" -}}
{name: kvstow-socket, mountPath: /run/kvstow, readOnly: true}
{{- end -}}

{{/* As pods see it. A sidecar makes a folder of its own: everybody may write to an emptyDir. */}}
{{- define "kvstow.socketPath" -}}
/run/kvstow{{ if eq (include "kvstow.attached" .) "sidecar" }}/node{{ end }}/attach.sock
{{- end -}}

{{/* A folder, not the socket in it: a service that restarts makes another socket. Engines do not wait for the service, so
their pods make the folder too; mode node sets its owner. */}}
{{- define "kvstow.socketVolume" -}}
- name: kvstow-socket
  {{- if eq (include "kvstow.attached" .) "sidecar" }}
  emptyDir: {}
  {{- else }}
  hostPath:
    path: {{ .Values.socket.folder }}
    type: {{ .Values.socket.prepare | ternary "DirectoryOrCreate" "Directory" }}
  {{- end }}
{{- end -}}

{{/* Flags of `kvstow serve`. */}}
{{- define "kvstow.serviceArgs" -}}
{{- $service := .Values.service -}}
{{- $isNode := eq .Values.mode "node" -}}
- --host={{ .Values.admin.host }}
- --port={{ .Values.admin.port }}
{{- range $setting, $value := include "kvstow.serviceSettings" . | fromYaml }}
- --{{ $setting | replace "_" "-" }}={{ $value }}
{{- end }}
{{- if include "kvstow.hasTier" . }}
{{- range $name, $uids := .Values.tier.tenants }}
{{- $numbers := list }}
{{- range $uids }}{{ $numbers = append $numbers (toString (int64 .)) }}{{ end }}
- --tenant={{ $name }}={{ join "," $numbers }}
{{- end }}
{{- end }}
{{- include "kvstow.diskArgs" . }}
{{- if not .Values.pool.curve }}
- --no-curve
{{- end }}
- --memory={{ include "kvstow.bytes" $service.memory }}
- --attach-socket={{ include "kvstow.socketPath" . }}
{{- if $isNode }}
- --attach-group={{ int .Values.socket.group }}
{{- end }}
{{- with $service.keeper }}
{{- if .enabled }}
- --state=/var/lib/kvstow/state
- --no-start-keeper
{{- if .keepOnStop }}
- --keep-on-stop
{{- end }}
{{- end }}
{{- end }}
- --shutdown-delay={{ $isNode | ternary .Values.shutdown.delaySeconds 0 }}
- --drain-deadline={{ .Values.shutdown.drainSeconds }}
{{- with .Values.admin.readinessRequire }}
- --readiness-require={{ join "," . }}
{{- end }}
- --log-format=json
{{- with $service.args }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Container of `kvstow serve`. In vLLM's pod it is a native sidecar that neither vLLM's start nor its traffic waits for. */}}
{{- define "kvstow.serviceContainer" -}}
{{- $isNode := eq .Values.mode "node" -}}
{{- $scheme := include "kvstow.adminScheme" . | upper -}}
name: kvstow
image: {{ include "kvstow.image" (dict "root" . "name" "service") }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- if not $isNode }}
restartPolicy: Always
{{- end }}
command: [kvstow, serve]
args:
  {{- include "kvstow.serviceArgs" . | nindent 2 }}
env:
  {{- include "kvstow.ownClientEnv" . | nindent 2 }}
ports:
  {{- include "kvstow.adminPorts" . | trim | nindent 2 }}
{{- if $isNode }}
startupProbe:
  httpGet: {path: /startupz, port: kvstow, scheme: {{ $scheme }}}
  timeoutSeconds: 2
  periodSeconds: 2
  # Python's modules may come from a cold disk, or over the network, and a million blocks take 2 s to take up.
  failureThreshold: 30
{{- end }}
livenessProbe:
  httpGet: {path: /livez, port: kvstow, scheme: {{ $scheme }}}
  timeoutSeconds: 2
  periodSeconds: 10
  failureThreshold: 6
{{- if $isNode }}
readinessProbe:
  httpGet: {path: /readyz, port: kvstow, scheme: {{ $scheme }}}
  timeoutSeconds: 2
  periodSeconds: 5
{{- else if and (eq .Values.mode "engine") .Values.engine.probes.readinessPath }}
readinessProbe:
  httpGet: {path: {{ .Values.engine.probes.readinessPath }}, port: kvstow, scheme: {{ $scheme }}}
  timeoutSeconds: 2
  periodSeconds: 5
{{- end }}
resources:
  {{- include "kvstow.serviceResources" . | nindent 2 }}
securityContext:
  {{- include "kvstow.serviceSecurity" . | nindent 2 }}
volumeMounts:
  {{- include "kvstow.secretMounts" . | nindent 2 }}
  - {name: kvstow-tmp, mountPath: /tmp}
  - {name: kvstow-socket, mountPath: /run/kvstow}
  {{- with include "kvstow.diskMounts" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- if .Values.service.keeper.enabled }}
  - {name: kvstow-state, mountPath: /var/lib/kvstow}
  {{- end }}
  {{- if $isNode }}
  {{- with .Values.pod.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- end }}
{{- end -}}

{{/* "true" if the keeper has a DaemonSet of its own, "" if it is a sidecar of the service. */}}
{{- define "kvstow.keeperOnNode" -}}
{{- if and (eq .Values.mode "node") .Values.service.keeper.enabled (eq .Values.service.keeper.place "node") -}}true{{- end -}}
{{- end -}}

{{/* Container of the keeper. As a sidecar it starts before the service and ends after it. It holds the memory that the
service's container has populated, so it is charged nothing for that. */}}
{{- define "kvstow.keeperContainer" -}}
name: kvstow-keeper
image: {{ include "kvstow.image" (dict "root" . "name" "service") }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- if not (include "kvstow.keeperOnNode" .) }}
restartPolicy: Always
{{- end }}
command: [kvstow, keeper]
args: [--state=/var/lib/kvstow/state, --keep-timeout={{ .Values.service.keeper.timeoutSeconds }}s]
resources:
  {{- include "kvstow.keeperResources" . | nindent 2 }}
securityContext:
  {{- include "kvstow.serviceSecurity" . | nindent 2 }}
volumeMounts:
  - {name: kvstow-state, mountPath: /var/lib/kvstow}
{{- end -}}

{{- define "kvstow.keeperResources" -}}
{{- $keeper := .Values.service.keeper -}}
{{- $amounts := dict "cpu" (toString $keeper.cpu) "memory" $keeper.memory -}}
{{- toYaml (dict "requests" $amounts "limits" $amounts) -}}
{{- end -}}

{{- define "kvstow.serviceVolumes" -}}
{{ include "kvstow.secretVolumes" . }}
- name: kvstow-tmp
  emptyDir: {}
{{ include "kvstow.socketVolume" . }}
{{- include "kvstow.diskVolumes" . }}
{{- if .Values.service.keeper.enabled }}
{{ include "kvstow.stateVolume" . }}
{{- end }}
{{- end -}}

{{- define "kvstow.stateVolume" -}}
- name: kvstow-state
  {{- if include "kvstow.keeperOnNode" . }}
  hostPath:
    path: {{ .Values.service.keeper.folder }}
    type: {{ .Values.socket.prepare | ternary "DirectoryOrCreate" "Directory" }}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end -}}

{{/* Init container that gives folders of the node to the service. This is all that needs privileges: the kubelet makes
them for root. `name`, `command`, and `volumes`: the mount path of each. */}}
{{- define "kvstow.folderContainer" -}}
name: {{ .name }}
image: {{ include "kvstow.image" (dict "root" .root "name" "service") }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
command: [sh, -c, {{ .command | quote }}]
resources:
  {{- include "kvstow.keeperResources" .root | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  runAsNonRoot: false
  runAsUser: 0
  runAsGroup: 0
  capabilities:
    drop: [ALL]
    add: [CHOWN, FOWNER]
volumeMounts:
  {{- range $volume, $path := .volumes }}
  - {name: {{ $volume }}, mountPath: {{ $path }}}
  {{- end }}
{{- end -}}

{{- define "kvstow.makeState" -}}
mkdir -p /var/lib/kvstow/state && chown {{ int .Values.pod.user }} /var/lib/kvstow/state && chmod 0700 /var/lib/kvstow/state
{{- end -}}

{{/* Pods of mode addon are the user's, so each container states what the pod may not. */}}
{{- define "kvstow.serviceSecurity" -}}
{{ include "kvstow.containerSecurity" . }}
{{- if eq .Values.mode "addon" }}
runAsNonRoot: true
{{- with .Values.pod.user }}
runAsUser: {{ int . }}  # that of vLLM's container, unless it runs as root
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end }}
{{- end -}}
