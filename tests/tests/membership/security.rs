//! An etcd with certificates, and one with users.

use std::{fs, path::Path, sync::Arc};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use shimmer_proto::membership::{
    MembershipStore, StoreError,
    etcd::{EtcdConfig, EtcdStore, EtcdTls, EtcdUser},
};
use shimmer_tests::etcd::{self, Etcd, NodeTls};

use super::{config, done, put, put_leased, view, wait_for_view, write};

type Authority = CertifiedIssuer<'static, KeyPair>;

fn authority() -> Authority {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// Certificate and key for these names.
fn issue(authority: &Authority, names: &[String], directory: &Path, name: &str) -> NodeTls {
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(names.to_vec()).unwrap();
    let certificate = params.signed_by(&key, authority).unwrap();
    let write = |suffix: &str, text: String| {
        let path = directory.join(format!("{name}-{suffix}.pem"));
        fs::write(&path, text).unwrap();
        path
    };
    NodeTls {
        ca: write("ca", authority.pem()),
        certificate: write("cert", certificate.pem()),
        key: write("key", key.serialize_pem()),
    }
}

fn start(config: EtcdConfig) -> Arc<EtcdStore> {
    Arc::new(EtcdStore::start(config).unwrap())
}

fn cause(store: &EtcdStore, part: &str) {
    wait_for_view(&format!("a refusal that says '{part}'"), store, |view| {
        view.disconnected.as_ref().is_some_and(|outage| outage.cause.contains(part))
    });
}

#[test]
fn certificates_of_both_ends_are_checked_and_read_again() {
    if !etcd::available() {
        return;
    }
    let (ours, others) = (authority(), authority());
    let etcd = Etcd::start_with(1, |hosts, directory| Some(issue(&ours, hosts, directory, "node")));
    let directory = etcd.directory();
    let good = issue(&ours, &["member".to_owned()], directory, "member");
    let stranger = issue(&others, &["member".to_owned()], directory, "stranger");
    let with = |ca: &Path, identity: Option<&NodeTls>| {
        let identity = identity.map(|tls| (tls.certificate.clone(), tls.key.clone()));
        EtcdConfig { tls: Some(EtcdTls { ca: ca.to_owned(), identity }), ..config(&etcd, 0) }
    };

    let member = start(with(&good.ca, Some(&good)));
    member.announce("workers/1", "1".to_owned());
    wait_for_view("a member with a certificate", &*member, |view| view.owns("workers/1"));

    // An etcd that somebody else signed is not believed.
    cause(&start(with(&stranger.ca, Some(&good))), "certificate");
    // Etcd does not believe others, nor those without a certificate.
    let outsider = start(with(&good.ca, Some(&stranger)));
    let nobody = start(with(&good.ca, None));
    for store in [&outsider, &nobody] {
        wait_for_view("a refusal", &**store, |view| {
            view.disconnected.as_ref().is_some_and(|outage| outage.cause.contains("https://"))
        });
        assert!(write(&**store, vec![], vec![put("x", "1")]).is_err());
        assert_eq!(view(&**store).revision, 0);
    }
    // Better files help without a restart.
    fs::copy(&good.certificate, &stranger.certificate).unwrap();
    fs::copy(&good.key, &stranger.key).unwrap();
    wait_for_view("new files to be used", &*outsider, |view| {
        view.entries.contains_key("workers/1")
    });
}

#[test]
fn users_of_etcd_have_passwords_and_limits() {
    if !etcd::available() {
        return;
    }
    let mut etcd = Etcd::start(1);
    etcd.ctl(&["user", "add", "root:root-password"]);
    etcd.ctl(&["user", "grant-role", "root", "root"]);
    etcd.ctl(&["role", "add", "shimmer"]);
    etcd.ctl(&[
        "role",
        "grant-permission",
        "--prefix=true",
        "shimmer",
        "readwrite",
        "/shimmer/test/",
    ]);
    etcd.ctl(&["user", "add", "shimmer:right"]);
    etcd.ctl(&["user", "grant-role", "shimmer", "shimmer"]);
    etcd.ctl(&["auth", "enable"]);
    etcd.act_as("root", "root-password");
    let with = |user: Option<(&str, &str)>, cluster: &str| {
        let user = user.map(|(name, password)| EtcdUser {
            name: name.to_owned(),
            password: password.to_owned(),
        });
        start(EtcdConfig { user, cluster: cluster.parse().unwrap(), ..config(&etcd, 0) })
    };

    let member = with(Some(("shimmer", "right")), "test");
    member.announce("workers/1", "1".to_owned());
    wait_for_view("a member with a password", &*member, |view| view.owns("workers/1"));
    done(write(&*member, vec![], vec![put_leased("leader", "1"), put("placement", "1")]));

    cause(&with(Some(("shimmer", "wrong")), "test"), "invalid user ID or password");
    let nobody = with(None, "test");
    cause(&nobody, "give --etcd-user");
    assert!(matches!(
        write(&*nobody, vec![], vec![put("x", "1")]),
        Err(StoreError::Refused { .. })
    ));
    // Another cluster's keys are not its own.
    let elsewhere = with(Some(("shimmer", "right")), "other");
    cause(&elsewhere, "permission denied");
    assert!(matches!(
        write(&*elsewhere, vec![], vec![put("x", "1")]),
        Err(StoreError::Refused { .. })
    ));
    // A session that etcd has forgotten is made again: a changed password of the same value ends all sessions.
    etcd.ctl(&["user", "delete", "shimmer"]);
    etcd.ctl(&["user", "add", "shimmer:right"]);
    etcd.ctl(&["user", "grant-role", "shimmer", "shimmer"]);
    let revision = done(write(&*member, vec![], vec![put("placement", "2")]));
    wait_for_view("the write", &*member, |view| view.revision >= revision);
}
