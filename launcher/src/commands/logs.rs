//! `pvmm logs`: prints the output of a VM's main command, or of its console.
//!
//! The command's standard output and standard error go to this process's own, in their original
//! order.

use std::io::{self, Read, Write};
use std::time::Duration;

use crate::cli::Logs;
use crate::exit::{Failure, Outcome};
use pvmm_sandbox::log_file::{LogReader, Pieces, Stream};
use pvmm_sandbox::vm_dir::Base;

/// The interval at which `-f` checks for more output.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

pub fn logs(args: Logs) -> Outcome {
    let vm = Base::open()?.find(&args.vm)?;
    let console = args.console || vm.record.command.is_empty();
    // Only a detached VM keeps its command's output; a foreground run's output is on its terminal.
    if !console && vm.record.ephemeral {
        let message = format!("'{}' runs in the foreground, its output is there", vm.label());
        let hint = format!("for its console: pvmm logs --console {}", vm.label());
        return Err(Failure::usage(message).hint(hint));
    }
    let path = if console { vm.dir.run().console_log() } else { vm.dir.run().output_log() };
    let mut reader = LogReader::open(&path)
        .map_err(|error| Failure::fault(format!("cannot read {}: {error}", path.display())))?;
    let mut printer = if console { Printer::Plain } else { Printer::Pieces(Pieces::default()) };
    loop {
        // Checked before reading, so that everything written before the end is printed.
        let ended = !vm.dir.is_alive();
        print_all(&mut reader, &mut printer)?;
        if ended || !args.follow {
            return Ok(0);
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

enum Printer {
    Plain,
    Pieces(Pieces),
}

fn print_all(reader: &mut LogReader, printer: &mut Printer) -> io::Result<()> {
    let (mut stdout, mut stderr) = (io::stdout().lock(), io::stderr().lock());
    let mut buffer = vec![0; 64 << 10];
    loop {
        let count = reader.read(&mut buffer)?;
        if count == 0 {
            return stdout.flush();
        }
        match printer {
            Printer::Plain => stdout.write_all(&buffer[..count])?,
            Printer::Pieces(pieces) => {
                pieces.feed(&buffer[..count], |stream, data| match stream {
                    Stream::Stdout => stdout.write_all(data),
                    Stream::Stderr => stdout.flush().and_then(|()| stderr.write_all(data)),
                })?
            }
        }
    }
}
