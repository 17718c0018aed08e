//! The first frame of a stream: who speaks, and whether both mean the same model.

use eyrie_wire::v1::Hello;
use eyrie_wire::{PROTOCOL_VERSION, Reason, check_fingerprint, check_hello, refuse};
use tonic::Status;

use crate::state::State;

/// Checks a Hello; returns the boot id it speaks for.
pub(super) fn check(state: &State, hello: Option<Hello>) -> Result<u64, Status> {
    let hello = check_hello(hello)?;
    let epoch = state.epoch.get();
    if hello.epoch != 0 && hello.epoch != epoch {
        let message = format!("hello.epoch must be {epoch:016x}, this boot's, given {:016x}", hello.epoch);
        return Err(refuse(Reason::StaleEpoch, message));
    }
    check_fingerprint(&hello, state.fingerprint())?;
    Ok(hello.boot_id)
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
