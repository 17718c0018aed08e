use std::os::unix::fs::PermissionsExt;

use super::*;

const TIMEOUT: Duration = Duration::from_secs(10);

fn door() -> (tempfile::TempDir, FdDoor) {
    let dir = tempfile::tempdir().unwrap();
    let door = FdDoor::bind(dir.path().join("door.sock")).unwrap();
    (dir, door)
}

fn file(text: &str) -> OwnedFd {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file.into()
}

fn text_of(fd: OwnedFd) -> String {
    let mut file = std::fs::File::from(fd);
    io::Seek::rewind(&mut file).unwrap();
    io::read_to_string(file).unwrap()
}

#[test]
fn a_token_fetches_its_own_descriptors_until_it_is_revoked() {
    let (_dir, door) = door();
    let (a, b) = (Token::random().unwrap(), Token::random().unwrap());
    door.offer(a, vec![file("a0"), file("a1")]).unwrap();
    door.offer(b, vec![file("b0")]).unwrap();
    for _ in 0..2 {
        let fds = FdDoor::fetch(door.path(), &a, TIMEOUT).unwrap();
        assert_eq!(fds.into_iter().map(text_of).collect::<Vec<_>>(), ["a0", "a1"]);
    }
    let fds = FdDoor::fetch(door.path(), &b, TIMEOUT).unwrap();
    assert_eq!(fds.into_iter().map(text_of).collect::<Vec<_>>(), ["b0"]);
    assert_eq!(door.refused(), 0);
    assert!(door.revoke(&a));
    assert!(!door.revoke(&a));
    let error = FdDoor::fetch(door.path(), &a, TIMEOUT).unwrap_err();
    assert!(matches!(&error, DoorError::Refused { reason, .. } if reason == "token is not known"), "{error}");
}

#[test]
fn garbage_silence_and_early_leavers_do_not_wedge_it() {
    let (_dir, door) = door();
    let token = Token::random().unwrap();
    door.offer(token, vec![file("x")]).unwrap();
    let mut garbage = UnixStream::connect(door.path()).unwrap();
    garbage.write_all(&[0xff; 4096]).unwrap();
    drop(UnixStream::connect(door.path()).unwrap());
    let mut half = UnixStream::connect(door.path()).unwrap();
    half.write_all(&[1; 31]).unwrap();
    let silent = UnixStream::connect(door.path()).unwrap();
    assert_eq!(FdDoor::fetch(door.path(), &token, TIMEOUT).unwrap().len(), 1);
    assert_eq!(door.refused(), 4);
    let (answer, fds) = recv_fds(&silent, MAX_ANSWER, MAX_FDS).unwrap();
    assert!(fds.is_empty() && answer.starts_with(b"-no token"), "{answer:?}");
}

#[test]
fn dropping_it_stops_a_client_in_service_and_removes_the_file() {
    let (_dir, door) = door();
    let path = door.path().to_owned();
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let silent = UnixStream::connect(&path).unwrap();
    let begun = Instant::now();
    drop(door);
    assert!(begun.elapsed() < CLIENT_TIME, "it waited for a silent client");
    assert!(!path.exists());
    drop(silent);
    let error = FdDoor::fetch(&path, &Token::random().unwrap(), TIMEOUT).unwrap_err();
    assert!(error.to_string().contains("door.sock"), "{error}");
}

#[test]
fn a_stale_socket_is_replaced_and_a_living_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("door.sock");
    // Closing a listener leaves its file, as a killed process does.
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let door = FdDoor::bind(&path).unwrap();
    assert!(matches!(FdDoor::bind(&path), Err(DoorError::InUse { .. })));
    let token = Token::random().unwrap();
    door.offer(token, vec![]).unwrap();
    assert!(FdDoor::fetch(&path, &token, TIMEOUT).unwrap().is_empty());
}

#[test]
fn what_is_not_its_socket_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("notes.txt");
    std::fs::write(&path, "precious").unwrap();
    assert!(matches!(FdDoor::bind(&path), Err(DoorError::NotASocket { .. })));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");

    let (_dir, door) = door();
    let taken = door.path().to_owned();
    std::fs::remove_file(&taken).unwrap();
    let successor = FdDoor::bind(&taken).unwrap();
    drop(door);
    assert!(taken.exists(), "the successor's file was removed");
    drop(successor);

    let long = dir.path().join("x".repeat(120));
    assert!(matches!(FdDoor::bind(&long), Err(DoorError::PathTooLong { .. })));
}

#[test]
fn a_door_that_never_answers_costs_the_client_its_timeout_only() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mute.sock");
    let _mute = UnixListener::bind(&path).unwrap();
    let error = FdDoor::fetch(&path, &Token::random().unwrap(), Duration::from_millis(20)).unwrap_err();
    assert!(matches!(error, DoorError::Silent { .. }), "{error}");
}

#[test]
fn too_many_descriptors_are_refused_at_the_offer() {
    let (_dir, door) = door();
    let fds = (0..=MAX_FDS).map(|_| file("")).collect();
    let error = door.offer(Token::random().unwrap(), fds).unwrap_err();
    assert!(matches!(error, DoorError::TooMany { limit: MAX_FDS, given } if given == MAX_FDS + 1), "{error}");
    assert_eq!(format!("{:?}", Token::from([7; 32])), "Token(..)");
}
