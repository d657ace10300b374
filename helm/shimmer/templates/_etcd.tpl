{{- define "shimmer.etcdScheme" -}}
{{- ternary "https" "http" (ne .Values.etcd.bundled.tls.secretName "") -}}
{{- end -}}

{{- /* Each node of the bundled etcd by its own name: a client goes to the next one where one hangs. */ -}}
{{- define "shimmer.etcdEndpoints" -}}
{{- if eq .Values.etcd.mode "external" -}}
{{- join "," .Values.etcd.external.endpoints -}}
{{- else -}}
{{- $nodes := list -}}
{{- range $index := until (int .Values.etcd.bundled.replicas) -}}
{{- $nodes = append $nodes (printf "%s://%s:2379" (include "shimmer.etcdScheme" $) (include "shimmer.etcdHost" (dict "root" $ "pod" (printf "%s-etcd-%d" (include "shimmer.fullname" $) $index)))) -}}
{{- end -}}
{{- join "," $nodes -}}
{{- end -}}
{{- end -}}

{{- define "shimmer.etcdHost" -}}
{{- printf "%s.%s-etcd.%s.svc" .pod (include "shimmer.fullname" .root) .root.Release.Namespace -}}
{{- end -}}
