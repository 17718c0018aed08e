//! What the other process is told: its part and the grant, by its environment; descriptors come from a door.

use std::error::Error;
use std::io::{BufRead, BufReader, Lines};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use eyrie_region::{
    DeviceRingGeometry, Epoch, FdDoor, Grant, IpcHandle, RingGeometry, RingPayload, TensorGrant, Token,
};

const PART: &str = "EYRIE_CUDA_PART";
const SOCKET: &str = "EYRIE_CUDA_SOCKET";
const GRANT: &str = "EYRIE_CUDA_GRANT";
const TIMEOUT: Duration = Duration::from_secs(20);
pub(crate) const TOKEN: [u8; 32] = *b"the token of these two processes";
pub(crate) const NAME: &str = "lm_head";

pub(crate) fn part() -> Option<String> {
    std::env::var(PART).ok()
}

pub(crate) fn fetch() -> Vec<OwnedFd> {
    let socket = PathBuf::from(std::env::var_os(SOCKET).unwrap());
    FdDoor::fetch(socket, &Token::from(TOKEN), TIMEOUT).unwrap()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex<const N: usize>(text: &str) -> [u8; N] {
    std::array::from_fn(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap())
}

fn handle(text: &str) -> Option<IpcHandle> {
    let (handle, offset) = text.split_once('+')?;
    Some(IpcHandle { handle: unhex(handle), offset: offset.parse().unwrap() })
}

fn handle_text(handle: Option<&IpcHandle>) -> String {
    handle.map_or_else(|| "-".to_owned(), |ipc| format!("{}+{}", hex(&ipc.handle), ipc.offset))
}

/// The grant in one line; in the services it travels in a message.
fn to_text(grant: &Grant) -> String {
    let tensor = &grant.tensors[0];
    let ring = grant.ring.map_or([0; 3], |ring| [ring.slots, ring.slot_rows, ring.row_width]);
    let (value_bytes, payload) =
        grant.ring_payload.map_or((0, None), |payload| (payload.value_bytes, payload.ipc));
    [
        grant.epoch.get().to_string(),
        grant.kind.to_string(),
        grant.bytes.to_string(),
        grant.device.clone(),
        handle_text(grant.ipc.as_ref()),
        hex(&tensor.checksum),
        ring.map(|n| n.to_string()).join(","),
        value_bytes.to_string(),
        handle_text(payload.as_ref()),
    ]
    .join(" ")
}

pub(crate) fn grant() -> Grant {
    let text = std::env::var(GRANT).unwrap();
    let fields: Vec<&str> = text.split(' ').collect();
    let bytes: u64 = fields[2].parse().unwrap();
    let ring: Vec<u32> = fields[6].split(',').map(|n| n.parse().unwrap()).collect();
    let has_ring = ring[0] > 0;
    Grant {
        epoch: Epoch::try_from(fields[0].parse::<u64>().unwrap()).unwrap(),
        export_id: 1,
        kind: fields[1].parse().unwrap(),
        bytes,
        tensors: vec![tensor(bytes, unhex(fields[5]))],
        ring: has_ring.then(|| RingGeometry { slots: ring[0], slot_rows: ring[1], row_width: ring[2] }),
        ring_payload: has_ring
            .then(|| RingPayload { value_bytes: fields[7].parse().unwrap(), ipc: handle(fields[8]) }),
        device: fields[3].to_owned(),
        ipc: handle(fields[4]),
    }
}

pub(crate) fn ring_geometry(grant: &Grant) -> DeviceRingGeometry {
    let value_bytes = grant.ring_payload.unwrap().value_bytes;
    DeviceRingGeometry { ring: grant.ring.unwrap(), value_bytes }
}

fn tensor(bytes: u64, checksum: [u8; 32]) -> TensorGrant {
    TensorGrant {
        name: NAME.to_owned(),
        layout: "plain".to_owned(),
        dtype: "bf16".to_owned(),
        shape: vec![bytes / 2],
        strides: vec![1],
        offset: 0,
        bytes,
        checksum,
    }
}

/// The other process, killed when dropped. It speaks in lines of a word and a value.
pub(crate) struct Other {
    child: Child,
    pub(crate) input: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Other {
    pub(crate) fn start(part: &str, door: &FdDoor, grant: &Grant) -> Result<Self, Box<dyn Error>> {
        let mut command = Command::new(std::env::current_exe()?);
        command.env(PART, part).env(SOCKET, door.path()).env(GRANT, to_text(grant));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (input, output) = (child.stdin.take(), child.stdout.take().unwrap());
        Ok(Self { child, input, lines: BufReader::new(output).lines() })
    }

    /// The value of the next line, which must begin with `word`.
    pub(crate) fn told(&mut self, word: &str) -> Result<String, Box<dyn Error>> {
        let line = self.lines.next().ok_or_else(|| format!("the other process ended before {word:?}"))??;
        match line.split_once(' ') {
            Some((first, value)) if first == word => Ok(value.to_owned()),
            _ => Err(format!("the other process said {line:?} in place of {word:?}").into()),
        }
    }

    pub(crate) fn number(&mut self, word: &str) -> Result<f64, Box<dyn Error>> {
        Ok(self.told(word)?.parse()?)
    }

    /// As by `kill -9`, at once.
    pub(crate) fn kill(mut self) -> Result<(), Box<dyn Error>> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Lets it end by itself, which must succeed.
    pub(crate) fn end(mut self) -> Result<(), Box<dyn Error>> {
        drop(self.input.take());
        let status = self.child.wait()?;
        if status.success() { Ok(()) } else { Err(format!("the other process ended with {status}").into()) }
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // Fails where it has ended already, which is as well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
