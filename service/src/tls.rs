//! The certificate of the server.

use std::sync::Arc;

use pvmm_sandbox::Failure;
use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

use crate::options::TlsFiles;

/// Reads the certificate and its key.
pub fn acceptor(files: &TlsFiles) -> Result<TlsAcceptor, Failure> {
    let bad = |flag: &str, path: &std::path::Path, why: String| {
        Failure::usage(format!("{flag} {}: {why}", path.display()))
    };
    let certs = CertificateDer::pem_file_iter(&files.cert)
        .and_then(|certs| certs.collect::<Result<Vec<_>, _>>())
        .map_err(|error| bad("--tls-cert", &files.cert, error.to_string()))?;
    let key = PrivateKeyDer::from_pem_file(&files.key)
        .map_err(|error| bad("--tls-key", &files.key, error.to_string()))?;
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| Failure::fault(error.to_string()))?
        .with_no_client_auth()
        .with_single_cert(certs, key)
        .map_err(|error| bad("--tls-cert", &files.cert, error.to_string()))?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}
