//! The network of a sandbox as E2B's clients describe it, as rules of this server.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::audit::Act;
use crate::blocking::to_the_end;
use crate::error::ApiError;
use crate::extract::{Id, Owner};
use crate::resources::egress;

use super::error::{Checked, CheckedJson, Refused};
use super::state::Door;

/// The rule that stands for every address.
const ALL: &str = "*";
/// The ways in which clients write every address.
const EVERYTHING: [&str; 2] = ["0.0.0.0/0", "::/0"];

/// The wishes of a client.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Network {
    allow_out: Option<Vec<String>>,
    deny_out: Option<Vec<String>>,
    /// Whether ports need no token; they do if the client does not say.
    pub allow_public_traffic: Option<bool>,
    #[serde(flatten)]
    other: Map<String, Value>,
}

impl Network {
    /// Returns the rules for a sandbox; `None` leaves them to the server.
    pub fn rules(&self, internet: Option<bool>) -> Result<Option<Vec<String>>, ApiError> {
        let known = ["allow_internet_access", "allowInternetAccess"];
        let is_set = |value: &Value| !matches!(value, Value::Null | Value::Bool(true));
        let other =
            self.other.iter().find(|(name, value)| is_set(value) && !known.contains(&&name[..]));
        if let Some((name, _)) = other {
            let message = format!("network.{name}: pvmm has rules by address and by name only");
            return Err(ApiError::not_implemented(message));
        }
        let is_all = |rule: &String| EVERYTHING.contains(&&rule[..]);
        let denied = self.deny_out.as_deref().unwrap_or_default();
        if let Some(rule) = denied.iter().find(|rule| !is_all(rule)) {
            let message = format!(
                "network.denyOut: '{}': what is not allowed is denied; deny 0.0.0.0/0 and name \
                 what is allowed",
                crate::extract::shown(rule)
            );
            return Err(ApiError::not_implemented(message));
        }
        let name = |rule: &String| if is_all(rule) { ALL.to_owned() } else { rule.clone() };
        let allowed: Vec<_> = self.allow_out.iter().flatten().map(name).collect();
        Ok(match (internet, denied.is_empty()) {
            _ if !allowed.is_empty() => Some(allowed),
            (Some(false), _) | (_, false) => Some(Vec::new()),
            (Some(true), true) => Some(vec![ALL.to_owned()]),
            (None, true) => None,
        })
    }
}

/// The body of a change.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Change {
    allow_internet_access: Option<bool>,
    #[serde(flatten)]
    network: Network,
}

/// `PUT /sandboxes/{id}/network`
pub async fn put(
    State(door): State<Arc<Door>>,
    Owner(owner): Owner,
    Checked(Id(id)): Checked<Id>,
    CheckedJson(body): CheckedJson<Change>,
) -> Result<StatusCode, Refused> {
    let rules = body.network.rules(body.allow_internet_access)?;
    let rules = rules.unwrap_or_else(|| vec![ALL.to_owned()]);
    door.app.find(&id)?;
    let outcome = to_the_end(egress::set(Arc::clone(&door.app), id.clone(), rules)).await;
    door.app.audit.write(&Act::new("egress", &owner, &id).outcome(&outcome));
    outcome?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn rules(network: Value, internet: Option<bool>) -> Result<Option<Vec<String>>, ApiError> {
        serde_json::from_value::<Network>(network).unwrap().rules(internet)
    }

    #[test]
    fn network_becomes_rules() {
        let some = |rules: &[&str]| Some(rules.iter().map(|rule| (*rule).to_owned()).collect());
        assert_eq!(rules(json!({}), None).unwrap(), None);
        assert_eq!(rules(json!({}), Some(true)).unwrap(), some(&["*"]));
        assert_eq!(rules(json!({}), Some(false)).unwrap(), some(&[]));
        let named = json!({ "denyOut": ["0.0.0.0/0"], "allowOut": ["example.com"] });
        assert_eq!(rules(named, None).unwrap(), some(&["example.com"]));
        assert_eq!(rules(json!({ "denyOut": ["0.0.0.0/0"] }), None).unwrap(), some(&[]));
    }

    #[test]
    fn wish_that_cannot_be_kept_is_refused() {
        for network in
            [json!({ "denyOut": ["192.0.2.1"] }), json!({ "egressProxy": { "url": "x" } })]
        {
            assert_eq!(rules(network, None).unwrap_err().status, 501);
        }
    }
}
