{{/* A setting as the environment holds it. Numbers of YAML are floats here, and 1000000 would become 1e+06. */}}
{{- define "peraxis.settingText" -}}
{{- if kindIs "map" . -}}
{{- toJson . -}}
{{- else if and (kindIs "float64" .) (eq (floor .) (float64 .)) -}}
{{- int64 . -}}
{{- else -}}
{{- toString . -}}
{{- end -}}
{{- end -}}

{{/* The settings of `peraxis serve` as environment variables. Paths, host and ports are the chart's. */}}
{{- define "peraxis.settingsEnv" -}}
- name: PERAXIS_BASE
  value: /base
- name: PERAXIS_REGISTRY
  value: {{ include "peraxis.registryPlace" . | quote }}
{{- if .Values.registry.s3.url }}
- name: PERAXIS_REGISTRY_CACHE
  value: /registry
- name: PERAXIS_REGISTRY_CACHE_GB
  value: {{ include "peraxis.registryCacheGb" . | quote }}
{{- end }}
- name: PERAXIS_HOST
  value: "0.0.0.0"
- name: PERAXIS_PORT
  value: "8080"
- name: PERAXIS_ADMIN_PORT
  value: "9090"
{{- $settings := merge (deepCopy .Values.settings) (dict "device" (ternary "cuda" "cpu" .Values.gpu.enabled)) -}}
{{- range $name := keys $settings | sortAlpha }}
- name: PERAXIS_{{ upper $name }}
  value: {{ include "peraxis.settingText" (get $settings $name) | quote }}
{{- end }}
{{- end -}}
