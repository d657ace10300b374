//! Authorities and certificates for processes on loopback.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, date_time_ymd,
};

/// Signs members.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Authority")
    }
}

impl Authority {
    /// A new one, which nobody trusts yet.
    ///
    /// # Panics
    /// Keys cannot be made.
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key can be made");
        Self(CertifiedIssuer::self_signed(params, key).expect("an authority signs itself"))
    }

    /// Its certificate.
    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// Writes `ca.pem`, `cert.pem` and `key.pem` of a new member on loopback into a directory.
    ///
    /// # Panics
    /// The files cannot be written.
    pub fn issue(&self, directory: &Path) -> Member {
        self.issue_with(directory, |_| {})
    }

    /// [`Self::issue`] of a certificate that ended years ago.
    ///
    /// # Panics
    /// The files cannot be written.
    pub fn issue_expired(&self, directory: &Path) -> Member {
        self.issue_with(directory, |params| {
            params.not_before = date_time_ymd(2020, 1, 1);
            params.not_after = date_time_ymd(2021, 2, 3);
        })
    }

    fn issue_with(&self, directory: &Path, change: impl FnOnce(&mut CertificateParams)) -> Member {
        let names = ["localhost", "127.0.0.1", "::1"].map(str::to_owned).to_vec();
        let mut params = CertificateParams::new(names).expect("names of loopback are valid");
        change(&mut params);
        let key = KeyPair::generate().expect("a key can be made");
        let certificate = params.signed_by(&key, &self.0).expect("an authority signs");
        let write = |name: &str, text: String| {
            fs::write(directory.join(name), text).expect("a file of the test can be written");
        };
        fs::create_dir_all(directory).expect("a directory of the test can be made");
        write("ca.pem", self.pem());
        write("cert.pem", certificate.pem());
        write("key.pem", key.serialize_pem());
        Member { directory: directory.to_owned() }
    }
}

/// The files of a member.
#[derive(Debug, Clone)]
pub struct Member {
    pub directory: PathBuf,
}

impl Member {
    /// One of the files.
    pub fn file(&self, name: &str) -> String {
        self.directory.join(name).display().to_string()
    }

    /// The flags of a role or command that acts as this member.
    pub fn flags(&self) -> Vec<String> {
        [("--tls-ca", "ca.pem"), ("--tls-cert", "cert.pem"), ("--tls-key", "key.pem")]
            .into_iter()
            .flat_map(|(flag, name)| [flag.to_owned(), self.file(name)])
            .collect()
    }
}

/// A directory as Kubernetes mounts a secret: the name is a link, and a change swaps what it leads to.
#[derive(Debug)]
pub struct Secret {
    root: PathBuf,
    versions: usize,
}

impl Secret {
    /// A secret without content below `root`.
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned(), versions: 0 }
    }

    /// The member whose files are the current version.
    pub fn member(&self) -> Member {
        Member { directory: self.root.join("data") }
    }

    /// Replaces all files at once.
    ///
    /// # Panics
    /// The files cannot be written.
    pub fn put(&mut self, authority: &Authority) {
        self.versions += 1;
        let version = self.root.join(format!("version-{}", self.versions));
        authority.issue(&version);
        let (link, name) = (self.root.join("swap"), self.root.join("data"));
        symlink(&version, &link).expect("a link can be made");
        fs::rename(&link, &name).expect("a link can be renamed");
    }
}
