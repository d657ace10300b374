{{- /* What a schema cannot say: relations between values. Each refusal names the values and what to do. */ -}}
{{- define "shimmer.checks" -}}
{{- $values := .Values -}}
{{- $coordinator := .Values.coordinator -}}
{{- include "shimmer.checkModel" (dict "root" . "values" $coordinator "name" "coordinator") -}}
{{- if le (int $coordinator.terminationGracePeriodSeconds) (add (int $coordinator.preStopSeconds) (int $coordinator.drainSeconds)) -}}
{{- fail (printf "coordinator.terminationGracePeriodSeconds (%d) must be more than preStopSeconds and drainSeconds together (%d and %d): answers would be cut" (int $coordinator.terminationGracePeriodSeconds) (int $coordinator.preStopSeconds) (int $coordinator.drainSeconds)) -}}
{{- end -}}
{{- if ne (len (list (int $coordinator.port) (int $coordinator.adminPort) (int $coordinator.metricsPort) | uniq)) 3 -}}
{{- fail (printf "coordinator.port, adminPort and metricsPort (%d, %d, %d) must differ: one container listens on all of them" (int $coordinator.port) (int $coordinator.adminPort) (int $coordinator.metricsPort)) -}}
{{- end -}}
{{- if and $values.api.service.headless (ne (int $values.api.service.port) (int $coordinator.port)) -}}
{{- fail (printf "api.service.port (%d) must be coordinator.port (%d) with api.service.headless: clients connect to the pods themselves, and no service maps ports" (int $values.api.service.port) (int $coordinator.port)) -}}
{{- end -}}
{{- $kv := get $coordinator.settings "kv-budget" | default "0" -}}
{{- $own := get $coordinator.settings "own-experts" | default "0" -}}
{{- if ge (add (include "shimmer.bytes" $kv) (include "shimmer.bytes" $own)) (include "shimmer.bytes" $coordinator.resources.memory | int64) -}}
{{- fail (printf "coordinator: settings.kv-budget (%s) and own-experts (%s) lie inside resources.memory (%s) and must leave room for the rest" $kv $own $coordinator.resources.memory) -}}
{{- end -}}
{{- if and $coordinator.journal.enabled (not $coordinator.journal.existingClaim) -}}
{{- $limit := get $coordinator.settings "journal-limit" | default "1GiB" -}}
{{- if lt (include "shimmer.bytes" $coordinator.journal.size | int64) (include "shimmer.bytes" $limit | int64) -}}
{{- fail (printf "coordinator.journal.size (%s) is less than settings.journal-limit (%s): the volume would be full before old files go; make it larger or lower the limit" $coordinator.journal.size $limit) -}}
{{- end -}}
{{- end -}}
{{- include "shimmer.checkFlags" (dict "root" . "component" "coordinator" "name" "coordinator" "values" $coordinator "model" (include "shimmer.model" (dict "root" . "values" $coordinator) | fromYaml)) -}}
{{- include "shimmer.checkLabels" (dict "labels" $values.commonLabels "name" "commonLabels") -}}
{{- include "shimmer.checkLabels" (dict "labels" $coordinator.podLabels "name" "coordinator.podLabels") -}}
{{- range $key := list "podMonitor" "serviceMonitor" "dashboards" "rules" -}}
{{- include "shimmer.checkLabels" (dict "labels" (get $values.metrics $key).labels "name" (printf "metrics.%s.labels" $key)) -}}
{{- end -}}
{{- $most := int $coordinator.replicas -}}
{{- if $coordinator.autoscaling.enabled -}}
{{- $most = int $coordinator.autoscaling.maxReplicas -}}
{{- if gt (int $coordinator.autoscaling.minReplicas) $most -}}
{{- fail (printf "coordinator.autoscaling.minReplicas (%d) is more than maxReplicas (%d)" (int $coordinator.autoscaling.minReplicas) $most) -}}
{{- end -}}
{{- if and (eq (int $coordinator.autoscaling.targetCPUUtilization) 0) (eq (int $coordinator.autoscaling.targetWaitingRequests) 0) -}}
{{- fail "coordinator.autoscaling has no target: set targetCPUUtilization or targetWaitingRequests" -}}
{{- end -}}
{{- end -}}
{{- if eq $values.etcd.mode "external" -}}
{{- if not $values.etcd.external.endpoints -}}
{{- fail "etcd.external.endpoints is empty: name the nodes, or set etcd.mode to bundled" -}}
{{- end -}}
{{- $secure := 0 -}}
{{- range $values.etcd.external.endpoints -}}{{- if hasPrefix "https://" . -}}{{- $secure = add1 $secure -}}{{- end -}}{{- end -}}
{{- if and (gt (int $secure) 0) (lt (int $secure) (len $values.etcd.external.endpoints)) -}}
{{- fail "etcd.external.endpoints mixes http and https" -}}
{{- end -}}
{{- if ne (gt (int $secure) 0) (ne $values.etcd.tls.secretName "") -}}
{{- fail "https endpoints of etcd and etcd.tls.secretName belong together: give both or neither" -}}
{{- end -}}
{{- if and $values.etcd.external.auth.user (not $values.etcd.external.auth.secretName) -}}
{{- fail "etcd.external.auth.user needs etcd.external.auth.secretName with the password" -}}
{{- end -}}
{{- else -}}
{{- if ne (ne $values.etcd.bundled.tls.secretName "") (and (ne $values.etcd.tls.secretName "") $values.etcd.tls.clientCertificate) -}}
{{- fail "etcd.bundled.tls.secretName needs etcd.tls.secretName and etcd.tls.clientCertificate, and the other way round" -}}
{{- end -}}
{{- end -}}
{{- if $values.tls.enabled -}}
{{- if and (eq $values.tls.mode "secret") (or (not $values.tls.coordinatorSecretName) (not $values.tls.workerSecretName)) -}}
{{- fail "tls.mode secret needs tls.coordinatorSecretName and tls.workerSecretName" -}}
{{- end -}}
{{- if and (eq $values.tls.mode "certManager") (not $values.tls.certManager.issuer.name) -}}
{{- fail "tls.mode certManager needs tls.certManager.issuer.name" -}}
{{- end -}}
{{- end -}}
{{- if and $values.metrics.podMonitor.enabled $values.metrics.serviceMonitor.enabled -}}
{{- fail "metrics.podMonitor and metrics.serviceMonitor would scrape every pod twice: enable one" -}}
{{- end -}}
{{- if $values.networkPolicy.enabled -}}
{{- if and (or $values.metrics.podMonitor.enabled $values.metrics.serviceMonitor.enabled) (not $values.networkPolicy.monitoring) -}}
{{- fail "metrics.podMonitor or serviceMonitor is enabled, and networkPolicy.monitoring is empty, so that nobody may scrape: name Prometheus there, for example {namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}" -}}
{{- end -}}
{{- if and (ne $values.api.service.type "ClusterIP") (not $values.networkPolicy.clients) -}}
{{- fail (printf "api.service.type %s is for clients outside of the cluster, and networkPolicy.clients is empty, which allows pods of this namespace only: name them there, for example {ipBlock: {cidr: 10.0.0.0/8}}" $values.api.service.type) -}}
{{- end -}}
{{- end -}}
{{- $names := dict -}}
{{- range $values.pools -}}
{{- if hasKey $names .name -}}{{- fail (printf "two pools are called %s" .name) -}}{{- end -}}
{{- if has .name (list "etcd" "coordinator" "coordinators" "workers") -}}{{- fail (printf "a pool cannot be called %s: another object has that name" .name) -}}{{- end -}}
{{- $_ := set $names .name true -}}
{{- $pool := include "shimmer.pool" (dict "root" $ "pool" .) | fromYaml -}}
{{- include "shimmer.checkModel" (dict "root" $ "values" $pool "name" (printf "pool %s" .name)) -}}
{{- include "shimmer.checkPool" (dict "root" $ "pool" $pool "coordinators" $most) -}}
{{- end -}}
{{- end -}}

{{- /* Arguments: root, values (of a role), name. */ -}}
{{- define "shimmer.checkModel" -}}
{{- $model := include "shimmer.model" . | fromYaml -}}
{{- $download := $model.download -}}
{{- if and $download.source (not $download.digest) -}}
{{- fail (printf "%s: model.download.source needs model.download.digest, against which the model is checked" .name) -}}
{{- end -}}
{{- if and (eq $model.type "hostPath") (not $model.hostPath.path) -}}
{{- fail (printf "%s: model.type hostPath needs model.hostPath.path" .name) -}}
{{- end -}}
{{- if and (eq $model.type "claim") (not $model.claim.name) -}}
{{- fail (printf "%s: model.type claim needs model.claim.name" .name) -}}
{{- end -}}
{{- if and (has $model.type (list "emptyDir" "claimTemplate")) (not $download.source) -}}
{{- fail (printf "%s: a model of type %s is empty at first: set model.download.source" .name $model.type) -}}
{{- end -}}
{{- if and (eq $model.type "claimTemplate") (not $model.claimTemplate.size) -}}
{{- fail (printf "%s: model.type claimTemplate needs model.claimTemplate.size" .name) -}}
{{- end -}}
{{- if and (eq $model.type "emptyDir") (not $model.emptyDir.sizeLimit) -}}
{{- fail (printf "%s: model.type emptyDir needs model.emptyDir.sizeLimit, or one pod could fill the node" .name) -}}
{{- end -}}
{{- if and (eq $model.type "claim") $download.source -}}
{{- fail (printf "%s: a shared claim is not downloaded into, because several pods would write it at the same time: fill it once, or use type claimTemplate, hostPath or emptyDir" .name) -}}
{{- end -}}
{{- end -}}

{{- /* Arguments: root, pool (complete), coordinators (most at a time). */ -}}
{{- define "shimmer.checkPool" -}}
{{- $pool := .pool -}}
{{- if le (int $pool.terminationGracePeriodSeconds) (int $pool.drainSeconds) -}}
{{- fail (printf "pool %s: terminationGracePeriodSeconds (%d) must be more than drainSeconds (%d)" $pool.name (int $pool.terminationGracePeriodSeconds) (int $pool.drainSeconds)) -}}
{{- end -}}
{{- $places := int (get $pool.settings "max-coordinators" | default 8) -}}
{{- if gt (add1 .coordinators) $places -}}
{{- fail (printf "pool %s takes %d coordinators (settings.max-coordinators); there may be %d, and one more while they are replaced" $pool.name $places .coordinators) -}}
{{- end -}}
{{- if or $pool.capabilities.ipcLock $pool.capabilities.sysNice -}}
{{- $user := .root.Values.podSecurityContext.runAsUser -}}
{{- if or (kindIs "invalid" $user) (ne (int $user) 0) -}}
{{- fail (printf "pool %s: capabilities do nothing for a user other than root: set podSecurityContext.runAsUser to 0, or leave capabilities off and raise the limit of locked memory on the node" $pool.name) -}}
{{- end -}}
{{- end -}}
{{- $memory := include "shimmer.bytes" $pool.resources.memory | int64 -}}
{{- $shared := mul (int64 $pool.sharedMemoryMiB) 1048576 -}}
{{- if ge $shared $memory -}}
{{- fail (printf "pool %s: sharedMemoryMiB (%d) leaves nothing of resources.memory (%s), out of which it comes" $pool.name (int $pool.sharedMemoryMiB) $pool.resources.memory) -}}
{{- end -}}
{{- if ne (empty $pool.hugepages.size) (empty $pool.hugepages.amount) -}}
{{- fail (printf "pool %s: hugepages.size and hugepages.amount belong together" $pool.name) -}}
{{- end -}}
{{- if and $pool.gpu.types (eq (int $pool.gpu.count) 0) -}}
{{- fail (printf "pool %s: gpu.types without gpu.count asks for a kind of nothing" $pool.name) -}}
{{- end -}}
{{- if and $pool.gpu.types $pool.affinity -}}
{{- fail (printf "pool %s: affinity replaces what gpu.types would ask for: write the label %s into affinity" $pool.name $pool.gpu.typeLabel) -}}
{{- end -}}
{{- if and (eq $pool.state.type "hostPath") (not $pool.state.hostPath.path) -}}
{{- fail (printf "pool %s: state.type hostPath needs state.hostPath.path" $pool.name) -}}
{{- end -}}
{{- if and (eq $pool.state.type "hostPath") (eq $pool.spread "none") -}}
{{- fail (printf "pool %s: several pods of a node would write one history in state.hostPath: use claimTemplate or emptyDir" $pool.name) -}}
{{- end -}}
{{- if and (not (has $pool.ram (list "auto" "all"))) (ge (add (include "shimmer.bytes" $pool.ram) $shared) $memory) -}}
{{- fail (printf "pool %s: ram (%s) lies inside resources.memory (%s), as does sharedMemoryMiB (%d), and must leave room for the rest" $pool.name $pool.ram $pool.resources.memory (int $pool.sharedMemoryMiB)) -}}
{{- end -}}
{{- if eq (int $pool.port) (int $pool.metricsPort) -}}
{{- fail (printf "pool %s: port and metricsPort are both %d and must differ: one container listens on both" $pool.name (int $pool.port)) -}}
{{- end -}}
{{- $mirrors := dict -}}
{{- range $pool.mirrors -}}
{{- if hasKey $mirrors .name -}}{{- fail (printf "pool %s: two mirrors are called %s" $pool.name .name) -}}{{- end -}}
{{- $_ := set $mirrors .name true -}}
{{- end -}}
{{- if ne (eq $pool.seccompProfile.type "Localhost") (ne $pool.seccompProfile.localhostProfile "") -}}
{{- fail (printf "pool %s: seccompProfile.type Localhost and seccompProfile.localhostProfile belong together" $pool.name) -}}
{{- end -}}
{{- if and (eq (get $pool.settings "io" | default "") "uring") (eq $pool.seccompProfile.type "RuntimeDefault") -}}
{{- fail (printf "pool %s: settings.io uring needs io_uring, which the profile RuntimeDefault of present container engines forbids, so that threads would read instead: set seccompProfile to Localhost with a profile that allows it (README: io_uring) or to Unconfined, or leave settings.io out" $pool.name) -}}
{{- end -}}
{{- if and (eq (get $pool.settings "mlock" | default "") "on") (not $pool.capabilities.ipcLock) (not $pool.capabilities.memlockRaised) -}}
{{- fail (printf "pool %s: settings.mlock on locks nothing under the usual limit of locked memory: set capabilities.ipcLock (with podSecurityContext.runAsUser 0), or raise LimitMEMLOCK of the container engine on the pool's nodes and say so with capabilities.memlockRaised" $pool.name) -}}
{{- end -}}
{{- include "shimmer.checkLabels" (dict "labels" $pool.podLabels "name" (printf "pool %s: podLabels" $pool.name)) -}}
{{- include "shimmer.checkFlags" (dict "root" .root "component" "worker" "name" (printf "pool %s" $pool.name) "values" $pool "model" (include "shimmer.model" (dict "root" .root "values" $pool) | fromYaml)) -}}
{{- end -}}

{{- /* Labels that the chart sets: selectors, policies and monitors look for them. Arguments: labels, name. */ -}}
{{- define "shimmer.checkLabels" -}}
{{- $all := . -}}
{{- range list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" "app.kubernetes.io/part-of" "app.kubernetes.io/version" "app.kubernetes.io/managed-by" "helm.sh/chart" "shimmer/pool" "shimmer/internal" -}}
{{- if hasKey $all.labels . -}}
{{- fail (printf "%s cannot set the label %s: the chart sets it, and its selectors would find other pods; choose another name" $all.name .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The program takes a flag once, except --mirror. Arguments: root, component, name, values, model. */ -}}
{{- define "shimmer.checkFlags" -}}
{{- $name := .name -}}
{{- $given := dict -}}
{{- range get (dict "coordinator" (list "advertise" "admin-listen" "model-name" "api-keys" "api-tls-cert" "api-tls-key" "journal" "drain-delay") "worker" (list "advertise" "weight" "host-label" "ram" "usage")) .component -}}
{{- $_ := set $given (printf "--%s" .) true -}}
{{- end -}}
{{- range include "shimmer.commonArgs" . | fromYamlArray -}}{{- $_ := set $given (regexFind "^--[^=]+" .) true -}}{{- end -}}
{{- range .values.extraArgs -}}
{{- $flag := regexFind "^--[^=]+" . -}}
{{- if and (hasKey $given $flag) (ne $flag "--mirror") -}}
{{- fail (printf "%s: extraArgs gives %s twice, or gives what a value or a setting of the chart gives already, and the program takes a flag once: use that value" $name $flag) -}}
{{- end -}}
{{- $_ := set $given $flag true -}}
{{- end -}}
{{- end -}}
