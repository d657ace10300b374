use std::{collections::BTreeMap, time::Duration};

use super::*;

fn parse(text: &str, variables: &[(&str, &str)]) -> Result<Source, Error> {
    let variables: BTreeMap<_, _> = variables.iter().copied().collect();
    Source::new(text, None, |name| variables.get(name).map(|&value| value.to_owned()))
}

fn check(text: &str, variables: &[(&str, &str)], file: &str, expected: &str) {
    assert_eq!(parse(text, variables).unwrap().url(file).as_str(), expected);
}

fn check_refused(text: &str, variables: &[(&str, &str)], part: &str) {
    let said = parse(text, variables).unwrap_err().render().unwrap();
    assert!(said.contains(part), "{part:?} is not in: {said}");
}

#[test]
fn files_have_urls_below_the_source() {
    let file = "experts/layer-000.safetensors";
    check("https://h/a/b/", &[], file, "https://h/a/b/experts/layer-000.safetensors");
    check("http://h:8080", &[], "manifest.json", "http://h:8080/manifest.json");
    check("http://[::1]:80/x%20y", &[], "a b", "http://[::1]/x%20y/a%20b");
    let north = [("AWS_REGION", "eu-north-1")];
    check("s3://models/glm/v1", &north, "f", "https://models.s3.eu-north-1.amazonaws.com/glm/v1/f");
    check("s3://my.models", &[], "f", "https://s3.us-east-1.amazonaws.com/my.models/f");
    let china = [("AWS_DEFAULT_REGION", "cn-north-1")];
    check("s3://m/p", &china, "f", "https://m.s3.cn-north-1.amazonaws.com.cn/p/f");
    let own = [("AWS_ENDPOINT_URL", "http://minio:9000/")];
    check("s3://models/a+b=c/", &own, "f", "http://minio:9000/models/a%2Bb%3Dc/f");
    let both = [own[0], ("AWS_ENDPOINT_URL_S3", "http://ceph")];
    check("s3://models", &both, "f", "http://ceph/models/f");
}

#[test]
fn sources_that_cannot_be_used_say_why() {
    check_refused("/mnt/glm", &[], "mirror stage");
    check_refused("file:///mnt/glm", &[], "mirror stage");
    check_refused("ftp://h/x", &[], "unknown scheme");
    check_refused("https://", &[], "https://HOST/PATH");
    check_refused("https://h/x?sig=1", &[], "query");
    let said = parse("https://me:hush@h/x", &[]).unwrap_err().render().unwrap();
    assert!(said.contains("--token-file") && !said.contains("hush"), "{said}");
    check_refused("s3:///x", &[], "no name of a bucket");
    check_refused("s3://b", &[("AWS_ACCESS_KEY_ID", "a")], "AWS_SECRET_ACCESS_KEY is missing");
    check_refused("s3://b", &[("AWS_SECRET_ACCESS_KEY", "a")], "AWS_ACCESS_KEY_ID is missing");
    check_refused("s3://b", &[("AWS_WEB_IDENTITY_TOKEN_FILE", "f")], "are not supported");
    check_refused("s3://b", &[("AWS_ENDPOINT_URL", "minio:9000")], "AWS_ENDPOINT_URL is like");
    let token = Source::new("s3://b", Some("t".to_owned()), |_| None).unwrap_err();
    assert!(token.render().unwrap().contains("AWS_ACCESS_KEY_ID"));
}

/// The example "GET Object" of the AWS documentation, "Authenticating Requests: Using the Authorization Header".
#[test]
fn requests_are_signed_as_the_documentation_of_s3_says() {
    let credentials = Credentials::new(
        "AKIAIOSFODNN7EXAMPLE",
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        None,
        None,
        "test",
    );
    let url = Url::parse("https://examplebucket.s3.amazonaws.com/test.txt").unwrap();
    // 2013-05-24T00:00:00Z
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_369_353_600);
    let headers = signature(&url, Some("bytes=0-9"), &credentials, "us-east-1", now).unwrap();
    let header = |name: &str| headers.iter().find(|(key, _)| key == name).unwrap().1.as_str();
    assert_eq!(
        header("authorization"),
        "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, \
         SignedHeaders=host;range;x-amz-content-sha256;x-amz-date, \
         Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    );
    assert_eq!(header("x-amz-date"), "20130524T000000Z");
}

#[test]
fn secrets_are_not_shown() {
    let keys = [("AWS_ACCESS_KEY_ID", "id-hush"), ("AWS_SECRET_ACCESS_KEY", "secret-hush")];
    assert!(!format!("{:?}", parse("s3://b", &keys).unwrap()).contains("hush"));
    let token = Source::new("http://h", Some("hush".to_owned()), |_| None).unwrap();
    assert!(!format!("{token:?}").contains("hush"));
    assert!(token.warning().unwrap().contains("plain text"));
    assert!(parse("s3://b", &[]).unwrap().excuse().unwrap().contains("no request was signed"));
}
