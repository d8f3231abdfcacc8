//! The Model Context Protocol: tools with which an agent uses sandboxes.
//!
//! The tools call what the REST API calls, so limits, audit log and listings are the same. Two
//! doors use them: `/mcp` of the service (`http`), and `pvmm mcp` over standard input and output
//! (`stdio.rs`).
//!
//! | module | content |
//! | --- | --- |
//! | `tools` | names, descriptions and arguments of the tools, as models read them |
//! | `arguments` | arguments of a call, checked |
//! | `conversation` | the sandboxes of one conversation, from the first call to the end |
//! | `calls` | what each tool does |
//! | `answer` | answers: text that is cut to size, images |
//! | `handler` | the protocol's requests, by `rmcp` |

mod answer;
mod arguments;
mod calls;
mod conversation;
mod handler;
mod http;
mod tools;

pub use conversation::{Conversation, Defaults};
pub use handler::Handler;
pub use http::route;
