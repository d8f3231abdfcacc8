//! Requests to one repository of a registry, with the token that it asks for.

use std::io::{self, Read};
use std::sync::Arc;
use std::time::Duration;

use rustls::crypto::ring;
use serde::Deserialize;
use ureq::http::header::{ACCEPT, AUTHORIZATION, WWW_AUTHENTICATE};
use ureq::http::{Response, StatusCode};
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::{Agent, Body};

use crate::credentials::Credentials;
use crate::reference::{Reference, is_local};

/// How long a registry may take to begin its answer.
const ANSWER: Duration = Duration::from_secs(60);
const CONNECT: Duration = Duration::from_secs(20);
/// How long one part may take.
const BODY: Duration = Duration::from_secs(3600);
/// The largest answer with a token.
const MAX_TOKEN: u64 = 64 << 10;

#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    #[error("cannot reach the registry {registry}")]
    Reach { registry: String, source: Box<ureq::Error> },
    #[error("the registry {registry} has no image {what}")]
    Missing { registry: String, what: String },
    #[error("the registry {registry} wants other credentials for {what}")]
    Denied { registry: String, what: String },
    #[error("the registry {registry} answered {status} for {what}")]
    Status { registry: String, what: String, status: u16 },
    #[error("cannot read {what} from the registry")]
    Read { what: String, source: io::Error },
    #[error("{what} of the registry is not what it should be")]
    Form { what: String, source: serde_json::Error },
    #[error("cannot write {}", path.display())]
    Write { path: std::path::PathBuf, source: io::Error },
    #[error("{0}")]
    Refused(String),
    #[error("interrupted while fetching")]
    Interrupted,
}

/// One repository of a registry.
pub struct Client<'a> {
    agent: Agent,
    reference: &'a Reference,
    credentials: Option<Credentials>,
    /// The value of `Authorization` that the registry accepted.
    authorization: Option<String>,
}

#[derive(Deserialize)]
struct Token {
    #[serde(alias = "access_token")]
    token: String,
}

impl<'a> Client<'a> {
    pub fn new(reference: &'a Reference, credentials: Option<Credentials>) -> Self {
        let roots = rustls_native_certs::load_native_certs().certs;
        let roots = roots.iter().map(|root| Certificate::from_der(root).to_owned());
        let tls = TlsConfig::builder()
            .root_certs(RootCerts::new_with_certs(&roots.collect::<Vec<_>>()))
            .unversioned_rustls_crypto_provider(Arc::new(ring::default_provider()))
            .build();
        let agent = Agent::config_builder()
            .tls_config(tls)
            .http_status_as_error(false)
            .timeout_connect(Some(CONNECT))
            .timeout_recv_response(Some(ANSWER))
            .timeout_recv_body(Some(BODY))
            .user_agent(concat!("pvmm/", env!("CARGO_PKG_VERSION")))
            .build();
        Self { agent: agent.into(), reference, credentials, authorization: None }
    }

    /// Asks for a part of the repository, with a token if the registry wants one.
    pub fn get(&mut self, part: &str, accept: &str) -> Result<Response<Body>, RegistryError> {
        let repository = &self.reference.repository;
        let url = format!("{}/v2/{repository}/{part}", self.reference.origin());
        let mut answer = self.request(&url, accept, self.authorization.as_deref())?;
        // A token is also asked for when the last one has expired, as during a long fetch.
        if answer.status() == StatusCode::UNAUTHORIZED {
            let asked = answer.headers().get(WWW_AUTHENTICATE).and_then(|text| text.to_str().ok());
            self.authorization = self.authorize(asked.unwrap_or_default())?;
            answer = self.request(&url, accept, self.authorization.as_deref())?;
        }
        let registry = self.reference.registry.clone();
        let what = format!("{repository} {part}");
        match answer.status().as_u16() {
            200 => Ok(answer),
            404 => Err(RegistryError::Missing { registry, what: self.reference.to_string() }),
            401 | 403 => Err(RegistryError::Denied { registry, what: self.reference.to_string() }),
            status => Err(RegistryError::Status { registry, what, status }),
        }
    }

    fn request(
        &self,
        url: &str,
        accept: &str,
        authorization: Option<&str>,
    ) -> Result<Response<Body>, RegistryError> {
        let mut request = self.agent.get(url).header(ACCEPT, accept);
        if let Some(value) = authorization {
            request = request.header(AUTHORIZATION, value);
        }
        request.call().map_err(|error| RegistryError::Reach {
            registry: self.reference.registry.clone(),
            source: Box::new(error),
        })
    }

    /// Does what the header `WWW-Authenticate` asks for.
    fn authorize(&self, asked: &str) -> Result<Option<String>, RegistryError> {
        let own = self.credentials.as_ref().map(Credentials::header);
        let Some(challenge) = asked.strip_prefix("Bearer ") else {
            return Ok(own);
        };
        let field = |name: &str| {
            let (_, rest) = challenge.split_once(&format!("{name}=\""))?;
            rest.split_once('"').map(|(value, _)| value.to_owned())
        };
        let realm = field("realm").unwrap_or_default();
        let host = realm.split_once("://").and_then(|(_, rest)| rest.split('/').next());
        let safe = realm.starts_with("https://") || host.is_some_and(is_local);
        if !safe {
            let text = format!("the registry sends for tokens to {realm:?}, which is not safe");
            return Err(RegistryError::Refused(text));
        }
        let scope = format!("repository:{}:pull", self.reference.repository);
        let query = [("service", field("service")), ("scope", Some(scope))];
        let mut request = self.agent.get(&realm);
        for (name, value) in query {
            if let Some(value) = value {
                request = request.query(name, value);
            }
        }
        if let Some(own) = &own {
            request = request.header(AUTHORIZATION, own);
        }
        let registry = self.reference.registry.clone();
        let answer = request.call().map_err(|error| RegistryError::Reach {
            registry: registry.clone(),
            source: Box::new(error),
        })?;
        if answer.status() != StatusCode::OK {
            return Err(RegistryError::Denied { registry, what: self.reference.to_string() });
        }
        let mut text = String::new();
        let body = answer.into_body().into_reader().take(MAX_TOKEN).read_to_string(&mut text);
        body.map_err(|source| RegistryError::Read { what: "a token".into(), source })?;
        let token: Token = serde_json::from_str(&text)
            .map_err(|source| RegistryError::Form { what: "the token".into(), source })?;
        Ok(Some(format!("Bearer {}", token.token)))
    }
}
