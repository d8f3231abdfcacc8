//! Compares `docs/openapi.json` with the router: each has every operation of the other, with equal
//! bodies.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::super::http::Method;
use super::{Routed, route};

const METHODS: [(&str, Method); 4] = [
    ("get", Method::Get),
    ("put", Method::Put),
    ("patch", Method::Patch),
    ("delete", Method::Delete),
];

struct Api(Value);

impl Api {
    fn read() -> Self {
        let text = include_str!("../../../docs/openapi.json");
        Self(serde_json::from_str(text).expect("docs/openapi.json is JSON"))
    }

    /// Lists path, method, and the schema of the body, if there is one.
    fn operations(&self) -> Vec<(String, &'static str, Method, Option<&Value>)> {
        let mut operations = Vec::new();
        for (path, item) in self.0["paths"].as_object().expect("paths") {
            for (name, method) in METHODS {
                if let Some(operation) = item.get(name) {
                    let schema = operation.pointer("/requestBody/content/application~1json/schema");
                    operations.push((path.clone(), name, method, schema));
                }
            }
        }
        operations
    }

    fn resolve<'a>(&'a self, schema: &'a Value) -> &'a Value {
        let Some(name) = schema["$ref"].as_str() else { return schema };
        self.0.pointer(name.trim_start_matches('#')).unwrap_or_else(|| panic!("no {name}"))
    }

    /// Builds a minimal value of a schema: only required fields.
    fn least(&self, schema: &Value) -> Value {
        let schema = self.resolve(schema);
        if let Some(choices) = schema["oneOf"].as_array().filter(|_| schema.get("type").is_none()) {
            return self.least(&choices[0]);
        }
        if let Some(values) = schema["enum"].as_array() {
            return values[0].clone();
        }
        match kinds(schema)[..] {
            ["string", ..] if schema["format"] == "ipv4" => json!("169.254.169.254"),
            // Numbers as text have a pattern with digits.
            ["string", ..] if schema["pattern"].to_string().contains("[0-9") => json!("1"),
            ["string", ..] => json!("x"),
            ["integer", ..] => schema.get("minimum").cloned().unwrap_or(json!(0)),
            ["boolean", ..] => json!(true),
            ["array", ..] => json!([self.least(&schema["items"])]),
            ["object", ..] if schema.get("properties").is_none() => json!({}),
            ["object", ..] => self.bodies(schema)[0].clone(),
            _ => json!({}),
        }
    }

    /// Builds one object for each way in which it can be minimal.
    fn bodies(&self, schema: &Value) -> Vec<Value> {
        let schema = self.resolve(schema);
        let Some(properties) = schema["properties"].as_object() else { return vec![json!({})] };
        let named = |list: &Value| -> Vec<String> {
            let list = list.as_array().cloned().unwrap_or_default();
            list.iter().filter_map(Value::as_str).map(str::to_owned).collect()
        };
        let mut required = named(&schema["required"]);
        if schema["minProperties"] == 1 {
            required.extend(properties.keys().next().cloned());
        }
        let alternatives = schema["oneOf"].as_array().cloned().unwrap_or_else(|| vec![json!({})]);
        let mut bodies = Vec::new();
        for alternative in alternatives {
            let names = required.iter().cloned().chain(named(&alternative["required"]));
            let body: Map<String, Value> =
                names.map(|name| (name.clone(), self.least(&properties[&name]))).collect();
            bodies.push(Value::Object(body));
        }
        // One body for each value of a required enum field.
        for (name, property) in properties.iter().filter(|(name, _)| required.contains(name)) {
            let values = property["enum"].as_array().into_iter().flatten();
            for value in values.filter(|value| !value.is_null()) {
                let mut body = bodies[0].clone();
                body[name] = value.clone();
                bodies.push(body);
            }
        }
        bodies
    }
}

fn kinds(schema: &Value) -> Vec<&str> {
    match &schema["type"] {
        Value::String(kind) => vec![kind],
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    }
}

fn ask(method: Method, path: &str, body: Option<&Value>) -> Result<Routed, String> {
    let path = match path.split_once('{') {
        Some((start, _)) => format!("{start}x"),
        None => path.to_owned(),
    };
    let body = body.map(Value::to_string);
    route(method, &path, body.as_ref().map(String::as_bytes)).map_err(|refusal| refusal.message)
}

#[test]
fn every_operation_of_the_file_is_routed_with_its_bodies() {
    let api = Api::read();
    for (path, name, method, schema) in api.operations() {
        let Some(schema) = schema else {
            // An unsupported operation takes any body, but needs one.
            let body = matches!(name, "put" | "patch").then(|| json!({}));
            ask(method, &path, body.as_ref()).unwrap_or_else(|e| panic!("{name} {path}: {e}"));
            continue;
        };
        let taken = |body: &Value| {
            ask(method, &path, Some(body)).unwrap_or_else(|e| panic!("{name} {path} {body}: {e}"))
        };
        for body in api.bodies(schema) {
            taken(&body);
        }
        let body = api.bodies(schema)[0].clone();
        let schema = api.resolve(schema);
        let alternatives = schema["oneOf"].to_string();
        for (key, property) in schema["properties"].as_object().into_iter().flatten() {
            // Of two fields that exclude each other, the other is in one of the bodies above.
            if alternatives.contains(&format!("\"{key}\"")) {
                continue;
            }
            let mut with = body.clone();
            with[key] = api.least(property);
            taken(&with);
            let nullable = property.get("oneOf").is_some() || kinds(property).contains(&"null");
            if nullable && schema["minProperties"].is_null() {
                with[key] = Value::Null;
                taken(&with);
            }
        }
    }
}

#[test]
fn field_that_is_required_or_unknown_in_the_file_is_so_for_the_router() {
    let api = Api::read();
    for (path, name, method, schema) in api.operations() {
        let Some(schema) = schema.map(|schema| api.resolve(schema)) else { continue };
        let refused = |body: &Value| {
            assert!(ask(method, &path, Some(body)).is_err(), "{name} {path} {body}");
        };
        let body = api.bodies(schema)[0].clone();
        for key in schema["required"].as_array().into_iter().flatten() {
            let mut without = body.clone();
            without.as_object_mut().expect("an object").remove(key.as_str().expect("a name"));
            refused(&without);
        }
        if schema["additionalProperties"] == false {
            let mut with = body.clone();
            with["unknown"] = json!(1);
            refused(&with);
        }
    }
}

#[test]
fn operation_that_is_not_in_the_file_is_not_routed() {
    let api = Api::read();
    let listed: BTreeSet<_> =
        api.operations().into_iter().map(|(path, name, ..)| (path, name)).collect();
    for path in listed.iter().map(|(path, _)| path) {
        for (name, method) in METHODS {
            if listed.contains(&(path.clone(), name)) {
                continue;
            }
            let body = matches!(name, "put" | "patch").then(|| json!({}));
            let error = ask(method, path, body.as_ref()).expect_err(path);
            assert!(
                error.starts_with("Invalid request method and/or path"),
                "{name} {path}: {error}"
            );
        }
    }
}

#[test]
fn every_request_there_is_comes_from_an_operation_of_the_file() {
    let api = Api::read();
    let mut reached = BTreeSet::new();
    for (path, name, method, schema) in api.operations() {
        let nothing = matches!(name, "put" | "patch").then(|| json!({}));
        let bodies = match schema {
            Some(schema) => api.bodies(schema).into_iter().map(Some).collect(),
            None => vec![nothing],
        };
        for body in bodies {
            let request = ask(method, &path, body.as_ref()).expect("it was routed before").request;
            reached.insert(word(&format!("{request:?}")));
            if let super::ApiCall::Unsupported(what) = request {
                reached.insert(format!("{what:?}"));
            }
        }
    }
    let source = include_str!("routes.rs");
    for name in ["pub enum ApiCall {", "pub enum Unsupported {"] {
        let (_, rest) = source.split_once(name).expect("the enum");
        let (list, _) = rest.split_once("\n}").expect("its end");
        let variants = list.lines().map(str::trim).filter(|line| !line.starts_with("//"));
        for variant in variants.filter(|line| !line.is_empty()) {
            assert!(reached.contains(&word(variant)), "{variant} is not in docs/openapi.json");
        }
    }
}

fn word(text: &str) -> String {
    text.chars().take_while(char::is_ascii_alphanumeric).collect()
}
