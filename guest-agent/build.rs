//! Tells `pvmm-agent-image`, which builds the agent with flags of its own, where its source is.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::metadata=source={}", env!("CARGO_MANIFEST_DIR"));
}
