{{- /* What a schema cannot say: relations between values. Each refusal names the values and what to do. */ -}}
{{- define "shimmer.checks" -}}
{{- $values := .Values -}}
{{- $coordinator := .Values.coordinator -}}
{{- include "shimmer.checkModel" (dict "root" . "values" $coordinator "name" "coordinator") -}}
{{- if le (int $coordinator.terminationGracePeriodSeconds) (add (int $coordinator.preStopSeconds) (int $coordinator.drainSeconds)) -}}
{{- fail (printf "coordinator.terminationGracePeriodSeconds (%d) must be more than preStopSeconds and drainSeconds together (%d and %d): answers would be cut" (int $coordinator.terminationGracePeriodSeconds) (int $coordinator.preStopSeconds) (int $coordinator.drainSeconds)) -}}
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
{{- if and $download.endpoint (not (hasPrefix "s3://" $download.source)) -}}
{{- fail (printf "%s: model.download.endpoint is for s3 sources: another one has its host in model.download.source" .name) -}}
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
{{- if ge (int $pool.sharedMemoryMiB) (include "shimmer.mebibytes" $pool.resources.memory | int) -}}
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
{{- $memory := include "shimmer.mebibytes" $pool.resources.memory | int64 -}}
{{- if regexMatch "^[0-9]+(M|G|T)iB$" $pool.ram -}}
{{- if ge (include "shimmer.mebibytes" (trimSuffix "B" $pool.ram) | int64) $memory -}}
{{- fail (printf "pool %s: ram (%s) lies inside resources.memory (%s) and must leave room for the rest" $pool.name $pool.ram $pool.resources.memory) -}}
{{- end -}}
{{- end -}}
{{- end -}}
