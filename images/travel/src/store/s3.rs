//! A store in a bucket of Amazon S3, or of any server that speaks its API.

use std::io::{self, Read};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustls::crypto::ring;
use rusty_s3::actions::S3Action;
use rusty_s3::{Credentials, UrlStyle};
use ureq::http::Response;
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::{Agent, Body};

use crate::error::TravelError;
use crate::manifest::check_name;

const CONNECT: Duration = Duration::from_secs(20);
/// How long a server may take to begin its answer.
const ANSWER: Duration = Duration::from_secs(60);
/// How long one object may take.
const OBJECT: Duration = Duration::from_secs(300);
/// How long a signed request is valid.
const SIGNED: Duration = Duration::from_secs(900);
/// Rests before a request that failed is sent again.
const RESTS: [Duration; 3] =
    [Duration::from_millis(200), Duration::from_millis(800), Duration::from_millis(3200)];
const DEFAULT_REGION: &str = "us-east-1";

pub struct Bucket {
    bucket: rusty_s3::Bucket,
    credentials: Option<Credentials>,
    /// The start of every key: empty, or with a slash at its end.
    prefix: String,
    text: String,
    agent: Agent,
}

impl Bucket {
    /// Opens `BUCKET/PREFIX` with the settings that `variable` returns.
    pub fn open(
        text: &str,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, TravelError> {
        let refused = |why: &str| TravelError::Address(format!("s3://{text}: {why}"));
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let (name, prefix) = text.split_once('/').unwrap_or((text, ""));
        let prefix = prefix.trim_end_matches('/');
        check_name(name).map_err(|_| refused("this is not a bucket's name"))?;
        if !prefix.is_empty() && !prefix.split('/').all(|part| check_name(part).is_ok()) {
            return Err(refused("the prefix has other characters than letters, digits, . _ -"));
        }
        let region = variable("AWS_REGION").or_else(|| variable("AWS_DEFAULT_REGION"));
        let region = region.unwrap_or_else(|| DEFAULT_REGION.to_owned());
        let given = variable("AWS_ENDPOINT_URL_S3").or_else(|| variable("AWS_ENDPOINT_URL"));
        // A server with an address of its own seldom has a name for each bucket.
        let style = if given.is_some() { UrlStyle::Path } else { UrlStyle::VirtualHost };
        let url = given.unwrap_or_else(|| format!("https://s3.{region}.amazonaws.com"));
        let bad_url = |_| refused("AWS_ENDPOINT_URL is not a URL such as http://127.0.0.1:9000");
        let url = url.parse().map_err(bad_url)?;
        let bucket = rusty_s3::Bucket::new(url, style, name.to_owned(), region)
            .map_err(|error| refused(&format!("AWS_ENDPOINT_URL: {error}")))?;
        let credentials = match (variable("AWS_ACCESS_KEY_ID"), variable("AWS_SECRET_ACCESS_KEY")) {
            (Some(key), Some(secret)) => Some(match variable("AWS_SESSION_TOKEN") {
                Some(token) => Credentials::new_with_token(key, secret, token),
                None => Credentials::new(key, secret),
            }),
            _ => None,
        };
        let slash = if prefix.is_empty() { "" } else { "/" };
        Ok(Self {
            bucket,
            credentials,
            prefix: format!("{prefix}{slash}"),
            text: format!("s3://{text}"),
            agent: agent(),
        })
    }

    pub fn has(&self, key: &str) -> Result<bool, TravelError> {
        let name = format!("{}{key}", self.prefix);
        let url = self.bucket.head_object(self.credentials.as_ref(), &name).sign(SIGNED);
        let answer = self.send(key, || self.agent.head(url.as_str()).call())?;
        Ok(answer.is_some())
    }

    pub fn put(&self, key: &str, bytes: &[u8]) -> Result<(), TravelError> {
        let name = format!("{}{key}", self.prefix);
        let url = self.bucket.put_object(self.credentials.as_ref(), &name).sign(SIGNED);
        match self.send(key, || self.agent.put(url.as_str()).send(bytes))? {
            Some(_) => Ok(()),
            None => Err(TravelError::Missing {
                store: self.text.clone(),
                what: format!("bucket {}", self.bucket.name()),
            }),
        }
    }

    /// Fetches an object. An answer that breaks off is asked for again.
    pub fn get(&self, key: &str, most: u64) -> Result<Option<Vec<u8>>, TravelError> {
        let name = format!("{}{key}", self.prefix);
        let url = self.bucket.get_object(self.credentials.as_ref(), &name).sign(SIGNED);
        let mut rests = RESTS.iter();
        loop {
            let Some(answer) = self.send(key, || self.agent.get(url.as_str()).call())? else {
                return Ok(None);
            };
            let mut bytes = Vec::new();
            let body = answer.into_body().into_reader();
            let read = body.take(most + 1).read_to_end(&mut bytes);
            let failed = match read {
                Ok(_) if bytes.len() as u64 <= most => return Ok(Some(bytes)),
                Ok(_) => return Err(self.failed(key, io::Error::other("it is too large"))),
                Err(error) => error,
            };
            match rests.next() {
                Some(rest) => thread::sleep(*rest),
                None => return Err(self.failed(key, failed)),
            }
        }
    }

    /// Sends a request until it has an answer that will not change: `None` if there is no such
    /// object.
    fn send(
        &self,
        key: &str,
        request: impl Fn() -> Result<Response<Body>, ureq::Error>,
    ) -> Result<Option<Response<Body>>, TravelError> {
        let (store, what) = (self.text.clone(), key.to_owned());
        let mut rests = RESTS.iter();
        loop {
            let failed = match request() {
                Ok(answer) => match answer.status().as_u16() {
                    200..=299 => return Ok(Some(answer)),
                    404 => return Ok(None),
                    401 | 403 => return Err(TravelError::Denied { store, what }),
                    status @ (408 | 429 | 500..=599) => {
                        TravelError::Status { store: store.clone(), what: what.clone(), status }
                    }
                    status => return Err(TravelError::Status { store, what, status }),
                },
                Err(error) => TravelError::Reach { store: store.clone(), source: Box::new(error) },
            };
            match rests.next() {
                Some(rest) => thread::sleep(*rest),
                None => return Err(failed),
            }
        }
    }

    fn failed(&self, key: &str, source: io::Error) -> TravelError {
        TravelError::Store { store: self.text.clone(), what: key.to_owned(), source }
    }
}

fn agent() -> Agent {
    let roots = rustls_native_certs::load_native_certs().certs;
    let roots = roots.iter().map(|root| Certificate::from_der(root).to_owned());
    let tls = TlsConfig::builder()
        .root_certs(RootCerts::new_with_certs(&roots.collect::<Vec<_>>()))
        .unversioned_rustls_crypto_provider(Arc::new(ring::default_provider()))
        .build();
    Agent::config_builder()
        .tls_config(tls)
        .http_status_as_error(false)
        // A signed request is for one server.
        .max_redirects(0)
        .timeout_connect(Some(CONNECT))
        .timeout_recv_response(Some(ANSWER))
        .timeout_global(Some(OBJECT))
        .user_agent(concat!("pvmm/", env!("CARGO_PKG_VERSION")))
        .build()
        .into()
}
