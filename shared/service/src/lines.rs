//! Log lines on a thread of their own: a reader that is slow, stands still or is gone costs lines, not service.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

/// Lines that may wait to be written.
const WAITING: usize = 4096;
/// How long the last lines may take at the end.
const FLUSH_TIME: Duration = Duration::from_millis(500);

enum Message {
    Line(Vec<u8>),
    Flush(SyncSender<()>),
}

/// Hands lines over and never waits; what finds no room is counted and the count is written once there is.
#[derive(Debug, Clone)]
pub(crate) struct Lines {
    sender: SyncSender<Message>,
    lost: Arc<AtomicU64>,
}

impl Lines {
    /// Starts the thread that writes to `out`.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn start(out: impl Write + Send + 'static) -> io::Result<Self> {
        let (sender, receiver) = sync_channel(WAITING);
        let lost = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&lost);
        std::thread::Builder::new().name("log".to_owned()).spawn(move || write(out, &receiver, &counted))?;
        Ok(Self { sender, lost })
    }

    /// Waits until what was logged before is written, half a second at most.
    pub(crate) fn flush(&self) {
        let (done, written) = sync_channel(1);
        if self.sender.try_send(Message::Flush(done)).is_ok() {
            let _ = written.recv_timeout(FLUSH_TIME);
        }
    }
}

/// The subscriber writes a whole line at once.
impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.sender.try_send(Message::Line(line.to_vec())).is_err() {
            self.lost.fetch_add(1, Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// There is nobody to tell of a line that cannot be written.
fn write(mut out: impl Write, messages: &Receiver<Message>, lost: &AtomicU64) {
    for message in messages {
        match message {
            Message::Line(line) => {
                let _ = out.write_all(&line);
            }
            Message::Flush(done) => {
                let _ = out.flush();
                let _ = done.try_send(());
            }
        }
        match lost.swap(0, Relaxed) {
            0 => {}
            count => {
                let _ = writeln!(out, "{count} log lines were lost: they could not be written fast enough");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{PipeReader, Read};
    use std::time::Instant;

    use super::*;

    fn piped() -> (PipeReader, Lines) {
        let (reader, writer) = io::pipe().unwrap();
        (reader, Lines::start(writer).unwrap())
    }

    #[test]
    fn a_reader_that_stands_still_costs_lines_and_no_time() {
        let (mut reader, mut lines) = piped();
        let line = [b'x'; 100].iter().chain(b"\n").copied().collect::<Vec<u8>>();
        let begun = Instant::now();
        for _ in 0..3 * WAITING {
            lines.write_all(&line).unwrap();
        }
        lines.flush();
        assert!(begun.elapsed() < Duration::from_secs(10));
        let lost = lines.lost.load(Relaxed);
        assert!(lost > 0);
        drop(lines);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        let written = text.lines().filter(|line| line.starts_with('x')).count() as u64;
        assert_eq!(written + lost, 3 * WAITING as u64);
        assert!(text.contains(&format!("{lost} log lines were lost")));
    }

    #[test]
    fn a_reader_that_is_gone_is_no_error() {
        let (reader, mut lines) = piped();
        drop(reader);
        lines.write_all(b"into the void\n").unwrap();
        Lines::flush(&lines);
        lines.write_all(b"again\n").unwrap();
    }

    #[test]
    fn flushed_lines_are_there() {
        let (mut reader, mut lines) = piped();
        lines.write_all(b"last word\n").unwrap();
        Lines::flush(&lines);
        let mut text = [0; 10];
        reader.read_exact(&mut text).unwrap();
        assert_eq!(&text, b"last word\n");
    }
}
