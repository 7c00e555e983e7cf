{{- define "extproc.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 48 | trimSuffix "-" }}
{{- else if contains $name .Release.Name -}}
{{ .Release.Name | trunc 48 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name $name | trunc 48 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{/* The name tells releases apart, so it alone selects. */}}
{{- define "extproc.selector" -}}
app.kubernetes.io/name: {{ include "extproc.fullname" . }}
{{- end }}

{{- define "extproc.releaseLabels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "extproc.labels" -}}
{{ include "extproc.selector" . }}
app.kubernetes.io/component: endpoint-picker
{{ include "extproc.releaseLabels" . }}
{{- end }}

{{- define "extproc.serviceAccount" -}}
{{- default (ternary (include "extproc.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end }}

{{- define "extproc.image" -}}
{{ .Values.image.repository }}{{ with .Values.image.digest }}@{{ . }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "extproc.port" -}}
{{ (first .Values.router.modelServers.targetPorts).number }}
{{- end }}

{{/* Whether a broken connection is tried on another pod. Envoy must know the pods for that. Stored responses, which may
have side effects, have retries of their own by a rule of the chart's HTTPRoute: yours may lack it. */}}
{{- define "extproc.retriesResets" -}}
{{- $eg := .Values.envoyGateway }}
{{- if and (include "extproc.policies" .) $eg.retryResets .Values.httpRoute.create (not $eg.originalDestination) }}true{{ end }}
{{- end }}

{{/* Whether the HTTPRoute lists the paths that pass: a picker refuses others itself, unless FailOpen passes it by
or the gateway does not tell it the path. */}}
{{- define "extproc.listsPaths" -}}
{{- if or (eq .Values.mode "serve") (eq .Values.router.inferencePool.failureMode "FailOpen") (contains "nginx" .Values.gateway.className) }}true{{ end }}
{{- end }}

{{/* Whether Envoy Gateway's policies are made: "true" or "". */}}
{{- define "extproc.policies" -}}
{{- if and (include "extproc.isEnvoyGateway" .) (eq .Values.mode "serve") -}}true{{- end -}}
{{- end }}

{{/* Whether the gateway is Envoy Gateway, with AI Gateway in mode `epp`: "true" or "". */}}
{{- define "extproc.isEnvoyGateway" -}}
{{- if kindIs "bool" .Values.envoyGateway.create -}}
{{- if .Values.envoyGateway.create -}}true{{- end -}}
{{- else if or (eq .Values.mode "serve") .Values.gatewayClass.create (eq .Values.gateway.className "eg") -}}true{{- end -}}
{{- end }}

{{/* Whether the chart's Gateway has an EnvoyProxy: "true" or "". Nobody refers to one without a Gateway. */}}
{{- define "extproc.hasProxies" -}}
{{- if and (include "extproc.isEnvoyGateway" .) .Values.gateway.create }}true{{ end }}
{{- end }}

{{/* Whether the gateway is Istio's, which asks for a picker alone: "true" or "". */}}
{{- define "extproc.isIstio" -}}
{{- if and (eq .Values.mode "epp") (hasPrefix "istio" .Values.gateway.className) -}}true{{- end -}}
{{- end }}

{{/* What the chart makes of its other values, before `config`. */}}
{{- define "extproc.configOfChart" -}}
{{- $servers := .Values.router.modelServers -}}
{{- $selector := list -}}
{{- range $key, $value := $servers.matchLabels }}{{ $selector = append $selector (printf "%s=%s" $key $value) }}{{ end -}}
{{- if eq .Values.mode "epp" -}}
# Flags override this file, and this file overrides the defaults of `extproc epp`: ports 9002, 9003
# and 9090 on all addresses, TLS, the end of a request from the response phases.
server:
  drain_delay_s: 5 # until the Endpoints have reached every proxy
{{- if eq .Values.router.inferencePool.failureMode "FailOpen" }}
  fail_open: true # `failureMode` of the InferencePool: no adapter is private
{{- end }}
admin:
  address: "127.0.0.1:9901" # for debugging, only by `kubectl port-forward`
# Control headers are the client's, as long as your gateway neither sets nor strips them in a filter
# before the router's: name here those that it sets so (docs/epp.md). An HTTPRoute's come too late.
request: {trusted_headers: []}
{{- else -}}
server:
  address: "0.0.0.0:9002"
  health_address: "0.0.0.0:9003"
  drain_delay_s: 5 # until the Endpoints have reached every Envoy
{{- if .Values.tls.router.secret }}
  tls:
    cert_file: /etc/extproc-tls/tls.crt
    key_file: /etc/extproc-tls/tls.key
{{- if .Values.tls.router.clientSecret }}
    client_ca_file: /etc/extproc-tls/ca.crt # only Envoy and routers have certificates of this CA
{{- end }}
{{- end }}
{{- if and (include "extproc.policies" .) .Values.envoyGateway.failOpen (not .Values.envoyGateway.originalDestination) }}
  fail_open: true # of the EnvoyExtensionPolicy: no adapter is private
{{- end }}
admin:
  address: "127.0.0.1:9901" # for debugging, only by `kubectl port-forward`
  metrics_address: "0.0.0.0:9090"
{{- if .Values.envoyGateway.originalDestination }}
discovery:
  kubernetes: {pod_selector: {{ join "," $selector | quote }}, port: {{ include "extproc.port" . }}}
{{- else }}
discovery:
  kubernetes: {service: {{ $servers.service }}} # the EndpointSlices that Envoy Gateway uses too
{{- end }}
{{- end }}
adapters:
{{- if and (eq .Values.mode "serve") .Values.envoyGateway.originalDestination }}
  undeclared: refuse # what no route here declares by `adapter`: pods by their labels have no LLMRoutes
{{- else }}
  undeclared: refuse # what nobody declares: an LLMRoute deleted while no router runs leaves nothing behind
  ready_wait_s: 60 # while LLMRoutes cannot be read: then ready, and refuses what they could permit
{{- end }}
pods: {max_cpu_loras: {{ $servers.maxCpuLoras }}{{ if .Values.tls.pods.caSecret }}, tls: true, ca_file: /etc/extproc-pods-ca/ca.crt, tls_name: {{ .Values.tls.pods.hostname }}{{ end }}} # as in the pods' arguments: their metrics do not report it
peers:
  service: {{ include "extproc.fullname" . }}
{{- if eq .Values.mode "epp" }}
  tls_verify: false # each router creates its own certificate
{{- else if .Values.tls.router.secret }}
  ca_file: /etc/extproc-tls/ca.crt
  tls_name: {{ include "extproc.tlsName" . }}
{{- end }}
{{- if .Values.router.peerKey.required }}
  key_file: /etc/extproc-peer-key/key
{{- else }}
  # key_file: /etc/extproc-peer-key/key # with the Secret: `router.peerKey` of the chart, docs/envoy-gateway.md
{{- end }}
{{- if .Values.router.tracing.enabled }}
tracing: {enabled: true, sample_ratio: {{ .Values.router.tracing.sampleRatio }}}
{{- end }}
{{- if eq .Values.mode "serve" }}
{{- if .Values.envoyGateway.originalDestination }}
destination: {num_fallbacks: 0} # such a cluster accepts one address
{{- else }}
destination: {num_fallbacks: 2}
{{- end }}
request:
  max_body_bytes: 27262976 # also `bufferLimit` of the ClientTrafficPolicy
  max_hold_s: 5 # below `messageTimeout` of the EnvoyExtensionPolicy
{{- if include "extproc.hasProxies" . }}
completions: {source: access_log} # from the EnvoyProxy resource
{{- else }}
completions: {source: auto} # the access log of your gateway while it comes, else the pods' counts
{{- end }}
{{- end }}
{{- end }}

{{/* The router's file. Of two sources of pods only the user's counts: exactly one is allowed. */}}
{{- define "extproc.config" -}}
{{- $ours := include "extproc.configOfChart" . -}}
{{- if .Values.config -}}
{{- $merged := fromYaml $ours -}}
{{- if hasKey .Values.config "discovery" }}{{ $merged = omit $merged "discovery" }}{{ end -}}
{{- toYaml (mergeOverwrite $merged (deepCopy .Values.config)) -}}
{{- else -}}
{{- $ours -}}
{{- end -}}
{{- end }}

{{/* The name that the routers' certificate has. */}}
{{- define "extproc.tlsName" -}}
{{ include "extproc.fullname" . }}.{{ .Release.Namespace }}.svc
{{- end }}

{{/* Whether routers of mode `serve` speak TLS: "true" or "". */}}
{{- define "extproc.servesTls" -}}
{{- if dig "server" "tls" "cert_file" "" (include "extproc.config" . | fromYaml) }}true{{ end }}
{{- end }}

{{/* The largest body, which Envoy buffers: as Mi where it is a whole number of them. */}}
{{- define "extproc.bodyLimit" -}}
{{- $bytes := (include "extproc.config" . | fromYaml).request.max_body_bytes | default 27262976 | int64 -}}
{{- if mod $bytes 1048576 -}}{{ $bytes }}{{- else -}}{{ div $bytes 1048576 }}Mi{{- end -}}
{{- end }}

{{/* Longer than the drain, or a kill ends it. `extproc epp` gives running requests 120 s. */}}
{{- define "extproc.gracePeriod" -}}
{{- $server := (include "extproc.config" . | fromYaml).server -}}
{{- $isEpp := eq .Values.mode "epp" -}}
{{- $drain := $server.drain_timeout_s | default (ternary 120 30 $isEpp) -}}
{{- add (ceil $server.drain_delay_s) (ceil $drain) (ternary 15 10 $isEpp) -}}
{{- end }}

{{/* Values that contradict each other, or what the chart makes of others: a line each. */}}
{{- define "extproc.contradictions" -}}
{{- if not .Values.image.repository }}
image.repository is not set: push the image to a registry of yours, and name it, as --set image.repository=registry.example.com/extproc
{{- end }}
{{- $proxies := .Values.envoyGateway.proxies.autoscaling }}
{{- if and $proxies.enabled (gt (int $proxies.minReplicas) (int $proxies.maxReplicas)) }}
envoyGateway.proxies.autoscaling: minReplicas is above maxReplicas
{{- end }}
{{- $config := include "extproc.config" . | fromYaml -}}
{{- $grace := include "extproc.gracePeriod" . | int -}}
{{- with .Values.terminationGracePeriodSeconds }}{{ if lt (int .) $grace }}
terminationGracePeriodSeconds is {{ . }}, and a drain takes up to {{ $grace }} s: leave it out, or shorten config.server.drain_timeout_s
{{- end }}{{ end }}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) }}
autoscaling.minReplicas is above autoscaling.maxReplicas
{{- end }}
{{- if and .Values.pdb.enabled (kindIs "invalid" .Values.pdb.minAvailable) (kindIs "invalid" .Values.pdb.maxUnavailable) }}
pdb has neither maxUnavailable nor minAvailable, which would let no node drain: set one, or pdb.enabled=false
{{- end }}
{{- $listeners := .Values.tls.gateway }}
{{- if and $listeners.keepHttp $listeners.certificateRefs (eq (int $listeners.port) (int .Values.gateway.port)) }}
tls.gateway.port and gateway.port are both {{ $listeners.port }}: with tls.gateway.keepHttp the two listeners need a port each
{{- end }}
{{- $hasPolicy := or .Values.tls.router.secret (.Values.extraResources | toJson | contains "BackendTLSPolicy") }}
{{- if and (include "extproc.policies" .) (include "extproc.servesTls" .) (not $hasPolicy) }}
config.server.tls: Envoy Gateway speaks plaintext to the Services {{ include "extproc.fullname" . }} and {{ include "extproc.fullname" . }}-log without a BackendTLSPolicy for each: set tls.router.secret instead, or add them as extraResources
{{- end }}
{{- include "extproc.tlsContradictions" . }}
{{- include "extproc.failOpenContradictions" . }}
{{- range $name, $port := dict "server.address" 9002 "server.health_address" 9003 "admin.metrics_address" 9090 }}
{{- $parts := splitList "." $name }}
{{- $address := dig (first $parts) (last $parts) "" $config }}
{{- if and $address (not (hasSuffix (printf ":%d" (int $port)) $address)) }}
config.{{ $name }} is {{ $address }}: the Service, the probes and the gateway use port {{ $port }}
{{- end }}
{{- end }}
{{- end }}

{{- define "extproc.tlsContradictions" -}}
{{- $tls := .Values.tls }}
{{- if and (eq .Values.mode "epp") (or $tls.router.secret $tls.pods.caSecret) }}
tls.router and tls.pods are for mode serve: in mode epp the gateway speaks TLS to the router anyway, and is told itself how to speak to pods
{{- end }}
{{- if and $tls.router.clientSecret (not $tls.router.secret) }}
tls.router.clientSecret needs tls.router.secret
{{- end }}
{{- if and $tls.router.clientSecret (include "extproc.policies" .) (not .Values.gateway.create) }}
tls.router.clientSecret needs gateway.create: an EnvoyProxy has the certificate, and yours is not the chart's
{{- end }}
{{- if and $tls.pods.caSecret (not $tls.pods.hostname) }}
tls.pods.caSecret needs tls.pods.hostname, the name in the pods' certificates
{{- end }}
{{- if and $tls.pods.caSecret .Values.envoyGateway.originalDestination }}
tls.pods is not for envoyGateway.originalDestination: Envoy Gateway makes TLS to the pods of a Service alone
{{- end }}
{{- end }}

{{/* Who lets Envoy serve without a router must have nothing that only the router guards. */}}
{{- define "extproc.failOpenContradictions" -}}
{{- $isOpen := (include "extproc.config" . | fromYaml).server.fail_open }}
{{- $value := ternary "router.inferencePool.failureMode: FailOpen" "envoyGateway.failOpen" (eq .Values.mode "epp") }}
{{- if and $isOpen (eq .Values.mode "serve") (include "extproc.servesTls" .) }}
{{ $value }} does not go with TLS to the routers: a certificate that is wrong or has expired would let every request bypass them
{{- end }}
{{- if and $isOpen (.Capabilities.APIVersions.Has "llm.extproc/v1alpha1/LLMRoute") }}
{{- range (lookup "llm.extproc/v1alpha1" "LLMRoute" .Release.Namespace "").items }}
{{- if dig "spec" "tenants" list . }}
{{ $value }} gives up private adapters: without a router any client gets any adapter, and the LLMRoute {{ .metadata.name }} is for {{ join ", " .spec.tenants }} alone
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* What a gateway's Envoy should know of the cluster of its endpoint picker, whichever gateway. */}}
{{- define "extproc.pickerCluster" -}}
# Finds a router that hangs or drains before the kubelet does. No traffic: 60 s by default.
health_checks:
- timeout: 1s
  interval: 1s
  no_traffic_interval: 1s
  unhealthy_threshold: 2
  healthy_threshold: 1
  grpc_health_check: {service_name: envoy.service.ext_proc.v3.ExternalProcessor}
ignore_health_on_host_removal: true # else a router that left the Service is asked until a check fails
typed_extension_protocol_options:
  envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
    "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
    # A request that a router took with it undecided asks another one.
    retry_policy:
      retry_on: connect-failure,refused-stream,reset,unavailable
      num_retries: 5
      retry_back_off: {base_interval: 0.01s, max_interval: 0.1s}
    explicit_http_config:
      http2_protocol_options:
        # Longer than a busy router may pause: running responses pass through this connection.
        connection_keepalive: {interval: 5s, timeout: 4s}
{{- end }}
