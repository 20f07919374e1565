{{- define "peraxis.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 40 characters, so that names with suffixes stay within the 63 of a label. */}}
{{- define "peraxis.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "peraxis.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "peraxis.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "peraxis.adminService" -}}
{{ include "peraxis.fullname" . }}-admin
{{- end -}}

{{- define "peraxis.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "peraxis.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "peraxis.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "peraxis.instanceLabels" -}}
app.kubernetes.io/name: {{ include "peraxis.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* The servers, and no other pod of the release. */}}
{{- define "peraxis.serverLabels" -}}
{{ include "peraxis.instanceLabels" . }}
app.kubernetes.io/component: server
{{- end -}}

{{/* Labels of every object; the component is added where an object has one. */}}
{{- define "peraxis.labels" -}}
{{ include "peraxis.instanceLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* The most servers that may exist at a time. */}}
{{- define "peraxis.maxServers" -}}
{{- if .Values.ray.enabled -}}
{{- .Values.ray.maxWorkers | int -}}
{{- else if .Values.autoscaling.enabled -}}
{{- .Values.autoscaling.maxReplicas | int -}}
{{- else -}}
{{- .Values.replicaCount | int -}}
{{- end -}}
{{- end -}}

{{- define "peraxis.baseClaim" -}}
{{- .Values.base.existingClaim | default (printf "%s-base" (include "peraxis.fullname" .)) -}}
{{- end -}}

{{- define "peraxis.registryClaim" -}}
{{- .Values.registry.existingClaim | default (printf "%s-registry" (include "peraxis.fullname" .)) -}}
{{- end -}}

{{/* The Secret with the admin key; empty where there is none. */}}
{{- define "peraxis.adminKeySecret" -}}
{{- if .Values.adminKey.create -}}
{{- .Values.adminKey.secretName | default (printf "%s-admin-key" (include "peraxis.fullname" .)) -}}
{{- else -}}
{{- .Values.adminKey.secretName -}}
{{- end -}}
{{- end -}}

{{/* The Secret with the key that Prometheus sends; empty where there is none. */}}
{{- define "peraxis.metricsKeySecret" -}}
{{- if .Values.adminKey.create -}}
{{- .Values.metricsKey.secretName | default (printf "%s-metrics-key" (include "peraxis.fullname" .)) -}}
{{- else -}}
{{- .Values.metricsKey.secretName -}}
{{- end -}}
{{- end -}}

{{/* The Secret with the key that the compressor publishes with; empty where there is none. */}}
{{- define "peraxis.publishKeySecret" -}}
{{- if .Values.adminKey.create -}}
{{- .Values.publishKey.secretName | default (printf "%s-publish-key" (include "peraxis.fullname" .)) -}}
{{- else -}}
{{- .Values.publishKey.secretName -}}
{{- end -}}
{{- end -}}

{{/* Seconds that a server takes to end after SIGTERM: the drain, 5 s for the last bytes, and 15 s for its processes. */}}
{{- define "peraxis.shutdownSeconds" -}}
{{- add (ceil (.Values.settings.shutdown_timeout | default 30) | int) 20 -}}
{{- end -}}
