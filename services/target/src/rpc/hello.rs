//! The first frame of a stream: who speaks, and whether both mean the same model.

use eyrie_wire::v1::Hello;
use eyrie_wire::{PROTOCOL_VERSION, Reason, refuse};
use tonic::Status;

use super::HELLO_LIMIT;
use crate::state::State;

/// Checks a Hello; returns the boot id it speaks for.
pub(super) fn check(state: &State, hello: Option<&Hello>) -> Result<u64, Status> {
    let hello = hello
        .ok_or_else(|| refuse(Reason::InvalidArgument, "the first frame must carry a hello, given none"))?;
    if hello.protocol_version != PROTOCOL_VERSION {
        let given = hello.protocol_version;
        let message = format!("hello.protocol_version must be {PROTOCOL_VERSION}, given {given}");
        return Err(refuse(Reason::ProtocolVersion, message));
    }
    if hello.boot_id == 0 {
        return Err(refuse(Reason::InvalidArgument, "hello.boot_id must not be 0"));
    }
    let epoch = state.epoch.get();
    if hello.epoch != 0 && hello.epoch != epoch {
        let message = format!("hello.epoch must be {epoch:016x}, this boot's, given {:016x}", hello.epoch);
        return Err(refuse(Reason::StaleEpoch, message));
    }
    if !hello.fingerprint.is_empty() && hello.fingerprint != state.fingerprint() {
        let message = format!(
            "hello.fingerprint must be {}, the served model's, given {}",
            state.fingerprint(),
            hello.fingerprint
        );
        return Err(refuse(Reason::StaleEpoch, message));
    }
    Ok(hello.boot_id)
}

/// What ends a stream whose first frame does not come.
pub(super) fn late() -> Status {
    let limit = HELLO_LIMIT.as_secs();
    refuse(Reason::Deadline, format!("the first frame must come within {limit} s"))
}

/// The Hello that answers one of `boot_id`.
pub(super) fn answer(state: &State, boot_id: u64) -> Hello {
    Hello {
        protocol_version: PROTOCOL_VERSION,
        boot_id,
        epoch: state.epoch.get(),
        fingerprint: state.fingerprint().to_owned(),
    }
}
