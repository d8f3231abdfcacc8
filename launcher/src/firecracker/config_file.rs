//! `--config-file`: the configuration of a whole VM in one JSON file, booted without any request.

use std::io::Read;
use std::path::Path;

use pvmm::cpu::CpuModifiers;
use pvmm::open;
use serde_json::Value;

use super::before_boot::BeforeBoot;
use super::bodies::Config;
use super::http::Refusal;
use super::logger;
use super::metrics::Metrics;
use super::mmds::Mmds;
use super::routes::Unsupported;

/// The longest file that is read; more than any VM's configuration needs.
const FILE_MAX: u64 = 16 << 20;

/// Reads a text file of bounded length; an error names the file.
pub fn read(path: &Path) -> Result<String, String> {
    let mut text = String::new();
    let mut read =
        || open::file(path, open::Access::Read)?.take(FILE_MAX + 1).read_to_string(&mut text);
    match read() {
        Ok(_) if text.len() as u64 > FILE_MAX => Err(format!("{path:?}: longer than 16 MiB")),
        Ok(_) => Ok(text),
        Err(error) => Err(format!("{path:?}: {error}")),
    }
}

/// Parses JSON and stores it as the content of the metadata service.
pub fn metadata(text: &str, mmds: &mut Mmds) -> Result<(), Refusal> {
    let content: Value = serde_json::from_str(text)
        .map_err(|error| Refusal::bad(format!("metadata: not JSON: {error}")))?;
    mmds.put(content)
}

/// Builds the VM configuration from JSON, each part validated as if it were a separate request.
pub fn apply(text: &str, metrics: &mut Metrics) -> Result<BeforeBoot, Refusal> {
    let config: Config = serde_json::from_str(text)
        .map_err(|error| Refusal::bad(format!("configuration: {error}")))?;
    if let Some(wish) = &config.logger {
        logger::configure(wish)
            .map_err(|error| Refusal::bad(format!("logger: {:?}: {error}", wish.log_path)))?;
    }
    if let Some(wish) = config.metrics.clone() {
        metrics.configure(wish)?;
    }
    for name in config.unknown.keys() {
        log::warn!("The configuration's {name:?} is unknown and has no effect.");
    }
    if !config.pmem.is_empty() {
        return Err(Unsupported::Pmem.refusal());
    }
    if config.memory_hotplug.is_some() {
        return Err(Unsupported::HotplugMemory.refusal());
    }
    let mut before = BeforeBoot::default();
    before.put_machine(config.machine_config)?;
    if let Some(template) = &config.cpu_config {
        before.put_cpu_config(cpu_config(template)?);
    }
    before.put_boot_source(config.boot_source)?;
    for drive in config.drives {
        before.put_drive(drive)?;
    }
    for net in config.network_interfaces {
        before.put_net(net)?;
    }
    config.vsock.map_or(Ok(()), |vsock| before.put_vsock(vsock))?;
    config.balloon.map_or(Ok(()), |balloon| before.put_balloon(balloon))?;
    config.mmds_config.map_or(Ok(()), |mmds| before.put_mmds_config(mmds))?;
    config.entropy.map_or(Ok(()), |entropy| before.put_entropy(entropy))?;
    Ok(before)
}

/// Reads a CPU template, which is a JSON object or the path of a file with one.
fn cpu_config(template: &Value) -> Result<CpuModifiers, Refusal> {
    let refuse = |error: String| Refusal::bad(format!("cpu-config: {error}"));
    let read = match template {
        Value::String(path) => {
            CpuModifiers::from_json(read(Path::new(path)).map_err(refuse)?.as_bytes())
        }
        object => CpuModifiers::from_value(object),
    };
    read.map_err(|error| refuse(error.to_string()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use tempfile::NamedTempFile;

    use super::*;

    fn applied(text: &str) -> Result<BeforeBoot, Refusal> {
        apply(text, &mut Metrics::new("vm"))
    }

    #[test]
    fn file_that_is_whole_describes_a_machine() {
        let mut image = NamedTempFile::new().unwrap();
        image.write_all(&[0; 4096]).unwrap();
        let path = image.path().display();
        let text = format!(
            r#"{{"boot-source":{{"kernel_image_path":"{path}","boot_args":"console=ttyS0"}},
                "drives":[{{"drive_id":"rootfs","path_on_host":"{path}","is_root_device":true,
                            "partuuid":null,"is_read_only":true,"cache_type":"Writeback",
                            "io_engine":"Async","rate_limiter":null}}],
                "machine-config":{{"vcpu_count":2,"mem_size_mib":256,"smt":false}},
                "network-interfaces":[{{"iface_id":"1","host_dev_name":"tap0"}}],
                "mmds-config":{{"network_interfaces":["1"],"version":"V2"}},
                "vsock":{{"guest_cid":3,"uds_path":"/tmp/v"}},
                "entropy":{{}},"balloon":null,"cpu-config":null,"later":1}}"#
        );
        let machine = applied(&text).unwrap().machine().unwrap();
        assert_eq!((machine.vcpus, machine.memory_mib, machine.nets.len()), (2, 256, 1));
        assert_eq!(machine.cmdline, "console=ttyS0 pci=off root=/dev/vda ro");
        assert!(machine.rng);
    }

    #[test]
    fn file_with_a_bad_part_is_refused_by_its_name() {
        for (text, name) in [
            ("{", "configuration"),
            ("{}", "kernel_image_path"),
            (r#"{"machine-config":{"vcpu_count":0,"mem_size_mib":128}}"#, "vcpu_count"),
            (r#"{"drives":[{"drive_id":"a","is_root_device":true,"colour":1}]}"#, "colour"),
            (r#"{"pmem":[{}]}"#, "pmem"),
            (r#"{"cpu-config":{"leaf":1}}"#, "cpu-config: leaf: is not known"),
            (r#"{"cpu-config":"/no/template"}"#, "cpu-config: \"/no/template\""),
            (r#"{"cpu-config":[]}"#, "cpu-config: CPU template: must be an object"),
        ] {
            let message = applied(text).unwrap_err().message;
            assert!(message.contains(name), "{message}");
        }
        assert!(read(Path::new("/no/such/file")).unwrap_err().contains("/no/such/file"));
    }

    #[test]
    fn file_that_is_a_pipe_is_refused_and_waits_for_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        assert!(read(&pipe).unwrap_err().contains("regular file"));
    }
}
