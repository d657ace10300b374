{{- /* Alert rules for a PrometheusRule. Where a monitor of this chart scrapes, the labels of its series are known, and each
expression asks for those of this release: otherwise the coordinators of one release would hide that another one has none,
and every release would repeat the alerts of all. Arguments: root, path. */ -}}
{{- define "shimmer.rules" -}}
{{- $file := .root.Files.Get .path -}}
{{- with .root.Values.metrics -}}
{{- if or .podMonitor.enabled .serviceMonitor.enabled -}}
{{- $scope := printf "namespace=%q,job=%q" $.root.Release.Namespace $.root.Release.Name -}}
{{- $rules := fromYaml $file -}}
{{- $name := "\\b((?:shimmer|vllm|process)[_:][a-z0-9_:]+)" -}}
{{- range $rules.groups -}}
{{- range .rules -}}
{{- $expr := regexReplaceAll (printf "%s\\{" $name) .expr (printf "${1}{%s," $scope) -}}
{{- $_ := set . "expr" (regexReplaceAll (printf "%s([^a-z0-9_:{]|$)" $name) $expr (printf "${1}{%s}${2}" $scope)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $rules -}}
{{- else -}}
{{- $file -}}
{{- end -}}
{{- end -}}
{{- end -}}
