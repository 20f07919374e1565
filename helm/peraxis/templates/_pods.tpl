{{/* What every pod of the chart has in common. The Pod Security Standard "restricted" admits it. */}}
{{- define "peraxis.podBasics" -}}
{{ include "peraxis.podAccount" . }}
{{ include "peraxis.podSecurity" . }}
{{- end -}}

{{- define "peraxis.podAccount" -}}
serviceAccountName: {{ include "peraxis.serviceAccount" . }}
# The pod does not talk to the Kubernetes API.
automountServiceAccountToken: false
{{- end -}}

{{- define "peraxis.podSecurity" -}}
# The variables that Kubernetes makes of a Service named peraxis, such as PERAXIS_PORT, would be read as settings.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  {{- with .Values.podSecurityContext }}
  {{- if .runAsUser }}
  runAsUser: {{ .runAsUser | int64 }}
  {{- end }}
  {{- if .runAsGroup }}
  runAsGroup: {{ .runAsGroup | int64 }}
  {{- end }}
  {{- if .fsGroup }}
  fsGroup: {{ .fsGroup | int64 }}
  # A change of every file's mode takes minutes on a large registry, and would make the cache writable by the group,
  # which the server does not trust.
  fsGroupChangePolicy: OnRootMismatch
  {{- end }}
  {{- end }}
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Where pods run. Needs a dict of `root` and `gpu`. */}}
{{- define "peraxis.placement" -}}
{{- with .root.Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if or .gpu .root.Values.tolerations }}
tolerations:
  {{- if .gpu }}
  - key: {{ .root.Values.gpu.resourceName }}
    operator: Exists
    effect: NoSchedule
  {{- end }}
  {{- with .root.Values.tolerations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- if and .gpu .root.Values.gpu.runtimeClassName }}
runtimeClassName: {{ .root.Values.gpu.runtimeClassName | quote }}
{{- end }}
{{- end -}}

{{- define "peraxis.spread" -}}
{{- $root := . -}}
{{- with .Values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  {{- $selector := dict "labelSelector" (dict "matchLabels" (include "peraxis.serverLabels" $root | fromYaml)) }}
  - {{- toYaml (merge (deepCopy .) $selector) | nindent 4 }}
  {{- end }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "peraxis.containerSecurity" -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Resources of a container. Needs a dict of `root`, `resources` and `gpu`; `gpus` is their number, 1 by default. */}}
{{- define "peraxis.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- if .gpu -}}
{{- $limits := merge (dict .root.Values.gpu.resourceName (.gpus | default 1 | int)) ($resources.limits | default dict) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Directories that a process writes to, on a root file system that it cannot. */}}
{{- define "peraxis.scratchEnv" -}}
- name: HOME
  value: /var/cache/peraxis
- name: TMPDIR
  value: /tmp
- name: XDG_RUNTIME_DIR
  value: /tmp
- name: XDG_CACHE_HOME
  value: /var/cache/peraxis
- name: HF_HOME
  value: /var/cache/peraxis/huggingface
- name: TRITON_CACHE_DIR
  value: /var/cache/peraxis/triton
- name: TORCHINDUCTOR_CACHE_DIR
  value: /var/cache/peraxis/inductor
- name: OMP_NUM_THREADS
  {{- if .Values.ompNumThreads }}
  value: {{ .Values.ompNumThreads | int | quote }}
  {{- else }}
  # Rounded up; the cores of the node where there is no limit.
  valueFrom:
    resourceFieldRef:
      resource: limits.cpu
      divisor: "1"
  {{- end }}
{{- end -}}

{{- define "peraxis.scratchMounts" -}}
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /var/cache/peraxis
{{- end -}}

{{- define "peraxis.tmpVolume" -}}
- name: tmp
  emptyDir:
    sizeLimit: {{ .Values.tmp.sizeLimit }}
{{- end -}}

{{- define "peraxis.cacheVolume" -}}
- name: cache
  emptyDir:
    sizeLimit: {{ .Values.cache.size }}
{{- end -}}

{{- define "peraxis.baseMount" -}}
- name: base
  mountPath: /base
  readOnly: true
  {{- with .Values.base.subPath }}
  subPath: {{ . | quote }}
  {{- end }}
{{- end -}}

{{- define "peraxis.registryMount" -}}
- name: registry
  mountPath: /registry
  {{- with .Values.registry.subPath }}
  subPath: {{ . | quote }}
  {{- end }}
{{- end -}}

{{- define "peraxis.baseVolume" -}}
- name: base
  persistentVolumeClaim:
    claimName: {{ include "peraxis.baseClaim" . | quote }}
    {{- if eq (join "" .Values.base.accessModes) "ReadOnlyMany" }}
    readOnly: true
    {{- end }}
{{- end -}}

{{- define "peraxis.registryVolume" -}}
- name: registry
  {{- if .Values.registry.s3.url }}
  # The cache of the bucket.
  emptyDir:
    sizeLimit: {{ .Values.registry.s3.cache.size }}
  {{- else }}
  persistentVolumeClaim:
    claimName: {{ include "peraxis.registryClaim" . | quote }}
  {{- end }}
{{- end -}}

{{- define "peraxis.dataVolumes" -}}
{{ include "peraxis.baseVolume" . }}
{{ include "peraxis.registryVolume" . }}
{{- end -}}

{{/* For a pod with a volume that one node alone can mount. */}}
{{- define "peraxis.besideServer" -}}
affinity:
  podAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "peraxis.serverLabels" . | nindent 12 }}
{{- end -}}

{{/* Fetches the checkpoint of the base before the server starts. A mark names what is there whole. */}}
{{- define "peraxis.download" -}}
- name: download-base
  image: {{ include "peraxis.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command:
    - sh
    - -ec
    - |
      wanted="$BASE_REPOSITORY@$BASE_REVISION"
      if [ "$(cat /base/.peraxis-download 2>/dev/null)" = "$wanted" ]; then
        exit 0
      fi
      # Checkpoints of other formats in the same repository are not read.
      hf download "$BASE_REPOSITORY" --revision "$BASE_REVISION" --local-dir /base --exclude 'original/*' --exclude '*.pth' --exclude '*.gguf'
      printf '%s' "$wanted" > /base/.peraxis-download.part
      mv /base/.peraxis-download.part /base/.peraxis-download
  env:
    {{- include "peraxis.scratchEnv" . | nindent 4 }}
    - name: BASE_REPOSITORY
      value: {{ .Values.base.download.repository | quote }}
    - name: BASE_REVISION
      value: {{ .Values.base.download.revision | quote }}
    {{- with .Values.base.download }}
    {{- if .tokenSecretName }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef:
          name: {{ .tokenSecretName | quote }}
          key: {{ .tokenSecretKey | quote }}
    {{- end }}
    {{- end }}
  securityContext:
    {{- include "peraxis.containerSecurity" . | nindent 4 }}
  resources:
    {{- include "peraxis.resources" (dict "root" . "resources" .Values.resources "gpu" false) | nindent 4 }}
  volumeMounts:
    {{- include "peraxis.scratchMounts" . | nindent 4 }}
    - name: base
      mountPath: /base
      {{- with .Values.base.subPath }}
      subPath: {{ . | quote }}
      {{- end }}
{{- end -}}
