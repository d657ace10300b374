{{- /* Ports are those of the pods: policies see a connection behind the address of its service. */ -}}
{{- define "shimmer.egressNames" -}}
- to:
    {{- toYaml .Values.networkPolicy.dns.to | nindent 4 }}
  ports:
    {{- range .Values.networkPolicy.dns.ports }}
    - port: {{ int . }}
      protocol: UDP
    - port: {{ int . }}
      protocol: TCP
    {{- end }}
{{- end -}}

{{- /* The port of a URL. Argument: the URL. */ -}}
{{- define "shimmer.urlPort" -}}
{{- $parts := urlParse . -}}
{{- $port := regexFind ":[0-9]+$" $parts.host | trimPrefix ":" -}}
{{- $port | default (ternary "80" "443" (eq $parts.scheme "http")) -}}
{{- end -}}

{{- /* Peers that may be anywhere are no peers at all: a rule without `to`. Arguments: peers, port. */ -}}
{{- define "shimmer.egressRule" -}}
{{- if .peers -}}
- to:
    {{- toYaml .peers | nindent 4 }}
  ports:
    - port: {{ .port }}
{{- else -}}
- ports:
    - port: {{ .port }}
{{- end -}}
{{- end -}}

{{- /* Where members of both roles connect to besides each other. Arguments: root, values. */ -}}
{{- define "shimmer.egress" -}}
{{- $root := .root -}}
{{- $policy := $root.Values.networkPolicy -}}
{{- include "shimmer.egressNames" $root }}
{{- if eq $root.Values.etcd.mode "bundled" }}
- to:
    - podSelector:
        matchLabels:
          {{- include "shimmer.selector" (dict "root" $root "component" "etcd") | nindent 10 }}
  ports:
    - port: client
{{- else }}
{{- $ports := dict }}
{{- range $root.Values.etcd.external.endpoints }}{{ $_ := set $ports (include "shimmer.urlPort" .) true }}{{ end }}
{{- range $port := keys $ports | sortAlpha }}
{{ include "shimmer.egressRule" (dict "peers" $policy.etcd "port" $port) }}
{{- end }}
{{- end }}
{{- with $root.Values.tracing.endpoint }}
{{ include "shimmer.egressRule" (dict "peers" $policy.tracing "port" (include "shimmer.urlPort" .)) }}
{{- end }}
{{- $sources := dict }}
{{- $models := list (include "shimmer.model" . | fromYaml) }}
{{- if hasKey .values "ram" }}
{{- range $root.Values.pools }}
{{- $pool := include "shimmer.pool" (dict "root" $root "pool" .) | fromYaml }}
{{- $models = append $models (include "shimmer.model" (dict "root" $root "values" $pool) | fromYaml) }}
{{- end }}
{{- end }}
{{- range $models }}
{{- with .download.source }}{{ $_ := set $sources (include "shimmer.urlPort" .) true }}{{ end }}
{{- end }}
{{- range $port := keys $sources | sortAlpha }}
{{ include "shimmer.egressRule" (dict "peers" $policy.modelSource "port" $port) }}
{{- end }}
{{- end -}}
