//! An API server that Helm can install into: discovery, objects, the patches that Helm sends, and admission.
//!
//! It is no Kubernetes: there are no controllers, no conflicts of field managers and no defaults. It keeps what it is
//! given if the schemas of a version, the names and the selectors are right, and refuses changes of what cannot change.

mod admission;
mod patch;
mod secret;

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    path::Path,
    sync::{Arc, Mutex},
};

use axum::{
    Router,
    body::Bytes,
    http::{HeaderMap, Method, StatusCode, Uri, header::CONTENT_TYPE},
    response::{IntoResponse as _, Response},
};
use serde_json::{Value, json};
use tokio::{net::TcpListener, runtime::Runtime, task::JoinSet};

use crate::chart::Tools;

/// What Kubernetes this says that it is.
const VERSION: &str = "1.37.0";

/// Group and version, plural, kind: what discovery lists. All but namespaces belong to a namespace.
const RESOURCES: [(&str, &str, &str); 18] = [
    ("v1", "namespaces", "Namespace"),
    ("v1", "secrets", "Secret"),
    ("v1", "configmaps", "ConfigMap"),
    ("v1", "services", "Service"),
    ("v1", "serviceaccounts", "ServiceAccount"),
    ("v1", "persistentvolumeclaims", "PersistentVolumeClaim"),
    ("v1", "pods", "Pod"),
    ("apps/v1", "deployments", "Deployment"),
    ("apps/v1", "statefulsets", "StatefulSet"),
    ("apps/v1", "replicasets", "ReplicaSet"),
    ("policy/v1", "poddisruptionbudgets", "PodDisruptionBudget"),
    ("networking.k8s.io/v1", "networkpolicies", "NetworkPolicy"),
    ("autoscaling/v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler"),
    ("batch/v1", "jobs", "Job"),
    ("cert-manager.io/v1", "certificates", "Certificate"),
    ("monitoring.coreos.com/v1", "podmonitors", "PodMonitor"),
    ("monitoring.coreos.com/v1", "servicemonitors", "ServiceMonitor"),
    ("monitoring.coreos.com/v1", "prometheusrules", "PrometheusRule"),
];

/// A running server; dropping it ends it.
#[derive(Debug)]
pub struct MockApi {
    address: SocketAddr,
    store: Arc<Store>,
    _tasks: JoinSet<()>,
    _runtime: Runtime,
}

/// What it keeps, by path.
#[derive(Debug)]
struct Store {
    tools: Arc<Tools>,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    objects: BTreeMap<String, Value>,
    revision: u64,
    requests: Vec<String>,
}

impl MockApi {
    /// Starts a server on a free port.
    ///
    /// # Panics
    /// There is none.
    pub fn start(tools: Arc<Tools>) -> Self {
        let runtime = Runtime::new().expect("a runtime");
        let store = Arc::new(Store { tools, kept: Mutex::default() });
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a free port");
        let address = listener.local_addr().expect("a bound socket has an address");
        let answering = Arc::clone(&store);
        let router = Router::new().fallback(
            move |method: Method, uri: Uri, headers: HeaderMap, body: Bytes| {
                let store = Arc::clone(&answering);
                async move {
                    // Schemas are asked for in another process, which blocks.
                    let answer = move || store.answer(&method, &uri, &headers, &body);
                    tokio::task::spawn_blocking(answer).await.expect("an answer does not panic")
                }
            },
        );
        let mut tasks = JoinSet::new();
        tasks.spawn_on(
            async move { axum::serve(listener, router).await.expect("the server goes on") },
            runtime.handle(),
        );
        Self { address, store, _tasks: tasks, _runtime: runtime }
    }

    /// Writes the configuration by which Helm finds this server.
    ///
    /// # Panics
    /// It cannot be written.
    pub fn write_kubeconfig(&self, file: &Path) {
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "mock", "cluster": { "server": format!("http://{}", self.address) } }],
            "users": [{ "name": "mock", "user": {} }],
            "contexts": [{ "name": "mock", "context": { "cluster": "mock", "user": "mock" } }],
            "current-context": "mock",
        });
        fs::write(file, config.to_string()).expect("the configuration is written");
    }

    /// All objects, without what the server adds.
    ///
    /// # Panics
    /// A request panicked.
    pub fn objects(&self) -> Vec<Value> {
        let kept = self.store.kept.lock().expect("no request panics");
        kept.objects.values().cloned().map(without_server_fields).collect()
    }

    /// The last requests, for a test that fails.
    ///
    /// # Panics
    /// A request panicked.
    pub fn requests(&self) -> Vec<String> {
        self.store.kept.lock().expect("no request panics").requests.clone()
    }
}

fn without_server_fields(mut object: Value) -> Value {
    if let Some(metadata) = object["metadata"].as_object_mut() {
        for key in ["uid", "resourceVersion", "creationTimestamp", "generation"] {
            metadata.remove(key);
        }
    }
    object
}

/// The parts of a request's path.
struct Place {
    group_version: String,
    plural: String,
    namespace: Option<String>,
    name: Option<String>,
}

impl Place {
    fn parse(path: &str) -> Option<Self> {
        let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        let (group_version, rest) = match parts.as_slice() {
            ["api", version, rest @ ..] => ((*version).to_owned(), rest),
            ["apis", group, version, rest @ ..] => (format!("{group}/{version}"), rest),
            _ => return None,
        };
        let (namespace, rest) = match rest {
            ["namespaces", namespace, rest @ ..] if !rest.is_empty() => {
                (Some((*namespace).to_owned()), rest)
            }
            rest => (None, rest),
        };
        let (plural, name) = match rest {
            [plural] => (*plural, None),
            [plural, name] => (*plural, Some((*name).to_owned())),
            _ => return None,
        };
        Some(Self { group_version, plural: plural.to_owned(), namespace, name })
    }

    fn kind(&self) -> Option<&'static str> {
        let is = |(group, plural, _): &&(&str, &str, &str)| {
            *group == self.group_version && *plural == self.plural
        };
        RESOURCES.iter().find(is).map(|(_, _, kind)| *kind)
    }

    /// Where an object is kept.
    fn key(&self, name: &str) -> String {
        let namespace = self.namespace.as_deref().unwrap_or_default();
        format!("{}/{}/{namespace}/{name}", self.group_version, self.plural)
    }
}

impl Store {
    fn answer(&self, method: &Method, uri: &Uri, headers: &HeaderMap, body: &[u8]) -> Response {
        let kind_of_body =
            headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let mut kept = self.kept.lock().expect("no request panics");
        kept.requests.push(format!("{method} {uri} {kind_of_body}"));
        if let Some(answer) = discovery(uri.path()) {
            return reply(StatusCode::OK, &answer);
        }
        let place = Place::parse(uri.path());
        let Some((place, kind)) = place.and_then(|place| place.kind().map(|kind| (place, kind)))
        else {
            return failure(
                StatusCode::NOT_FOUND,
                "NotFound",
                &format!("there is no {}", uri.path()),
            );
        };
        let body = || self.body(kind_of_body, body);
        match (method.as_str(), &place.name) {
            ("GET", Some(name)) => match kept.objects.get(&place.key(name)) {
                Some(object) => reply(StatusCode::OK, object),
                None => not_found(&place, name),
            },
            ("GET", None) => {
                reply(StatusCode::OK, &kept.list(&place, kind, uri.query().unwrap_or_default()))
            }
            ("POST", None) => {
                let object = body();
                let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
                if kept.objects.contains_key(&place.key(&name)) {
                    return failure(
                        StatusCode::CONFLICT,
                        "AlreadyExists",
                        &format!("there is a {kind} {name}"),
                    );
                }
                self.keep(&mut kept, &place, kind, &name, object)
            }
            ("PUT", Some(name)) => self.keep(&mut kept, &place, kind, name, body()),
            ("PATCH", Some(name)) => {
                let patch = body();
                let old = kept.objects.get(&place.key(name)).cloned();
                let applied = kind_of_body.starts_with("application/apply-patch");
                let object = match old {
                    // There is one manager of fields: what it no longer names is gone.
                    _ if applied => patch,
                    None => return not_found(&place, name),
                    Some(old) if kind_of_body.starts_with("application/strategic-merge-patch") => {
                        patch::strategic(old, &patch)
                    }
                    Some(old) => patch::merge(old, &patch),
                };
                self.keep(&mut kept, &place, kind, name, object)
            }
            ("DELETE", Some(name)) => match kept.objects.remove(&place.key(name)) {
                Some(object) => reply(StatusCode::OK, &object),
                None => not_found(&place, name),
            },
            _ => failure(
                StatusCode::METHOD_NOT_ALLOWED,
                "MethodNotAllowed",
                &format!("{method} {uri}"),
            ),
        }
    }

    /// The object in a body: JSON, YAML, or protobuf for the secrets that Helm keeps releases in.
    fn body(&self, kind: &str, body: &[u8]) -> Value {
        if kind.contains("protobuf") {
            return secret::decode(body);
        }
        serde_json::from_slice(body).unwrap_or_else(|_| {
            let text = str::from_utf8(body).expect("a body of YAML is UTF-8");
            self.tools.parse(text).remove(0)
        })
    }

    /// Takes an object if it may be so.
    fn keep(
        &self,
        kept: &mut Kept,
        place: &Place,
        kind: &str,
        name: &str,
        mut object: Value,
    ) -> Response {
        object["apiVersion"] = json!(place.group_version);
        object["kind"] = json!(kind);
        let old = kept.objects.get(&place.key(name));
        let reasons = admission::reasons(&self.tools, VERSION, old, &object);
        if !reasons.is_empty() {
            return failure(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", &reasons.join("; "));
        }
        let status = if old.is_some() { StatusCode::OK } else { StatusCode::CREATED };
        kept.revision += 1;
        let metadata = &mut object["metadata"];
        metadata["uid"] = json!(format!("00000000-0000-0000-0000-{:012}", kept.revision));
        metadata["resourceVersion"] = json!(kept.revision.to_string());
        metadata["creationTimestamp"] = json!("2026-01-01T00:00:00Z");
        if let Some(namespace) = &place.namespace {
            metadata["namespace"] = json!(namespace);
        }
        kept.objects.insert(place.key(name), object.clone());
        reply(status, &object)
    }
}

impl Kept {
    fn list(&self, place: &Place, kind: &str, query: &str) -> Value {
        let selector = query
            .split('&')
            .find_map(|part| part.strip_prefix("labelSelector="))
            .unwrap_or_default();
        let wanted: Vec<(String, String)> = decoded(selector)
            .split(',')
            .filter_map(|term| term.split_once('='))
            .map(|(key, value)| {
                (key.trim_end_matches('!').to_owned(), value.trim_start_matches('=').to_owned())
            })
            .collect();
        let prefix = place.key("");
        let fits = |object: &Value| {
            wanted.iter().all(|(key, value)| object["metadata"]["labels"][key] == **value)
        };
        let items: Vec<&Value> = self
            .objects
            .iter()
            .filter(|(key, object)| key.starts_with(&prefix) && fits(object))
            .map(|(_, object)| object)
            .collect();
        json!({
            "apiVersion": place.group_version,
            "kind": format!("{kind}List"),
            "metadata": { "resourceVersion": self.revision.to_string() },
            "items": items,
        })
    }
}

/// A part of a query as text.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, more @ ..] = rest {
        rest = more;
        let hex = || Some((*more.first()?, *more.get(1)?));
        match (first, hex()) {
            (b'%', Some((high, low))) => {
                let digits = [high, low];
                let digits = str::from_utf8(&digits).expect("hexadecimal digits");
                bytes.push(u8::from_str_radix(digits, 16).expect("hexadecimal digits"));
                rest = &more[2..];
            }
            (b'+', _) => bytes.push(b' '),
            (byte, _) => bytes.push(*byte),
        }
    }
    String::from_utf8(bytes).expect("a query is UTF-8")
}

fn discovery(path: &str) -> Option<Value> {
    let groups = || {
        let mut groups: Vec<&str> = RESOURCES
            .iter()
            .map(|(group, _, _)| *group)
            .filter(|group| group.contains('/'))
            .collect();
        groups.dedup();
        groups
    };
    let resources = |of: &str| {
        let verbs = json!(["create", "delete", "get", "list", "patch", "update", "watch"]);
        let resource = |(_, plural, kind): &(&str, &str, &str)| json!({ "name": plural, "singularName": kind.to_lowercase(), "kind": kind, "namespaced": *kind != "Namespace", "verbs": verbs });
        let own: Vec<Value> =
            RESOURCES.iter().filter(|(group, _, _)| *group == of).map(resource).collect();
        (!own.is_empty()).then(|| json!({ "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": of, "resources": own }))
    };
    match path.trim_matches('/').split('/').collect::<Vec<_>>().as_slice() {
        ["version"] => {
            Some(json!({ "major": "1", "minor": "37", "gitVersion": format!("v{VERSION}") }))
        }
        ["api"] => Some(json!({ "kind": "APIVersions", "versions": ["v1"] })),
        ["apis"] => {
            let group = |group_version: &str| {
                let (group, version) =
                    group_version.split_once('/').expect("a group has a version");
                let version = json!({ "groupVersion": group_version, "version": version });
                json!({ "name": group, "versions": [version], "preferredVersion": version })
            };
            let groups: Vec<Value> = groups().into_iter().map(group).collect();
            Some(json!({ "kind": "APIGroupList", "apiVersion": "v1", "groups": groups }))
        }
        ["api", version] => resources(version),
        ["apis", group, version] => resources(&format!("{group}/{version}")),
        _ => None,
    }
}

fn reply(status: StatusCode, value: &Value) -> Response {
    (status, [(CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

fn not_found(place: &Place, name: &str) -> Response {
    failure(StatusCode::NOT_FOUND, "NotFound", &format!("{} {name:?} not found", place.plural))
}

fn failure(status: StatusCode, reason: &str, message: &str) -> Response {
    let code = status.as_u16();
    let body = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": message, "code": code });
    reply(status, &body)
}
