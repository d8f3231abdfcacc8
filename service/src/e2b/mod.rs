//! E2B's API, so that its published clients make and use the same sandboxes.
//!
//! The clients speak to two servers: one that makes sandboxes, and one in each sandbox. Both are
//! this one. A request to a sandbox names it in a header, in its host name or by a signature.
//!
//! | module | content |
//! | --- | --- |
//! | `door`, `state` | which requests are E2B's, who may send them, and their paths |
//! | `signature`, `error` | signed addresses of files; errors as these clients read them |
//! | `sandboxes`, `network`, `metrics`, `snapshots`, `templates` | the server that makes sandboxes |
//! | `connect` | calls as Connect frames them |
//! | `process`, `follow`, `inputs` | commands and terminals |
//! | `filesystem`, `files`, `accounts` | files of a guest and their owners |
//! | `watchers`, `collected` | changes of files |
//! | `code` | the code interpreter |

mod accounts;
mod code;
mod collected;
mod connect;
mod door;
mod error;
mod files;
mod filesystem;
mod follow;
mod inputs;
mod metrics;
mod network;
mod process;
mod sandboxes;
mod signature;
mod snapshots;
mod state;
mod templates;
mod watchers;

pub use door::beside;
