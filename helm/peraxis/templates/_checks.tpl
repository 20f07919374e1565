{{/* Combinations that no single value is wrong in. Every template that makes pods includes this. */}}
{{- define "peraxis.checks" -}}
{{- include "peraxis.checkedExtras" . -}}
{{- include "peraxis.checkedBucket" . -}}
{{- $servers := include "peraxis.maxServers" . | int -}}
{{- if gt $servers 1 -}}
{{- if not (or .Values.registry.s3.url (has "ReadWriteMany" .Values.registry.accessModes)) -}}
{{- fail (printf "registry.accessModes is %v and there may be %d servers, on different nodes: give a volume with ReadWriteMany, or keep to one server" .Values.registry.accessModes $servers) -}}
{{- end -}}
{{- if not (or (has "ReadWriteMany" .Values.base.accessModes) (has "ReadOnlyMany" .Values.base.accessModes)) -}}
{{- fail (printf "base.accessModes is %v and there may be %d servers, on different nodes: give a volume with ReadWriteMany or ReadOnlyMany, or keep to one server" .Values.base.accessModes $servers) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.base.download.repository (not (or (has "ReadWriteMany" .Values.base.accessModes) (has "ReadWriteOnce" .Values.base.accessModes) (has "ReadWriteOncePod" .Values.base.accessModes))) -}}
{{- fail (printf "base.accessModes is %v and base.download.repository is set: a checkpoint cannot be fetched onto a volume that is read-only" .Values.base.accessModes) -}}
{{- end -}}
{{- if not (or .Values.registry.s3.url (has "ReadWriteMany" .Values.registry.accessModes) (has "ReadWriteOnce" .Values.registry.accessModes) (has "ReadWriteOncePod" .Values.registry.accessModes)) -}}
{{- fail (printf "registry.accessModes is %v: servers publish onto this volume, so that it cannot be read-only" .Values.registry.accessModes) -}}
{{- end -}}
{{- if and (eq (join "" .Values.base.accessModes) "ReadOnlyMany") (not .Values.base.existingClaim) -}}
{{- fail "base.accessModes is [ReadOnlyMany] and base.existingClaim empty: the volume of a new claim is empty, and no pod could copy a checkpoint onto it; name a claim that has one, or give ReadWriteOnce or ReadWriteMany" -}}
{{- end -}}
{{- if and .Values.base.existingClaim (eq .Values.base.existingClaim .Values.registry.existingClaim) (eq .Values.base.subPath .Values.registry.subPath) -}}
{{- fail (printf "base.existingClaim and registry.existingClaim are both %s: give base.subPath and registry.subPath, two directories of it" .Values.base.existingClaim) -}}
{{- end -}}
{{- if and .Values.base.download.tokenSecretName (not .Values.base.download.repository) -}}
{{- fail "base.download.tokenSecretName is set and base.download.repository empty: name the repository to fetch" -}}
{{- end -}}
{{- if and .Values.gpu.enabled (eq (.Values.settings.device | default "") "cpu") -}}
{{- fail "gpu.enabled is true and settings.device cpu: the server would hold a GPU that it does not use" -}}
{{- end -}}
{{- if and (not .Values.gpu.enabled) (not .Values.resources.claims) (eq (.Values.settings.device | default "") "cuda") -}}
{{- fail "settings.device is cuda and gpu.enabled false: the pod would have no GPU" -}}
{{- end -}}
{{- with .Values.monitoring.serviceMonitor -}}
{{- if gt (include "peraxis.milliseconds" .scrapeTimeout | int) (include "peraxis.milliseconds" .interval | int) -}}
{{- fail (printf "monitoring.serviceMonitor.scrapeTimeout is %s and monitoring.serviceMonitor.interval %s: Prometheus takes no timeout above the interval" .scrapeTimeout .interval) -}}
{{- end -}}
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
{{- if and .Values.autoscaling.enabled (hasKey .Values.settings "max_num_seqs") (ge (int .Values.autoscaling.runningRequests) (int .Values.settings.max_num_seqs)) -}}
{{- fail (printf "autoscaling.runningRequests is %d and settings.max_num_seqs %d: a server never runs more, so that running requests would add no server; give less" (int .Values.autoscaling.runningRequests) (int .Values.settings.max_num_seqs)) -}}
{{- end -}}
{{- if and .Values.ray.enabled (ne (int .Values.replicaCount) 1) -}}
{{- fail (printf "ray.enabled is true and replicaCount %d: Ray has no StatefulSet, set ray.minWorkers and ray.maxWorkers" (int .Values.replicaCount)) -}}
{{- end -}}
{{- if and .Values.ray.enabled .Values.cache.persistent -}}
{{- fail "ray.enabled and cache.persistent are both true: pods of Ray have no claims of their own, leave cache.persistent false" -}}
{{- end -}}
{{- if and .Values.ray.enabled .Values.shm.size -}}
{{- fail "ray.enabled is true and shm.size set: pods of Ray have ray.shmSize" -}}
{{- end -}}
{{- if and .Values.settings.engine_python (eq (.Values.settings.backend | default "") "native") -}}
{{- fail "settings.engine_python is set and settings.backend native: set settings.backend vllm" -}}
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
{{- if eq .Values.settings.auth "keys" -}}
{{- if and .Values.monitoring.serviceMonitor.enabled (not (include "peraxis.metricsKeySecret" .)) -}}
{{- fail "monitoring.serviceMonitor.enabled needs metricsKey.secretName or adminKey.create: with settings.auth keys, /metrics asks for a key of the role metrics" -}}
{{- end -}}
{{- if and .Values.compressor.enabled (not (include "peraxis.publishKeySecret" .)) -}}
{{- fail "compressor.enabled needs publishKey.secretName or adminKey.create: with settings.auth keys, publishing asks for a key of the role publish" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.adminKey.create (ne .Values.settings.auth "keys") -}}
{{- fail "adminKey.create is true and settings.auth none: a server without keys asks for none" -}}
{{- end -}}
{{- if and (not .Values.ray.enabled) (not .Values.autoscaling.enabled) (eq (int .Values.replicaCount) 0) -}}
{{- if .Values.adminKey.create -}}{{- fail "adminKey.create is true and replicaCount 0: the Job runs beside a server, turn it on when there is one" -}}{{- end -}}
{{- if .Values.compressor.enabled -}}{{- fail "compressor.enabled is true and replicaCount 0: the Job publishes to a server, turn it on when there is one" -}}{{- end -}}
{{- end -}}
{{- if .Values.compressor.enabled -}}
{{- if eq .Values.compressor.variant "base" -}}{{- fail "compressor.variant is base, which names the base in requests: take another name" -}}{{- end -}}
{{- if not .Values.compressor.variant -}}{{- fail "compressor.enabled needs compressor.variant, the name to publish as" -}}{{- end -}}
{{- if not .Values.compressor.finetune.existingClaim -}}{{- fail "compressor.enabled needs compressor.finetune.existingClaim, a claim with the fine-tuned checkpoint" -}}{{- end -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) -}}{{- fail "ingress.enabled needs ingress.hosts" -}}{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}{{- fail "httpRoute.enabled needs httpRoute.parentRefs, the Gateway that takes the route" -}}{{- end -}}
{{- end -}}

{{/* A duration such as 15s or 1m as a number. */}}
{{- define "peraxis.milliseconds" -}}
{{- $factors := dict "ms" 1 "s" 1000 "m" 60000 "h" 3600000 -}}
{{- mul (regexFind "^[0-9]+" . | int64) (get $factors (regexFind "[a-z]+$" .)) -}}
{{- end -}}

{{/* Names that the operator adds to those of the chart. */}}
{{- define "peraxis.checkedExtras" -}}
{{- range $name := keys .Values.podLabels -}}
{{- if has $name (list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component") -}}
{{- fail (printf "podLabels has %s, by which Services find the pods: take another label" $name) -}}
{{- end -}}
{{- end -}}
{{- $environment := concat (include "peraxis.scratchEnv" . | fromYamlArray) (include "peraxis.bucketEnv" . | fromYamlArray) -}}
{{- range $given := .Values.extraEnv -}}
{{- range $environment -}}
{{- if eq $given.name .name -}}
{{- fail (printf "extraEnv has %s, which the chart sets%s" .name (ternary ": give ompNumThreads" "" (eq .name "OMP_NUM_THREADS"))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $volumes := list "base" "registry" "cache" "tmp" "shm" -}}
{{- range .Values.extraVolumes -}}
{{- if has .name $volumes -}}{{- fail (printf "extraVolumes names %s twice, or as the chart does: take another name" .name) -}}{{- end -}}
{{- $volumes = append $volumes .name -}}
{{- end -}}
{{- range .Values.extraVolumeMounts -}}
{{- if not (has .name $volumes) -}}{{- fail (printf "extraVolumeMounts names the volume %s: extraVolumes has none of this name" .name) -}}{{- end -}}
{{- end -}}
{{- range $name, $path := dict "base.subPath" .Values.base.subPath "registry.subPath" .Values.registry.subPath "compressor.finetune.subPath" .Values.compressor.finetune.subPath -}}
{{- if has ".." (splitList "/" $path) -}}{{- fail (printf "%s is %s: Kubernetes mounts no path with .. in it" $name $path) -}}{{- end -}}
{{- end -}}
{{- range .Values.compressor.args -}}
{{- if regexMatch "^--(base|finetune|out)(=|$)" . -}}{{- fail (printf "compressor.args has %s, which the chart gives: name the claims in base and compressor.finetune" .) -}}{{- end -}}
{{- end -}}
{{- end -}}
