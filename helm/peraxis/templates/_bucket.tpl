{{/* The registry as --registry takes it. */}}
{{- define "peraxis.registryPlace" -}}
{{- .Values.registry.s3.url | default "/registry" -}}
{{- end -}}

{{/* A registry in a bucket: what pods need in place of its volume. */}}
{{- define "peraxis.bucketEnv" -}}
{{- with .Values.registry.s3 -}}
{{- if .url -}}
{{- with .region }}
- name: AWS_REGION
  value: {{ . | quote }}
{{- end }}
{{- with .endpoint }}
- name: AWS_ENDPOINT_URL
  value: {{ . | quote }}
{{- if hasPrefix "http://" . }}
- name: AWS_ALLOW_HTTP
  value: "true"
{{- end }}
{{- end }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Gigabytes of the cache for objects: its size without what unfinished uploads may take in all HTTP processes. */}}
{{- define "peraxis.registryCacheGb" -}}
{{- $units := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $size := .Values.registry.s3.cache.size -}}
{{- $bytes := mulf (regexFind "^[0-9.]+" $size | float64) (get $units (regexFind "[A-Za-z]*$" $size) | float64) -}}
{{- subf (divf $bytes 1e9) (mulf 4 (.Values.settings.http_workers | default 1) (include "peraxis.maxUploadGb" . | float64)) | floor | int64 -}}
{{- end -}}

{{- define "peraxis.maxUploadGb" -}}
{{- .Values.settings.max_upload_gb | default 16 -}}
{{- end -}}

{{/* Ports at which servers reach the bucket, and without a Secret the service that gives them a role. */}}
{{- define "peraxis.bucketPorts" -}}
{{- $url := urlParse (.Values.registry.s3.endpoint | default "https://s3.amazonaws.com") -}}
{{- $port := regexFind "[0-9]+$" (regexFind ":[0-9]+$" $url.host) | default (ternary "80" "443" (eq $url.scheme "http")) -}}
{{- $ports := list $port -}}
{{- if not .Values.registry.s3.credentialsSecret -}}
{{- $ports = concat $ports (list "80" "443") | uniq -}}
{{- end -}}
{{- range $ports }}
- port: {{ . }}
  protocol: TCP
{{- end }}
{{- end -}}

{{- define "peraxis.checkedBucket" -}}
{{- $s3 := .Values.registry.s3 -}}
{{- if $s3.url -}}
{{- range $name := list "existingClaim" "subPath" -}}
{{- if get $.Values.registry $name -}}
{{- fail (printf "registry.s3.url and registry.%s are both set: the registry is in a bucket or on a volume, leave one of them empty" $name) -}}
{{- end -}}
{{- end -}}
{{- if .Values.ray.enabled -}}
{{- fail "registry.s3.url is set and ray.enabled true: replicas of Ray Serve need a registry on a volume" -}}
{{- end -}}
{{- if lt (include "peraxis.registryCacheGb" . | float64) (include "peraxis.maxUploadGb" . | float64) -}}
{{- fail (printf "registry.s3.cache.size is %s and settings.max_upload_gb %s: give the cache more than five times that, for a variant and unfinished uploads of each HTTP process" $s3.cache.size (include "peraxis.maxUploadGb" .)) -}}
{{- end -}}
{{- else -}}
{{- range $name := list "endpoint" "region" "credentialsSecret" -}}
{{- if get $s3 $name -}}
{{- fail (printf "registry.s3.%s is set and registry.s3.url empty: name the bucket, as s3://BUCKET/PREFIX" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
