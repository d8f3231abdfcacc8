//! TLS towards the guest and towards hosts with secrets: certificates, authorities, settings.

use std::io;
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection};
use zeroize::Zeroizing;

use crate::sys;

/// The one protocol that is spoken inside.
const HTTP: &[u8] = b"http/1.1";
const COMMON_NAME_MAX: usize = 64;

/// Why certificates cannot be made or used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("not PEM of certificates that authorities have")]
    Authority,
    #[error("no random bytes: {0}")]
    Random(#[from] io::Error),
    #[error("cannot make a certificate: {0}")]
    Certificate(#[from] rcgen::Error),
    #[error("TLS does not take the certificate: {0}")]
    Settings(#[from] rustls::Error),
    #[error("the certificate or its key is not PEM")]
    Pem,
    #[error("not a name that certificates can have")]
    Name,
}

/// A new authority's certificate, and a certificate of it with its key; all PEM.
pub struct Made {
    pub authority: String,
    pub certificate: String,
    pub key: Zeroizing<String>,
}

/// Makes an authority and one certificate of it for all hosts. The authority's key is dropped, so
/// that it signs no other.
pub fn make_certificate(hosts: &[String]) -> Result<Made, TlsError> {
    // An own name for each authority: a guest may have those of earlier sandboxes.
    let number = u64::from_be_bytes(sys::random()?);
    let mut authority = params(Vec::new(), &format!("pvmm sandbox {number:016x}"))?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let authority_key = KeyPair::generate()?;
    let authority_pem = authority.self_signed(&authority_key)?.pem();
    let issuer = Issuer::new(authority, authority_key);
    let short = hosts.first().filter(|host| host.len() <= COMMON_NAME_MAX);
    let mut leaf = params(hosts.to_vec(), short.map_or("pvmm", String::as_str))?;
    leaf.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    leaf.use_authority_key_identifier_extension = true;
    let key = KeyPair::generate()?;
    let certificate = leaf.signed_by(&key, &issuer)?.pem();
    Ok(Made { authority: authority_pem, certificate, key: Zeroizing::new(key.serialize_pem()) })
}

fn params(hosts: Vec<String>, common: &str) -> Result<CertificateParams, TlsError> {
    let mut params = CertificateParams::new(hosts)?;
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common);
    params.distinguished_name = name;
    // The clock of a restored guest may stand at any time until it is refreshed.
    params.not_before = rcgen::date_time_ymd(2020, 1, 1);
    params.not_after = rcgen::date_time_ymd(2099, 1, 1);
    Ok(params)
}

/// Reads authorities. An empty text has none; any other has at least one.
pub fn parse_authorities(pem: &str) -> Result<RootCertStore, TlsError> {
    let mut store = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
        let certificate = certificate.map_err(|_| TlsError::Authority)?;
        store.add(certificate).map_err(|_| TlsError::Authority)?;
    }
    if store.is_empty() && !pem.is_empty() { Err(TlsError::Authority) } else { Ok(store) }
}

/// Authorities that certificates of hosts are verified by.
#[derive(Clone, Debug)]
pub struct Authorities(RootCertStore);

impl Default for Authorities {
    fn default() -> Self {
        Self(RootCertStore::empty())
    }
}

impl Authorities {
    /// Reads the authorities that this host trusts; there may be none.
    pub fn of_host() -> Self {
        let mut store = RootCertStore::empty();
        store.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        Self(store)
    }

    /// Returns these authorities and those of a PEM text.
    pub fn and(mut self, pem: &str) -> Result<Self, TlsError> {
        self.0.extend(parse_authorities(pem)?.roots);
        Ok(self)
    }
}

/// The settings of TLS towards the guest and towards hosts.
#[derive(Clone, Debug)]
pub struct TlsSides {
    guest: Arc<ServerConfig>,
    host: Arc<ClientConfig>,
}

impl TlsSides {
    /// Prepares both sides: the certificate and key (PEM) that the guest is shown, and the
    /// authorities that hosts are verified by.
    pub fn new(certificate: &str, key: &str, authorities: Authorities) -> Result<Self, TlsError> {
        let chain = CertificateDer::pem_slice_iter(certificate.as_bytes());
        let chain = chain.collect::<Result<_, _>>().map_err(|_| TlsError::Pem)?;
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(|_| TlsError::Pem)?;
        let provider = Arc::new(ring::default_provider());
        let mut guest = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(chain, key)?;
        guest.alpn_protocols = vec![HTTP.to_vec()];
        let mut host = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(authorities.0)
            .with_no_client_auth();
        host.alpn_protocols = vec![HTTP.to_vec()];
        Ok(Self { guest: Arc::new(guest), host: Arc::new(host) })
    }

    /// Begins a connection: the guest's side and the host's. The host is verified by its name.
    pub fn connect(&self, name: &str) -> Result<(ServerConnection, ClientConnection), TlsError> {
        let name = ServerName::try_from(name.to_owned()).map_err(|_| TlsError::Name)?;
        let guest = ServerConnection::new(self.guest.clone())?;
        Ok((guest, ClientConnection::new(self.host.clone(), name)?))
    }
}
