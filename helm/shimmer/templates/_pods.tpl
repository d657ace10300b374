{{- /* Parts that the pods of both roles share. */ -}}

{{- /* A pool with everything that it takes from `worker`. Arguments: root, pool. */ -}}
{{- define "shimmer.pool" -}}
{{- mergeOverwrite (deepCopy .root.Values.worker) (deepCopy .pool) | toYaml -}}
{{- end -}}

{{- /* The model of a role. Arguments: root, values (of the role). */ -}}
{{- define "shimmer.model" -}}
{{- mergeOverwrite (deepCopy .root.Values.model) (deepCopy (default (dict) .values.model)) | toYaml -}}
{{- end -}}

{{- /* Arguments: root, values; only workers choose a profile of system calls. */ -}}
{{- define "shimmer.podSecurity" -}}
{{- $given := .root.Values.podSecurityContext -}}
{{- $root := and (hasKey $given "runAsUser") (not (kindIs "invalid" $given.runAsUser)) (eq (int $given.runAsUser) 0) -}}
runAsNonRoot: {{ not $root }}
{{- range $key := list "runAsUser" "runAsGroup" "fsGroup" }}
{{- if and (hasKey $given $key) (not (kindIs "invalid" (get $given $key))) }}
{{ $key }}: {{ int64 (get $given $key) }}
{{- end }}
{{- end }}
{{- if and (hasKey $given "fsGroup") (not (kindIs "invalid" $given.fsGroup)) }}
fsGroupChangePolicy: {{ $given.fsGroupChangePolicy }}
{{- end }}
{{- with default (dict "type" "RuntimeDefault") .values.seccompProfile }}
seccompProfile:
  type: {{ .type }}
  {{- with .localhostProfile }}
  localhostProfile: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{- /* Argument: names of capabilities to add. */ -}}
{{- define "shimmer.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- with . }}
  add: [{{ join ", " . }}]
  {{- end }}
{{- end -}}

{{- /* Requests equal limits, so that the pod is Guaranteed: its memory is set aside on the node, and a whole number of
CPUs can be cores of its own. Arguments: resources, and more as a map. */ -}}
{{- define "shimmer.resources" -}}
{{- $all := dict "cpu" (.resources.cpu | toString) "memory" .resources.memory -}}
{{- with .resources.ephemeralStorage }}{{ $_ := set $all "ephemeral-storage" . }}{{ end -}}
{{- range $key, $value := .more }}{{ $_ := set $all $key $value }}{{ end -}}
requests:
  {{- range $key, $value := $all }}
  {{ $key }}: {{ $value | quote }}
  {{- end }}
limits:
  {{- range $key, $value := $all }}
  {{ $key }}: {{ $value | quote }}
  {{- end }}
{{- end -}}

{{- /* Whether the kubelet can sleep before it stops a container; the image has no shell to sleep in. */ -}}
{{- define "shimmer.hasSleep" -}}
{{- if semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version }}true{{ end -}}
{{- end -}}

{{- /* How many looks the startup probe has: twice the time of a read of the whole container, and two minutes. */ -}}
{{- define "shimmer.startupFailures" -}}
{{- $model := include "shimmer.model" . | fromYaml -}}
{{- $seconds := add (ceil (divf (mulf 2 1024 $model.sizeGiB) $model.readMiBps)) 120 -}}
{{- ceil (divf $seconds .root.Values.probes.startup.periodSeconds) | int64 -}}
{{- end -}}

{{- /* Liveness asks for nothing but the process; readiness whether it does its work. A worker loads by itself, so that a
start that takes far too long is its own fault; a coordinator also waits for workers, which a restart does not bring. */ -}}
{{- define "shimmer.probes" -}}
{{- $probes := .root.Values.probes -}}
startupProbe:
  httpGet:
    path: {{ .startup }}
    port: metrics
  periodSeconds: {{ int $probes.startup.periodSeconds }}
  timeoutSeconds: 5
  failureThreshold: {{ include "shimmer.startupFailures" . }}
livenessProbe:
  httpGet:
    path: /livez
    port: metrics
  periodSeconds: {{ int $probes.liveness.periodSeconds }}
  timeoutSeconds: {{ int $probes.liveness.timeoutSeconds }}
  failureThreshold: {{ int $probes.liveness.failureThreshold }}
readinessProbe:
  httpGet:
    path: /readyz
    port: metrics
  periodSeconds: {{ int $probes.readiness.periodSeconds }}
  timeoutSeconds: {{ int $probes.readiness.timeoutSeconds }}
  failureThreshold: {{ int $probes.readiness.failureThreshold }}
{{- end -}}

{{- /* Environment that flags refer to. Argument: values of the role. */ -}}
{{- define "shimmer.environment" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
{{- with .extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* Directory of the container in a pod. Argument: model. */ -}}
{{- define "shimmer.container" -}}
{{- if .directory -}}{{- printf "/model/%s" .directory -}}{{- else -}}/model{{- end -}}
{{- end -}}

{{- /* Flags that both roles have, in quotes where a value is free text; coordinators decide what is traced. Arguments: root, component, values, model. */ -}}
{{- define "shimmer.commonArgs" -}}
{{- $values := .root.Values -}}
- {{ printf "--container=%s" (include "shimmer.container" .model) | quote }}
- --listen=[::]:{{ int .values.port }}
- --metrics-listen=[::]:{{ int .values.metricsPort }}
- --id=$(POD_NAME)
- --drain-timeout={{ int .values.drainSeconds }}s
- {{ printf "--cluster=%s" (include "shimmer.clusterName" .root) | quote }}
- {{ printf "--etcd=%s" (include "shimmer.etcdEndpoints" .root) | quote }}
- --lease={{ $values.etcd.lease }}
{{- if $values.etcd.tls.secretName }}
- --etcd-ca=/etc/shimmer/etcd-tls/ca.crt
{{- if $values.etcd.tls.clientCertificate }}
- --etcd-cert=/etc/shimmer/etcd-tls/tls.crt
- --etcd-key=/etc/shimmer/etcd-tls/tls.key
{{- end }}
{{- end }}
{{- if and (eq $values.etcd.mode "external") $values.etcd.external.auth.user }}
- {{ printf "--etcd-user=%s" $values.etcd.external.auth.user | quote }}
- --etcd-password-file=/etc/shimmer/etcd-auth/password
{{- end }}
{{- if $values.tls.enabled }}
- --tls-ca=/etc/shimmer/tls/ca.crt
- --tls-cert=/etc/shimmer/tls/tls.crt
- --tls-key=/etc/shimmer/tls/tls.key
{{- end }}
- {{ printf "--log=%s" $values.log.filter | quote }}
- --log-format={{ $values.log.format }}
{{- with $values.tracing }}
{{- if .endpoint }}
- {{ printf "--otlp-endpoint=%s" .endpoint | quote }}
- --otlp-protocol={{ .protocol }}
{{- if eq $.component "coordinator" }}
- --trace-sample={{ include "shimmer.text" .samplePercent }}
{{- end }}
{{- end }}
{{- end }}
{{- range $key, $value := .values.settings }}
- {{ printf "--%s=%s" $key (include "shimmer.text" $value) | quote }}
{{- end }}
{{- end -}}

{{- define "shimmer.commonMounts" -}}
- name: model
  mountPath: /model
  readOnly: true
{{- if .root.Values.tls.enabled }}
- name: tls
  mountPath: /etc/shimmer/tls
  readOnly: true
{{- end }}
{{- if .root.Values.etcd.tls.secretName }}
- name: etcd-tls
  mountPath: /etc/shimmer/etcd-tls
  readOnly: true
{{- end }}
{{- if and (eq .root.Values.etcd.mode "external") .root.Values.etcd.external.auth.user }}
- name: etcd-auth
  mountPath: /etc/shimmer/etcd-auth
  readOnly: true
{{- end }}
{{- with .values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* Arguments: root, values, model, tlsSecret. A claim template is a volume claim template of a StatefulSet, and an
ephemeral volume elsewhere (ephemeral: true). */ -}}
{{- define "shimmer.commonVolumes" -}}
{{- $model := .model -}}
{{- $download := $model.download.source -}}
{{- if eq $model.type "claim" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ $model.claim.name | quote }}
    {{- if not $download }}
    readOnly: true
    {{- end }}
{{- else if eq $model.type "hostPath" }}
- name: model
  hostPath:
    path: {{ $model.hostPath.path | quote }}
    type: {{ ternary "DirectoryOrCreate" "Directory" (ne $download "") }}
{{- else if eq $model.type "emptyDir" }}
- name: model
  emptyDir:
    sizeLimit: {{ $model.emptyDir.sizeLimit }}
{{- else if .ephemeral }}
- name: model
  ephemeral:
    volumeClaimTemplate:
      spec:
        {{- include "shimmer.claimSpec" $model.claimTemplate | nindent 8 }}
{{- end }}
{{- if and $download $model.download.caSecretName }}
- name: download-ca
  secret:
    secretName: {{ $model.download.caSecretName }}
    defaultMode: 0440
{{- end }}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ .tlsSecret | quote }}
    defaultMode: 0440
{{- end }}
{{- with .root.Values.etcd.tls.secretName }}
- name: etcd-tls
  secret:
    secretName: {{ . | quote }}
    defaultMode: 0440
{{- end }}
{{- if and (eq .root.Values.etcd.mode "external") .root.Values.etcd.external.auth.user }}
- name: etcd-auth
  secret:
    secretName: {{ .root.Values.etcd.external.auth.secretName | quote }}
    defaultMode: 0440
    items:
      - key: {{ .root.Values.etcd.external.auth.key | quote }}
        path: password
{{- end }}
{{- with .values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* Argument: storageClassName and size; one pod mounts it. */ -}}
{{- define "shimmer.claimSpec" -}}
accessModes: [ReadWriteOnce]
{{- with .storageClassName }}
storageClassName: {{ . | quote }}
{{- end }}
resources:
  requests:
    storage: {{ .size }}
{{- end -}}

{{- /* The init container that fetches the model. Arguments: root, values, model. */ -}}
{{- define "shimmer.download" -}}
{{- $download := .model.download -}}
{{- if $download.source -}}
initContainers:
  - name: fetch
    image: {{ include "shimmer.image" (dict "image" .root.Values.image "tag" .root.Chart.AppVersion) }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    args:
      - fetch
      - {{ $download.source | quote }}
      - {{ printf "--out=%s" (include "shimmer.container" .model) | quote }}
      - --digest={{ $download.digest }}
      - --connections={{ int $download.connections }}
      {{- if $download.caSecretName }}
      - --ca=/etc/shimmer/download-ca/ca.crt
      {{- end }}
    {{- with $download.endpoint }}
    env:
      - name: AWS_ENDPOINT_URL
        value: {{ . | quote }}
    {{- end }}
    {{- with $download.secretName }}
    envFrom:
      - secretRef:
          name: {{ . | quote }}
    {{- end }}
    securityContext:
      {{- include "shimmer.containerSecurity" (list) | nindent 6 }}
    resources:
      {{- include "shimmer.resources" (dict "resources" $download.resources) | nindent 6 }}
    volumeMounts:
      - name: model
        mountPath: /model
      {{- if $download.caSecretName }}
      - name: download-ca
        mountPath: /etc/shimmer/download-ca
        readOnly: true
      {{- end }}
{{- end -}}
{{- end -}}

{{- /* Preferred racks: where this release's pods are already. */ -}}
{{- define "shimmer.rackAffinity" -}}
podAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 50
      podAffinityTerm:
        topologyKey: {{ .Values.rackAffinity | quote }}
        labelSelector:
          matchExpressions:
            - key: app.kubernetes.io/instance
              operator: In
              values: [{{ .Release.Name | quote }}]
            - key: app.kubernetes.io/component
              operator: In
              values: [coordinator, worker]
{{- end -}}

{{- /* Arguments: root, component, pool. */ -}}
{{- define "shimmer.spread" -}}
{{- $arguments := . -}}
{{- with .root.Values.topologySpreadKeys -}}
topologySpreadConstraints:
  {{- range . }}
  - maxSkew: 1
    topologyKey: {{ . | quote }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "shimmer.selector" $arguments | nindent 8 }}
  {{- end }}
{{- end -}}
{{- end -}}

{{- /* The first lines of every pod's spec. Arguments: root, values. */ -}}
{{- define "shimmer.podSpec" -}}
serviceAccountName: {{ include "shimmer.serviceAccount" .root | quote }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- include "shimmer.podSecurity" . | nindent 2 }}
{{- end -}}

{{- /* Spec of a disruption budget. A pod that is not ready serves nobody, and would hold up the drain of its node for as
long as it stays so. Arguments: those of a selector, and maxUnavailable. */ -}}
{{- define "shimmer.budget" -}}
maxUnavailable: {{ include "shimmer.text" .maxUnavailable }}
{{- if semverCompare ">=1.27.0-0" .root.Capabilities.KubeVersion.Version }}
unhealthyPodEvictionPolicy: AlwaysAllow
{{- end }}
selector:
  matchLabels:
    {{- include "shimmer.selector" . | nindent 4 }}
{{- end -}}
