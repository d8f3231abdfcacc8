//! Arguments of `pvmm template push` and `pull`, and of `pvmm snapshots push` and `pull`.

use std::path::PathBuf;

use clap::{Args, ValueHint};

/// The flags of a push.
#[derive(Debug, Args)]
pub struct PushFlags {
    /// Folder, or s3://BUCKET/PREFIX with the variables AWS_ENDPOINT_URL, AWS_REGION,
    /// AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY
    #[arg(value_name = "STORE", value_hint = ValueHint::DirPath)]
    pub store: String,
    /// Send what the store has, too: repairs a store with damaged chunks
    #[arg(long)]
    pub force: bool,
    /// Encrypt with the bytes of this file, so that the store can neither read nor change it
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub key: Option<PathBuf>,
    /// The result as JSON
    #[arg(long)]
    pub json: bool,
}

/// The flags of a pull.
#[derive(Debug, Args)]
pub struct PullFlags {
    /// Name in a store; with '@sha256:DIGEST', as a push prints it, only that one
    #[arg(value_name = "STORE/NAME", value_hint = ValueHint::AnyPath)]
    pub from: String,
    /// Key that it was sent with
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub key: Option<PathBuf>,
    /// The result as JSON
    #[arg(long)]
    pub json: bool,
}
