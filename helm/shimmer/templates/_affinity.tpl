{{- /* Where workers of a pool may run. Arguments: root, component, pool (name), values. */ -}}
{{- define "shimmer.workerAffinity" -}}
{{- $root := .root -}}
{{- $pool := .values -}}
{{- if $pool.affinity -}}
affinity:
  {{- toYaml $pool.affinity | nindent 2 }}
{{- else if or $pool.gpu.types (ne $pool.spread "none") $root.Values.rackAffinity -}}
affinity:
  {{- if $pool.gpu.types }}
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
        - matchExpressions:
            - key: {{ $pool.gpu.typeLabel | quote }}
              operator: In
              values:
                {{- toYaml $pool.gpu.types | nindent 16 }}
  {{- end }}
  {{- if eq $pool.spread "required" }}
  podAntiAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "shimmer.selector" . | nindent 12 }}
  {{- else if eq $pool.spread "preferred" }}
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "shimmer.selector" . | nindent 14 }}
  {{- end }}
  {{- if $root.Values.rackAffinity }}
  {{- include "shimmer.rackAffinity" $root | nindent 2 }}
  {{- end }}
{{- end -}}
{{- end -}}
