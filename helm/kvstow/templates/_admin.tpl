{{/* Name of the Service of the admin servers. */}}
{{- define "kvstow.adminService" -}}
{{ include "kvstow.fullname" . }}-admin
{{- end -}}

{{/* The name in a certificate: that of the Service. Clients that know a pod only by address verify it too. */}}
{{- define "kvstow.adminHost" -}}
{{ include "kvstow.adminService" . }}.{{ .Release.Namespace }}.svc
{{- end -}}

{{- define "kvstow.adminScheme" -}}
{{ empty .Values.admin.tls.secretName | ternary "http" "https" }}
{{- end -}}

{{- define "kvstow.tokenSecret" -}}
{{- .Values.admin.tokenSecret.name | default (printf "%s-token" (include "kvstow.fullname" .)) -}}
{{- end -}}

{{/* Files of the admin server, under their names in `kvstow serve` and the connector. */}}
{{- define "kvstow.adminFiles" -}}
{{- $admin := .Values.admin -}}
token_file: /etc/kvstow/token/{{ $admin.tokenSecret.key }}
{{- if $admin.guardReading }}
viewer_token_file: /etc/kvstow/token/{{ $admin.tokenSecret.viewerKey }}
{{- end }}
{{- if $admin.tls.secretName }}
tls_cert: /etc/kvstow/tls/tls.crt
tls_key: /etc/kvstow/tls/tls.key
{{- end }}
{{- if $admin.tls.clientCa.secretName }}
tls_client_ca: /etc/kvstow/client-ca/{{ $admin.tls.clientCa.key }}
{{- end }}
{{- end -}}

{{/* Secrets of the process with the cache: those of the admin server and of the tier. */}}
{{- define "kvstow.secretMounts" -}}
- {name: kvstow-token, mountPath: /etc/kvstow/token, readOnly: true}
{{- if .Values.admin.tls.secretName }}
- {name: kvstow-tls, mountPath: /etc/kvstow/tls, readOnly: true}
{{- end }}
{{- if .Values.admin.tls.clientCa.secretName }}
- {name: kvstow-client-ca, mountPath: /etc/kvstow/client-ca, readOnly: true}
{{- end }}
{{- end -}}

{{/* Secrets are readable by the pod's fsGroup, which is set with its user, and not by other users. */}}
{{- define "kvstow.secretMode" -}}
{{- if and .Values.pod.user (ne .Values.mode "addon") }}
    defaultMode: 0440
{{- end }}
{{- end -}}

{{- define "kvstow.secretVolumes" -}}
- name: kvstow-token
  secret:
    secretName: {{ include "kvstow.tokenSecret" . }}
    {{- include "kvstow.secretMode" . }}
{{- with .Values.admin.tls.secretName }}
- name: kvstow-tls
  secret:
    secretName: {{ . }}
    {{- include "kvstow.secretMode" $ }}
{{- end }}
{{- with .Values.admin.tls.clientCa.secretName }}
- name: kvstow-client-ca
  secret:
    secretName: {{ . }}
{{- end }}
{{- end -}}

{{/* Environment of the command line for the server at .host; .tokenFile may be empty. */}}
{{- define "kvstow.clientEnv" -}}
- name: KVSTOW_SERVER
  value: {{ include "kvstow.adminScheme" .root }}://{{ .host }}:{{ .root.Values.admin.port }}
{{- with .tokenFile }}
- name: KVSTOW_TOKEN_FILE
  value: {{ . }}
{{- end }}
{{- if and .root.Values.admin.tls.secretName .root.Values.admin.tls.caKey }}
- name: KVSTOW_CA_FILE
  value: /etc/kvstow/tls/{{ .root.Values.admin.tls.caKey }}
{{- end }}
{{- end -}}

{{/* For `kubectl exec POD -- kvstow ...`, including changes. */}}
{{- define "kvstow.ownClientEnv" -}}
{{- $token := get (include "kvstow.adminFiles" . | fromYaml) "token_file" -}}
{{- include "kvstow.clientEnv" (dict "root" . "host" "localhost" "tokenFile" $token) -}}
{{- end -}}
