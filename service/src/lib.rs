//! The HTTP server of pvmm: sandboxes for agents, over the REST API that published clients speak.
//!
//! Handlers are thin: each takes a request apart, calls the library of sandboxes or the agent in a
//! guest, and writes the answer. Monitors are processes of their own, so the server can end and
//! come back while they run on.
//!
//! | module | content |
//! | --- | --- |
//! | `server`, `listen`, `passed` | sockets, TLS, shutdown |
//! | `stdio` | `pvmm mcp`: one conversation over standard input and output |
//! | `mcp` | tools for agents, over both |
//! | `routes`, `resources` | paths and their handlers, one file for each resource |
//! | `e2b` | the same sandboxes for E2B's clients |
//! | `preview`, `proxy` | ports of sandboxes, at host names of their own |
//! | `keys`, `credentials` | what opens a sandbox, and what no guest may see |
//! | `life` | start, use, hibernate, wake, end; restart of the server |
//! | `builds`, `form`, `upload` | templates that clients send, and their builds |
//! | `store` | the database and its migrations |
//! | `tokens`, `limits`, `audit` | who may do how much, and what was done |
//! | `metrics`, `access`, `json_log`, `traces` | numbers, logs and traces for operators |
//! | `page` | the page for people |

mod access;
mod announce;
mod app;
mod audit;
mod bake;
mod blocking;
mod builds;
mod clock;
mod credentials;
mod data_dir;
mod e2b;
mod error;
mod extract;
mod form;
mod ids;
mod json_log;
mod keys;
mod life;
mod limits;
mod listen;
mod mcp;
mod metrics;
mod options;
mod page;
mod passed;
mod preview;
mod proxy;
mod resources;
mod routes;
mod server;
mod sse;
mod stdio;
mod store;
mod text;
mod tls;
mod tokens;
mod traces;
mod upload;

pub use announce::Announcement;
pub use clock::rfc3339;
pub use json_log::JsonLog;
pub use options::{DEFAULT_LISTEN, Limits, Listen, McpOptions, ServeOptions, TlsFiles};
pub use server::serve;
pub use stdio::serve_stdio;
pub use traces::Collector;
