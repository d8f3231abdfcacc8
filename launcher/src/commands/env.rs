//! `pvmm env`: prints the variables with which clients find the service that runs here.

use pvmm_sandbox::vm_dir::Base;
use pvmm_service::Announcement;

use crate::cli::Env;
use crate::exit::Outcome;
use crate::output;

pub fn env(args: Env) -> Outcome {
    let service = Announcement::find(Base::open()?.path())?;
    let variables = variables(&service);
    if args.json {
        let object: serde_json::Map<_, _> =
            variables.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        output::json(&object)?;
    } else {
        for (name, value) in variables {
            output::line(&format!("export {name}={}", quoted(value)))?;
        }
    }
    Ok(0)
}

/// Returns the variables that the published clients and ours read, with their values.
fn variables(service: &Announcement) -> Vec<(&'static str, &str)> {
    let (url, token) = (service.url.as_str(), service.token.as_str());
    let mut found = vec![("PVMM_API", url), ("PVMM_API_KEY", token)];
    // The clients of others have no word for a socket in the file system.
    if !url.starts_with("unix:") {
        found.extend([
            ("PANDASTACK_API", url),
            ("PANDASTACK_API_KEY", token),
            ("E2B_API_URL", url),
            ("E2B_SANDBOX_URL", url),
            ("E2B_API_KEY", token),
        ]);
    }
    found
}

/// Returns a value as one word of a shell.
fn quoted(value: &str) -> String {
    format!("'{}'", value.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(url: &str) -> Announcement {
        Announcement { url: url.into(), token: "pvmm_x".into() }
    }

    #[test]
    fn socket_is_for_our_own_client_only() {
        assert_eq!(variables(&service("http://127.0.0.1:8088")).len(), 7);
        let names: Vec<_> = variables(&service("unix:/run/x")).iter().map(|v| v.0).collect();
        assert_eq!(names, ["PVMM_API", "PVMM_API_KEY"]);
    }

    #[test]
    fn value_is_one_word_whatever_is_in_it() {
        assert_eq!(quoted("it's $x"), r"'it'\''s $x'");
    }
}
