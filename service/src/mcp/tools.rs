//! The tools as models read them: names, descriptions, arguments.

use std::sync::Arc;

use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use serde_json::{Value, json};

use super::arguments::{DEFAULT_READ, DEFAULT_TIME_S, MAX_READ, MAX_TIME_S};

/// The text that a model reads before it uses any tool.
pub const INSTRUCTIONS: &str = "\
Sandboxes are disposable Linux computers with their own kernel, for code that must not touch the \
user's machine. The conversation has one sandbox of its own: it is made at the first call that \
needs one, keeps files, processes and variables between calls, and ends with the conversation. \
You are root in it. It has no network, unless the user has allowed some hosts. Prefer \
sandbox_run_code for Python and sandbox_exec for shell commands. Before a risky step call \
sandbox_checkpoint; sandbox_rollback undoes everything since, sandbox_checkout goes to any \
checkpoint, and sandbox_diff shows which files differ. To try several ways at once, use \
sandbox_fork and pass each fork's id as 'sandbox'.";

/// How a tool treats the world, for hosts that ask the user first.
enum Effect {
    /// The tool changes nothing.
    Reads,
    /// The tool adds, and destroys nothing.
    Adds,
    /// The tool may destroy what is in a sandbox.
    Changes,
}

/// A tool: its name, how it treats the world, its description, its arguments and those of them that
/// must be given.
type Row = (&'static str, Effect, &'static str, Value, &'static [&'static str]);

fn rows() -> [Row; 14] {
    let sandbox = json!({
        "type": "string",
        "description": "Id of a sandbox; without it, the conversation's own sandbox.",
    });
    let timeout = json!({
        "type": "integer", "minimum": 1, "maximum": MAX_TIME_S,
        "description": format!("Time limit in seconds; {DEFAULT_TIME_S} by default."),
    });
    let path = json!({ "type": "string", "description": "Absolute, or relative to /root." });
    let encoding = json!({
        "type": "string", "enum": ["text", "base64"],
        "description": "text (UTF-8, the default), or base64 for other bytes.",
    });
    [
        (
            "sandbox_create",
            Effect::Adds,
            "Makes a new sandbox and returns its id. It becomes the conversation's own sandbox; a \
             former one runs on under its id. Only needed for another template or size, or for a \
             fresh start: other tools make a sandbox by themselves.",
            json!({
                "template": { "type": "string", "description": "Template, such as base." },
                "cpus": { "type": "integer", "minimum": 1, "maximum": 32 },
                "memory_mb": { "type": "integer", "minimum": 128, "description": "MiB." },
                "ttl_seconds": {
                    "type": "integer", "minimum": 1,
                    "description": "The sandbox ends after this time without a call.",
                },
            }),
            &[],
        ),
        (
            "sandbox_run_code",
            Effect::Changes,
            "Runs code in an interpreter of the sandbox that keeps its variables and imports \
             between calls. Returns what was printed, the value of the last expression, images \
             (matplotlib figures, or display(value)) and the stack trace of an exception.",
            json!({
                "code": { "type": "string", "description": "The source code." },
                "language": {
                    "type": "string", "enum": ["python", "javascript"],
                    "description": "python by default; javascript if the template has Node.js.",
                },
                "timeout_seconds": timeout,
                "sandbox": sandbox,
            }),
            &["code"],
        ),
        (
            "sandbox_exec",
            Effect::Changes,
            "Runs a shell command in the sandbox as root and returns its exit code, stdout and \
             stderr. Each call is a new shell that begins in /root. Background processes go on \
             after the call if their output goes to a file: 'server > log 2>&1 &'.",
            json!({
                "command": { "type": "string", "description": "A line or script for bash or sh." },
                "cwd": { "type": "string", "description": "Absolute working directory." },
                "timeout_seconds": timeout,
                "sandbox": sandbox,
            }),
            &["command"],
        ),
        (
            "sandbox_read_file",
            Effect::Reads,
            "Reads a file of the sandbox: text, in parts if it is long, or an image that you can \
             see (PNG, JPEG, GIF, WebP).",
            json!({
                "path": path,
                "offset": {
                    "type": "integer", "minimum": 0,
                    "description": "The first byte to read; 0 by default.",
                },
                "limit": {
                    "type": "integer", "minimum": 1, "maximum": MAX_READ,
                    "description": format!("The most bytes to read; {DEFAULT_READ} by default."),
                },
                "encoding": encoding,
                "sandbox": sandbox,
            }),
            &["path"],
        ),
        (
            "sandbox_write_file",
            Effect::Changes,
            "Writes a whole file of the sandbox, replaces an old one and makes missing \
             directories. At most 8 MiB.",
            json!({
                "path": path,
                "content": { "type": "string" },
                "encoding": encoding,
                "sandbox": sandbox,
            }),
            &["path", "content"],
        ),
        (
            "sandbox_list_files",
            Effect::Reads,
            "Lists a directory of the sandbox: kind, size and name of each entry.",
            json!({
                "path": {
                    "type": "string",
                    "description": "Absolute, or relative to /root; /root by default.",
                },
                "sandbox": sandbox,
            }),
            &[],
        ),
        (
            "sandbox_fork",
            Effect::Adds,
            "Copies a running sandbox with its memory, processes, variables and files, as often as \
             asked, in one moment. Returns the ids of the copies; the sandbox itself goes on. The \
             copies do not see each other's changes.",
            json!({
                "count": {
                    "type": "integer", "minimum": 1, "maximum": 16,
                    "description": "The number of copies; 1 by default.",
                },
                "sandbox": sandbox,
            }),
            &[],
        ),
        (
            "sandbox_checkpoint",
            Effect::Adds,
            "Remembers the present state of a sandbox (memory, processes, variables, files) for \
             sandbox_rollback and sandbox_checkout. Checkpoints form a tree: after a checkout the \
             next one is a branch. Returns its name.",
            json!({
                "name": {
                    "type": "string",
                    "description": "Letters, digits, '.', '_', '-'; by default the next number.",
                },
                "sandbox": sandbox,
            }),
            &[],
        ),
        (
            "sandbox_rollback",
            Effect::Changes,
            "Takes a sandbox back to the checkpoint that it stands on, the last that was taken or \
             checked out: everything that happened in it since is undone. Can be repeated.",
            json!({ "sandbox": sandbox }),
            &[],
        ),
        (
            "sandbox_checkout",
            Effect::Changes,
            "Takes a sandbox to any of its checkpoints, older, newer or of another branch: memory, \
             processes, variables and files. What happened since the last checkpoint is lost; take \
             one first to keep it.",
            json!({
                "name": { "type": "string", "description": "Name of the checkpoint." },
                "sandbox": sandbox,
            }),
            &["name"],
        ),
        (
            "sandbox_log",
            Effect::Reads,
            "Draws the tree of a sandbox's checkpoints, with their times; marks the one that the \
             sandbox stands on.",
            json!({ "sandbox": sandbox }),
            &[],
        ),
        (
            "sandbox_diff",
            Effect::Reads,
            "Lists the files that were added, changed and removed between two moments of a \
             sandbox, with their sizes, and on request the lines of text files that differ. The \
             sandbox is not touched.",
            json!({
                "from": { "type": "string", "description": "The older checkpoint." },
                "to": {
                    "type": "string",
                    "description": "The newer checkpoint; the present by default.",
                },
                "path": {
                    "type": "string",
                    "description": "Only files in this directory; all by default.",
                },
                "patch": {
                    "type": "boolean",
                    "description": "Whether to show the lines that differ; false by default.",
                },
                "sandbox": sandbox,
            }),
            &["from"],
        ),
        (
            "sandbox_list",
            Effect::Reads,
            "Lists the sandboxes that there are, as JSON. 'own' marks the one that calls without \
             'sandbox' use.",
            json!({}),
            &[],
        ),
        (
            "sandbox_terminate",
            Effect::Changes,
            "Ends a sandbox and deletes all that is in it. If it was the conversation's own, the \
             next call makes a new one.",
            json!({ "sandbox": sandbox }),
            &[],
        ),
    ]
}

/// Returns the tools.
pub fn tools() -> Vec<Tool> {
    rows().into_iter().map(tool).collect()
}

fn tool((name, effect, description, properties, required): Row) -> Tool {
    let mut schema = JsonObject::new();
    schema.insert("type".to_owned(), json!("object"));
    schema.insert("properties".to_owned(), properties);
    schema.insert("required".to_owned(), json!(required));
    schema.insert("additionalProperties".to_owned(), json!(false));
    let annotations = ToolAnnotations::new().open_world(false);
    let annotations = match effect {
        Effect::Reads => annotations.read_only(true),
        Effect::Adds => annotations.read_only(false).destructive(false),
        Effect::Changes => annotations.read_only(false).destructive(true),
    };
    Tool::new(name, description, Arc::new(schema)).with_annotations(annotations)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tool_says_what_it_does_and_what_it_takes() {
        for tool in tools() {
            assert!(tool.name.starts_with("sandbox_"));
            assert!(tool.description.unwrap().ends_with('.'));
            let properties = tool.input_schema["properties"].as_object().unwrap();
            for name in tool.input_schema["required"].as_array().unwrap() {
                assert!(properties.contains_key(name.as_str().unwrap()), "{name}");
            }
        }
    }
}
