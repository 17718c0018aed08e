//! What holds between an exporter and an importer that are separate processes. Each test starts its own binary again
//! as the other process, with the test's name and its part in the environment.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a helper of a test fails like the test")]

use std::ffi::c_void;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use eyrie_region::{
    Epoch, FdDoor, Grant, GrantError, ImportedMemfd, Local, Memfd, MemfdBuilder, Region, RegionKind,
    RingError, RingGeometry, RingReader, RingWriter, SlotRef, TensorGrant, Token, mapping_usage,
};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};

const PART: &str = "EYRIE_REGION_PART";
const SOCKET: &str = "EYRIE_REGION_SOCKET";
const EPOCH: &str = "EYRIE_REGION_EPOCH";
const TIMEOUT: Duration = Duration::from_secs(20);
const SIGSEGV: i32 = 11;
const SIGKILL: i32 = 9;
/// Every test has a door of its own, so the tests can share one token.
const TOKEN: [u8; 32] = *b"the token of these two processes";
const EMBED_BYTES: u64 = 3 << 20;
const RING: RingGeometry = RingGeometry { slots: 4, slot_rows: 8, row_width: 96 };

fn is_other_process() -> bool {
    std::env::var_os(PART).is_some()
}

fn other_process(test: &str, socket: &Path, epoch: Epoch) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture"]);
    command.env(PART, "importer").env(SOCKET, socket).env(EPOCH, epoch.get().to_string());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn socket_path() -> PathBuf {
    std::env::var_os(SOCKET).unwrap().into()
}

fn epoch() -> Epoch {
    std::env::var(EPOCH).unwrap().parse::<u64>().unwrap().try_into().unwrap()
}

fn fetch() -> Vec<OwnedFd> {
    FdDoor::fetch(socket_path(), &Token::from(TOKEN), TIMEOUT).unwrap()
}

fn assert_succeeded(output: &Output) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}\n{}\n{}", output.status, text(&output.stdout), text(&output.stderr));
}

struct Exporter {
    _dir: tempfile::TempDir,
    door: FdDoor,
    embed: Memfd,
    epoch: Epoch,
}

fn embed_byte(i: u64) -> u8 {
    (i.wrapping_mul(0x9e37_79b9) >> 13) as u8
}

fn exporter() -> Exporter {
    let mut builder = MemfdBuilder::new("embed", EMBED_BYTES).unwrap();
    for (i, byte) in builder.bytes_mut().iter_mut().enumerate() {
        *byte = embed_byte(i as u64);
    }
    let embed = builder.seal().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let door = FdDoor::bind(dir.path().join("door.sock")).unwrap();
    door.offer(Token::from(TOKEN), vec![embed.fd().try_clone_to_owned().unwrap()]).unwrap();
    Exporter { _dir: dir, door, embed, epoch: Epoch::random().unwrap() }
}

/// The grant as both processes derive it from the pattern; in the services it travels in a message.
fn grant(region: &dyn Region, epoch: Epoch) -> Grant {
    let shape = [EMBED_BYTES / 2 / 96, 96];
    let embed = TensorGrant::row_major(region, "embed", "bf16", &shape, 0).unwrap();
    Grant {
        epoch,
        export_id: 1,
        kind: RegionKind::Memfd,
        bytes: EMBED_BYTES,
        tensors: vec![embed],
        ring: None,
        ring_payload: None,
        device: "cpu".to_owned(),
        ipc: None,
    }
}

fn import() -> ImportedMemfd {
    ImportedMemfd::import(fetch().pop().unwrap(), EMBED_BYTES).unwrap()
}

#[test]
fn an_importer_verifies_the_grant_and_holds_no_copy() {
    if is_other_process() {
        let region = import();
        let pattern: Vec<u8> = (0..EMBED_BYTES).map(embed_byte).collect();
        let copy = Local::copy_of(&pattern);
        let granted = grant(&copy, epoch());
        granted.verify(&region, epoch()).unwrap();
        let stale = granted.verify(&region, Epoch::random().unwrap()).unwrap_err();
        assert!(matches!(stale, GrantError::StaleEpoch { .. }), "{stale}");
        let mut tampered = granted;
        tampered.tensors[0].checksum[0] ^= 1;
        let wrong = tampered.verify(&region, epoch()).unwrap_err();
        assert!(matches!(wrong, GrantError::Checksum { .. }), "{wrong}");

        let shared = mapping_usage(&region).unwrap();
        assert_eq!(shared.rss, EMBED_BYTES, "{shared:?}");
        assert_eq!((shared.private_dirty, shared.private_clean), (0, 0), "{shared:?}");
        // The same measure sees a copy where there is one.
        assert!(mapping_usage(&copy).unwrap().private_dirty >= EMBED_BYTES);
        return;
    }
    let exporter = exporter();
    let test = "an_importer_verifies_the_grant_and_holds_no_copy";
    let output = other_process(test, exporter.door.path(), exporter.epoch).output().unwrap();
    assert_succeeded(&output);
    grant(&exporter.embed, exporter.epoch).verify(&exporter.embed, exporter.epoch).unwrap();
}

#[test]
fn a_write_through_the_mapping_faults() {
    if is_other_process() {
        let region = import();
        println!("read {}", region.bytes()[1]);
        std::io::stdout().flush().unwrap();
        // SAFETY: none, and that is the point: the page is mapped read-only and this process must die here.
        unsafe { region.bytes().as_ptr().cast_mut().write_volatile(0xee) };
        println!("written");
        return;
    }
    let exporter = exporter();
    let output = other_process("a_write_through_the_mapping_faults", exporter.door.path(), exporter.epoch)
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.signal(), Some(SIGSEGV), "{}: {stdout}", output.status);
    assert!(stdout.contains(&format!("read {}", embed_byte(1))) && !stdout.contains("written"), "{stdout}");
    assert_eq!(exporter.embed.bytes()[0], embed_byte(0));
}

#[test]
fn an_importer_cannot_make_it_writable() {
    if is_other_process() {
        let fd = fetch().pop().unwrap();
        let len = EMBED_BYTES as usize;
        let region = ImportedMemfd::import(fd.try_clone().unwrap(), EMBED_BYTES).unwrap();
        let start = region.bytes().as_ptr().cast_mut().cast::<c_void>();
        // SAFETY: the range is a live mapping of this process; were the call to succeed the test would fail.
        let protect = unsafe { rustix::mm::mprotect(start, len, MprotectFlags::READ | MprotectFlags::WRITE) };
        assert_eq!(protect, Err(rustix::io::Errno::ACCESS));
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let map = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, &fd, 0) };
        assert_eq!(map, Err(rustix::io::Errno::PERM));
        assert_eq!(rustix::io::pwrite(&fd, &[1], 0), Err(rustix::io::Errno::PERM));
        assert!(rustix::fs::ftruncate(&fd, 0).is_err());
        assert_eq!(region.bytes()[0], embed_byte(0));
        return;
    }
    let exporter = exporter();
    let output = other_process("an_importer_cannot_make_it_writable", exporter.door.path(), exporter.epoch)
        .output()
        .unwrap();
    assert_succeeded(&output);
}

#[test]
fn a_mapping_outlives_its_exporter_and_a_killed_door_leaves_a_stale_socket() {
    if is_other_process() {
        let embed = MemfdBuilder::new("embed", EMBED_BYTES).map(|mut builder| {
            builder.bytes_mut().fill(0x5a);
            builder.seal().unwrap()
        });
        let door = FdDoor::bind(socket_path()).unwrap();
        door.offer(Token::from(TOKEN), vec![embed.unwrap().fd().try_clone_to_owned().unwrap()]).unwrap();
        println!("\nserving");
        // Until the parent kills this process.
        std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("door.sock");
    let test = "a_mapping_outlives_its_exporter_and_a_killed_door_leaves_a_stale_socket";
    let mut child = other_process(test, &socket, Epoch::random().unwrap()).spawn().unwrap();
    await_line(&mut child, "serving");
    let fd = FdDoor::fetch(&socket, &Token::from(TOKEN), TIMEOUT).unwrap().pop().unwrap();
    let region = ImportedMemfd::import(fd, EMBED_BYTES).unwrap();
    assert!(FdDoor::bind(&socket).is_err(), "a living door was replaced");
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(SIGKILL));
    assert!(region.bytes().iter().all(|b| *b == 0x5a));
    assert!(socket.exists());
    let successor = FdDoor::bind(&socket).unwrap();
    let error = FdDoor::fetch(successor.path(), &Token::from(TOKEN), TIMEOUT).unwrap_err();
    assert!(error.to_string().contains("token is not known"), "{error}");
}

#[test]
fn a_ring_is_read_by_another_process_while_it_is_written() {
    const READS: u32 = 300;
    if is_other_process() {
        let reader = RingReader::open(fetch().pop().unwrap(), RING, epoch()).unwrap();
        println!("\nreading");
        let (mut whole, mut out) = (0, Vec::new());
        for line in std::io::stdin().lines() {
            let n: u64 = line.unwrap().parse().unwrap();
            // The writer is far ahead by now: walk forward until a slot still holds what it should.
            for n in n.. {
                let slot = ((n - 1) % u64::from(RING.slots)) as u32;
                match reader.read_into(SlotRef { slot, generation: 2 * n, rows: RING.slot_rows }, &mut out) {
                    Ok(()) => {
                        assert!(out.iter().all(|v| v.to_bits() == n as u32), "publication {n} is torn");
                        whole += 1;
                        break;
                    }
                    Err(RingError::Stale { wanted, found, .. }) if found < wanted => break,
                    Err(RingError::Stale { .. }) => {}
                    Err(other) => panic!("{other}"),
                }
            }
        }
        println!("whole {whole}");
        return;
    }
    let exporter = exporter();
    let mut writer = RingWriter::create(RING, exporter.epoch).unwrap();
    let fd = writer.fd().try_clone_to_owned().unwrap();
    exporter.door.offer(Token::from(TOKEN), vec![fd]).unwrap();
    let test = "a_ring_is_read_by_another_process_while_it_is_written";
    let mut child = other_process(test, exporter.door.path(), exporter.epoch).spawn().unwrap();
    let mut stdout = await_line(&mut child, "reading");
    let mut stdin = child.stdin.take().unwrap();
    let values = (RING.slot_rows * RING.row_width) as usize;
    let mut n = 0_u32;
    for _ in 0..READS {
        for _ in 0..500 {
            n += 1;
            writer.publish(&vec![f32::from_bits(n); values]).unwrap();
        }
        writeln!(stdin, "{n}").unwrap();
    }
    drop(stdin);
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    assert_succeeded(&child.wait_with_output().unwrap());
    let whole =
        rest.lines().find_map(|line| line.strip_prefix("whole ")).expect(&rest).parse::<u32>().unwrap();
    assert!(whole > 0, "{rest}");
}

/// Reads the child's output up to `wanted` and returns what follows.
fn await_line(child: &mut Child, wanted: &str) -> BufReader<std::process::ChildStdout> {
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while line.trim_end() != wanted {
        line.clear();
        if stdout.read_line(&mut line).unwrap() == 0 {
            let mut text = String::new();
            child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
            panic!("the other process ended before it said {wanted:?}: {text}");
        }
    }
    stdout
}
