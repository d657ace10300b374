{{- /* Names and labels. */ -}}

{{- /* Prefix of all names. StatefulSets, whose pods carry a revision label, need names of at most 52 characters: 30 here, one dash, 20 of a pool. */ -}}
{{- define "shimmer.fullname" -}}
{{- $chart := default .Chart.Name .Values.nameOverride -}}
{{- $name := .Values.fullnameOverride -}}
{{- if not $name -}}
{{- $name = ternary .Release.Name (printf "%s-%s" .Release.Name $chart) (contains $chart .Release.Name) -}}
{{- end -}}
{{- if gt (len $name) 30 -}}
{{- fail (printf "the name %s has %d characters, 30 at most: set fullnameOverride" $name (len $name)) -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "%s cannot be the name of a service (a letter, then letters, digits and dashes): set fullnameOverride" $name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{- define "shimmer.clusterName" -}}
{{- default (include "shimmer.fullname" .) .Values.clusterName -}}
{{- end -}}

{{- define "shimmer.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "shimmer.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- /* What selectors look for, in quotes: a release may be called "true" or "12". Arguments: root, component, and pool where there is one. */ -}}
{{- define "shimmer.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
shimmer/pool: {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "shimmer.labels" -}}
{{ include "shimmer.selector" . }}
app.kubernetes.io/part-of: shimmer
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* Metadata of an object. Further arguments: name, annotations, more labels. */ -}}
{{- define "shimmer.metadata" -}}
name: {{ .name | quote }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "shimmer.labels" . | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (default (dict) .annotations) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "shimmer.podLabels" -}}
{{ include "shimmer.labels" . }}
{{- with .values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* Arguments: image (values) and the tag when none is given. */ -}}
{{- define "shimmer.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest | quote -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (default .tag .image.tag) | quote -}}
{{- end -}}
{{- end -}}

{{- /* IP families of a service. */ -}}
{{- define "shimmer.families" -}}
{{- with .Values.network.ipFamilyPolicy }}
ipFamilyPolicy: {{ . }}
{{- end }}
{{- with .Values.network.ipFamilies }}
ipFamilies:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Every address of the pod, in the family that it has. */ -}}
{{- define "shimmer.anyAddress" -}}
{{- ternary "[::]" "0.0.0.0" (eq .Values.network.primaryIPFamily "IPv6") -}}
{{- end -}}

{{- /* A setting as text: YAML's numbers are floating, and a large one would be written with an exponent. */ -}}
{{- define "shimmer.text" -}}
{{- if kindIs "slice" . -}}
{{- join "," . -}}
{{- else if and (kindIs "float64" .) (eq (floor .) .) -}}
{{- int64 . -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{- /* Bytes of a quantity of Kubernetes (48Gi) or of a size of the program (48GiB, 1.5TB). */ -}}
{{- define "shimmer.bytes" -}}
{{- $units := dict "" 1 "KB" 1000 "MB" 1000000 "GB" 1000000000 "TB" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $number := regexFind "^[0-9.]+" . -}}
{{- $unit := trimPrefix $number . -}}
{{- mulf (float64 $number) (get $units (hasKey $units $unit | ternary $unit (trimSuffix "B" $unit))) | floor | int64 -}}
{{- end -}}
