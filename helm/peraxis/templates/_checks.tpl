{{/* Combinations that no single value is wrong in. Every template that makes pods includes this. */}}
{{- define "peraxis.checks" -}}
{{- $servers := include "peraxis.maxServers" . | int -}}
{{- if gt $servers 1 -}}
{{- if not (has "ReadWriteMany" .Values.registry.accessModes) -}}
{{- fail (printf "registry.accessModes is %v and there may be %d servers, on different nodes: give a volume with ReadWriteMany, or keep to one server" .Values.registry.accessModes $servers) -}}
{{- end -}}
{{- if not (or (has "ReadWriteMany" .Values.base.accessModes) (has "ReadOnlyMany" .Values.base.accessModes)) -}}
{{- fail (printf "base.accessModes is %v and there may be %d servers, on different nodes: give a volume with ReadWriteMany or ReadOnlyMany, or keep to one server" .Values.base.accessModes $servers) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.base.download.repository (not (or (has "ReadWriteMany" .Values.base.accessModes) (has "ReadWriteOnce" .Values.base.accessModes) (has "ReadWriteOncePod" .Values.base.accessModes))) -}}
{{- fail (printf "base.accessModes is %v and base.download.repository is set: a checkpoint cannot be fetched onto a volume that is read-only" .Values.base.accessModes) -}}
{{- end -}}
{{- if and (eq .Values.settings.auth "none") (not .Values.settings.allow_unauthenticated) -}}
{{- fail "settings.auth is none: any client that reaches the Service could use and delete every variant; take settings.auth keys, or settings.allow_unauthenticated true if something before the server authenticates its callers" -}}
{{- end -}}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) -}}
{{- fail "autoscaling.minReplicas is more than autoscaling.maxReplicas" -}}
{{- end -}}
{{- if gt (int .Values.ray.minWorkers) (int .Values.ray.maxWorkers) -}}
{{- fail "ray.minWorkers is more than ray.maxWorkers" -}}
{{- end -}}
{{- if and .Values.ray.enabled .Values.autoscaling.enabled -}}
{{- fail "autoscaling.enabled and ray.enabled are both true: Ray Serve scales its own replicas, set ray.minWorkers and ray.maxWorkers" -}}
{{- end -}}
{{- if and .Values.ray.enabled .Values.compressor.enabled -}}
{{- fail "compressor.enabled and ray.enabled are both true: the Job publishes to the StatefulSet's admin port; run `peraxis compress` and `peraxis push` yourself" -}}
{{- end -}}
{{- if and .Values.ray.enabled .Values.monitoring.serviceMonitor.enabled -}}
{{- fail "monitoring.serviceMonitor.enabled and ray.enabled are both true: the ServiceMonitor reads the StatefulSet's admin port, and docs/deploy/ray.md says what Ray's pods export" -}}
{{- end -}}
{{- if and .Values.ray.enabled .Values.monitoring.alerts.enabled -}}
{{- fail "monitoring.alerts.enabled and ray.enabled are both true: the alerts watch the StatefulSet's admin port, which does not exist" -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (not .Values.monitoring.serviceMonitor.enabled) -}}
{{- fail "autoscaling.enabled needs monitoring.serviceMonitor.enabled: without it Prometheus has no peraxis_num_requests_waiting to scale by" -}}
{{- end -}}
{{- if and (eq .Values.settings.auth "keys") (not (include "peraxis.adminKeySecret" .)) -}}
{{- if .Values.monitoring.serviceMonitor.enabled -}}
{{- fail "monitoring.serviceMonitor.enabled needs adminKey.secretName or adminKey.create: with settings.auth keys, /metrics asks for an admin key" -}}
{{- end -}}
{{- if .Values.compressor.enabled -}}
{{- fail "compressor.enabled needs adminKey.secretName or adminKey.create: with settings.auth keys, publishing asks for a key" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.adminKey.create (ne .Values.settings.auth "keys") -}}
{{- fail "adminKey.create is true and settings.auth none: a server without keys asks for none" -}}
{{- end -}}
{{- if .Values.compressor.enabled -}}
{{- if not .Values.compressor.variant -}}{{- fail "compressor.enabled needs compressor.variant, the name to publish as" -}}{{- end -}}
{{- if not .Values.compressor.finetune.existingClaim -}}{{- fail "compressor.enabled needs compressor.finetune.existingClaim, a claim with the fine-tuned checkpoint" -}}{{- end -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) -}}{{- fail "ingress.enabled needs ingress.hosts" -}}{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}{{- fail "httpRoute.enabled needs httpRoute.parentRefs, the Gateway that takes the route" -}}{{- end -}}
{{- end -}}
