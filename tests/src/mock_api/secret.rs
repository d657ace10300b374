//! Secrets as protobuf: Helm's client sends those of its releases so, whatever the server would rather have.

use std::collections::BTreeMap;

use prost::Message;
use serde_json::{Value, json};

/// Stands before every object of Kubernetes in protobuf.
const MAGIC: &[u8] = b"k8s\0";

/// The envelope: `runtime.Unknown`.
#[derive(Clone, PartialEq, Message)]
struct Unknown {
    #[prost(bytes = "vec", tag = "2")]
    raw: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct ObjectMeta {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "3")]
    namespace: String,
    #[prost(btree_map = "string, string", tag = "11")]
    labels: BTreeMap<String, String>,
    #[prost(btree_map = "string, string", tag = "12")]
    annotations: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
struct Secret {
    #[prost(message, optional, tag = "1")]
    metadata: Option<ObjectMeta>,
    #[prost(btree_map = "string, bytes", tag = "2")]
    data: BTreeMap<String, Vec<u8>>,
    #[prost(string, tag = "3")]
    kind: String,
}

/// The secret in a body.
pub(super) fn decode(body: &[u8]) -> Value {
    let envelope = body.strip_prefix(MAGIC).expect("an object in protobuf begins with its magic");
    let unknown = Unknown::decode(envelope).expect("an envelope");
    let secret = Secret::decode(unknown.raw.as_slice()).expect("a secret");
    let metadata = secret.metadata.unwrap_or_default();
    let data: serde_json::Map<String, Value> =
        secret.data.iter().map(|(key, value)| (key.clone(), json!(base64(value)))).collect();
    json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": metadata.name,
            "namespace": metadata.namespace,
            "labels": metadata.labels,
            "annotations": metadata.annotations,
        },
        "data": data,
        "type": secret.kind,
    })
}

/// Bytes as JSON has them.
fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let byte = |index: usize| u32::from(chunk.get(index).copied().unwrap_or(0));
        let group = (byte(0) << 16) | (byte(1) << 8) | byte(2);
        for index in 0..4 {
            let letter = LETTERS[(group >> (18 - 6 * index) & 63) as usize];
            text.push(if index <= chunk.len() { char::from(letter) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_comes_through() {
        let metadata = ObjectMeta {
            name: "a".to_owned(),
            namespace: "b".to_owned(),
            labels: [("owner".to_owned(), "helm".to_owned())].into(),
            annotations: BTreeMap::new(),
        };
        let data = [("release", b"any".to_vec()), ("x", b"ab".to_vec()), ("y", b"a".to_vec())];
        let secret = Secret {
            metadata: Some(metadata),
            data: data.map(|(key, value)| (key.to_owned(), value)).into(),
            kind: "helm.sh/release.v1".to_owned(),
        };
        let unknown = Unknown { raw: secret.encode_to_vec() };
        let found = decode(&[MAGIC, &unknown.encode_to_vec()].concat());
        assert_eq!(found["data"], json!({ "release": "YW55", "x": "YWI=", "y": "YQ==" }));
        assert_eq!(found["metadata"]["labels"]["owner"], "helm");
        assert_eq!(found["type"], "helm.sh/release.v1");
    }
}
