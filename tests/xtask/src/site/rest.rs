//! The page of the service's routes, which is made from the OpenAPI file.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use serde_json::Value;

const PAGE: &str = "docs/rest.md";
const API: &str = "docs/api.json";

/// Compares the page with the OpenAPI file, and brings it up to date if they differ. Returns
/// whether it was.
pub fn update(root: &Path) -> Result<bool, String> {
    let text = fs::read_to_string(root.join(API)).map_err(|e| format!("{API}: {e}"))?;
    let api = serde_json::from_str(&text).map_err(|e| format!("{API}: {e}"))?;
    let (new, path) = (page(&api), root.join(PAGE));
    let same = fs::read_to_string(&path).is_ok_and(|old| old == new);
    if !same {
        fs::write(&path, new).map_err(|e| format!("{PAGE}: {e}"))?;
    }
    Ok(same)
}

fn page(api: &Value) -> String {
    let mut groups: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (path, methods) in api["paths"].as_object().into_iter().flatten() {
        for (method, operation) in methods.as_object().into_iter().flatten() {
            if operation.get("responses").is_some() {
                groups.entry(group(path)).or_default().push(row(api, path, method, operation));
            }
        }
    }
    let mut text = String::from(
        "# Routes\n\nMade from [api.json](api.json), the OpenAPI file, by `make site`; \
         [service.md](service.md) describes the\nservice. A field in **bold** is required. An \
         answer other than those named is an error, with one line for people\nin `error` and a \
         word for programs in `code`.\n",
    );
    for (name, rows) in groups {
        let _ = write!(
            text,
            "\n## {name}\n\n| route | | body | answers |\n| --- | --- | --- | --- |\n"
        );
        text.extend(rows);
    }
    text
}

fn group(path: &str) -> &str {
    path.strip_prefix("/v1/").map_or("server", |rest| rest.split('/').next().unwrap_or(rest))
}

fn row(api: &Value, path: &str, method: &str, operation: &Value) -> String {
    let answers: Vec<_> = operation["responses"].as_object().map_or(Vec::new(), |answers| {
        answers.keys().map(String::as_str).filter(|code| !code.starts_with('5')).collect()
    });
    format!(
        "| `{} {path}` | {} | {} | {} |\n",
        method.to_uppercase(),
        operation["summary"].as_str().unwrap_or_default(),
        body(api, &operation["requestBody"]["content"]),
        answers.join(", ")
    )
}

/// Returns the fields of a request's body, or the type of a body that is no JSON.
fn body(api: &Value, content: &Value) -> String {
    let Some((kind, media)) = content.as_object().and_then(|kinds| kinds.iter().next()) else {
        return String::new();
    };
    let mut schema = &media["schema"];
    if let Some(name) = schema["$ref"].as_str().and_then(|name| name.rsplit('/').next()) {
        schema = &api["components"]["schemas"][name];
    }
    let Some(fields) = schema["properties"].as_object() else {
        return format!("`{kind}`");
    };
    let required =
        |name| schema["required"].as_array().is_some_and(|all| all.iter().any(|one| one == name));
    let shown = fields.keys().map(|name| {
        if required(name.as_str()) { format!("**`{name}`**") } else { format!("`{name}`") }
    });
    shown.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_has_routes_by_group_with_fields_and_answers() {
        let api = serde_json::json!({
            "paths": { "/v1/pool/{id}": { "post": {
                "summary": "Fill it",
                "requestBody": { "content": { "application/json": { "schema": {
                    "$ref": "#/components/schemas/Fill" } } } },
                "responses": { "201": {}, "404": {}, "500": {} },
            } } },
            "components": { "schemas": { "Fill": {
                "properties": { "count": {}, "name": {} }, "required": ["name"] } } },
        });
        let page = page(&api);
        assert!(page.contains("\n## pool\n"), "{page}");
        let row = "| `POST /v1/pool/{id}` | Fill it | `count`, **`name`** | 201, 404 |\n";
        assert!(page.ends_with(row), "{page}");
    }
}
