//! Fetches container images from registries that speak the OCI distribution API.
//!
//! A separate crate, because only the launcher needs an HTTP client. [`pull`] puts the parts of an
//! image into a folder, from which `pvmm_images::oci` reads them. Nothing that a registry sends is
//! trusted: every part has a cap and is compared with its digest before it gets its name.

mod client;
mod credentials;
mod pull;
mod reference;

pub use client::RegistryError;
pub use credentials::Credentials;
pub use pull::{known, pull};
pub use reference::Reference;
