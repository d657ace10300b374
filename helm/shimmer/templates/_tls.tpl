{{- /* Secret with the certificate of a role. Arguments: root, role. */ -}}
{{- define "shimmer.tlsSecret" -}}
{{- if eq .root.Values.tls.mode "secret" -}}
{{- get .root.Values.tls (printf "%sSecretName" .role) -}}
{{- else -}}
{{- printf "%s-%s-tls" (include "shimmer.fullname" .root) .role -}}
{{- end -}}
{{- end -}}

{{- /* Names of a role's certificate; localhost is for operators who forward a port. Arguments: root, role. */ -}}
{{- define "shimmer.tlsNames" -}}
{{- $service := printf "%s-%ss.%s.svc" (include "shimmer.fullname" .root) .role .root.Release.Namespace -}}
{{- dict "names" (list $service (printf "*.%s" $service) "localhost") | toJson -}}
{{- end -}}
