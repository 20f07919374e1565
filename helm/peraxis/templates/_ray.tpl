{{/* The pod of a Ray node. Needs a dict of `root`, `container`, `resources`, `gpu` and `isHead`. */}}
{{- define "peraxis.rayPod" -}}
{{- $root := .root -}}
metadata:
  labels:
    {{- include "peraxis.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ ternary "ray-head" "server" .isHead }}
    {{- with $root.Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $root.Values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- if and .isHead $root.Values.ray.autoscaler }}
  # KubeRay gives the head an account of its own, with which the autoscaler changes the number of workers.
  {{- include "peraxis.podSecurity" $root | nindent 2 }}
  {{- else }}
  {{- include "peraxis.podAccount" $root | nindent 2 }}
  {{- include "peraxis.podSecurity" $root | nindent 2 }}
  {{- end }}
  {{- with include "peraxis.placement" (dict "root" $root "gpu" .gpu) | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- if not .isHead }}
  {{- with include "peraxis.spread" $root | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  terminationGracePeriodSeconds: {{ include "peraxis.shutdownSeconds" $root }}
  {{- if $root.Values.base.download.repository }}
  initContainers:
    {{- include "peraxis.download" $root | nindent 4 }}
  {{- end }}
  {{- end }}
  containers:
    - name: {{ .container }}
      image: {{ include "peraxis.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      env:
        - name: RAY_USAGE_STATS_ENABLED
          value: "0"
        # Ray Serve has one port, and the image names another for administration.
        - name: PERAXIS_ADMIN_PORT
          value: ""
        {{- include "peraxis.scratchEnv" $root | nindent 8 }}
        {{- with $root.Values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- if .isHead }}
        - name: gcs-server
          containerPort: 6379
        - name: dashboard
          containerPort: 8265
        {{- end }}
        - name: serve
          containerPort: 8000
      # KubeRay's own probes run wget, which the image does not have.
      livenessProbe:
        httpGet:
          path: /api/healthz
          port: 52365
        initialDelaySeconds: 30
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 12
      readinessProbe:
        httpGet:
          {{- if .isHead }}
          path: /api/healthz
          port: 52365
          {{- else }}
          path: /-/healthz
          port: serve
          {{- end }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      securityContext:
        {{- include "peraxis.containerSecurity" $root | nindent 8 }}
      resources:
        {{- include "peraxis.resources" . | nindent 8 }}
      volumeMounts:
        {{- include "peraxis.baseMount" $root | nindent 8 }}
        {{- include "peraxis.registryMount" $root | nindent 8 }}
        {{- include "peraxis.scratchMounts" $root | nindent 8 }}
        - name: shm
          mountPath: /dev/shm
        {{- with $root.Values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- include "peraxis.dataVolumes" $root | nindent 4 }}
    {{- include "peraxis.tmpVolume" $root | nindent 4 }}
    {{- include "peraxis.cacheVolume" $root | nindent 4 }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $root.Values.ray.shmSize }}
    {{- with $root.Values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Serve's configuration file: the application, the settings that it is built from, and its deployments. */}}
{{- define "peraxis.serveConfig" -}}
{{- $args := dict "base" "/base" "registry" "/registry" "device" (ternary "cuda" "cpu" .Values.gpu.enabled) -}}
{{- /* Not `merge`, which takes 0 and false for values that are missing. */}}
{{- range $given := list .Values.settings .Values.ray.args }}
{{- range $name, $value := $given }}
{{- $_ := set $args $name $value }}
{{- end }}
{{- end -}}
http_options:
  host: 0.0.0.0
  port: 8000
applications:
  - name: {{ include "peraxis.fullname" . }}
    import_path: {{ .Values.ray.importPath }}
    route_prefix: /
    args:
      {{- range $name := keys $args | sortAlpha }}
      {{- $value := get $args $name }}
      {{ $name }}: {{ if and (kindIs "float64" $value) (eq (floor $value) $value) }}{{ int64 $value }}{{ else }}{{ toJson $value }}{{ end }}
      {{- end }}
    deployments:
      {{- $given := list }}
      {{- range .Values.ray.deployments }}
      {{- $given = append $given .name }}
      {{- end }}
      {{- range $own := include "peraxis.serveDeployments" . | fromYamlArray }}
      {{- if not (has $own.name $given) }}
      - {{- toYaml $own | nindent 8 }}
      {{- end }}
      {{- end }}
      {{- with .Values.ray.deployments }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
{{- end -}}

{{/* The application's deployments, as far as the chart knows better: one engine for each pod, and how many pods. */}}
{{- define "peraxis.serveDeployments" -}}
{{- $target := .Values.ray.targetOngoingRequests | int }}
- name: Engine
  num_replicas: auto
  max_replicas_per_node: 1
  # With those of the other deployments, a pod of one CPU has room.
  ray_actor_options:
    num_cpus: 0.5
    num_gpus: {{ ternary 1 0 .Values.gpu.enabled }}
  autoscaling_config:
    min_replicas: {{ .Values.ray.minWorkers | int }}
    max_replicas: {{ .Values.ray.maxWorkers | int }}
    # Requests above what an engine runs at a time are those that wait.
    target_ongoing_requests: {{ if $target }}{{ $target }}{{ else }}{{ .Values.settings.max_num_seqs | default 64 | int }}{{ end }}
    upscale_delay_s: {{ .Values.ray.scaleUpSeconds | int }}
    downscale_delay_s: {{ .Values.ray.scaleDownSeconds | int }}
  request_router_config:
    request_router_class: server.scale.request_router.VariantRequestRouter
    request_routing_stats_period_s: 0.25
# Above 0, which would also fit the head.
- name: Ingress
  num_replicas: {{ .Values.ray.ingressReplicas | int }}
  ray_actor_options:
    num_cpus: 0.1
- name: Shared
  ray_actor_options:
    num_cpus: 0.1
{{- end -}}
